"""`memplan.find_batch`: the largest batch with which a program's step runs on a card of this machine."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memplan.errors import DoesNotFitError, MissingError, UsageError
from memplan.estimators.calibration import calibrated, keep_calibration
from memplan.estimators.context import context_of
from memplan.estimators.measured import Measurer
from memplan.estimators.registry import best_estimator, estimator_by
from memplan.estimators.rehearsed import Rehearser
from memplan.estimators.running import REHEARSING
from memplan.estimators.target import Target, target_from, target_of
from memplan.estimators.workload_measurement import WorkloadMeasurements
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.detect import detect_gpus
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.memory.estimate import MemoryRange
from memplan.memory.measurement import Measurement, contradiction
from memplan.memory.rehearsal import Rehearsal
from memplan.planner.fitting import heaviest_stage, largest_micro_batch
from memplan.planner.search import largest_fitting
from memplan.planner.trials import (
    DEFAULT_SECONDS,
    DEFAULT_TRIES,
    MOST_BATCH,
    Ended,
    FoundBatch,
    Trial,
    largest_by_trial,
    largest_that_ran,
)  # fmt: skip
from memplan.planner.would_fit import batch_name
from memplan.standin.build import find_torch
from memplan.units import format_bytes
from memplan.workload.workload import Workload


def find_batch(
    program: str | Callable[..., Callable[[], object]],
    *,
    values: Mapping[str, Any] | None = None,
    name: str | None = None,
    start: int | None = None,
    margin: float = DEFAULT_MARGIN,
    most_tries: int = DEFAULT_TRIES,
    most_seconds: float = DEFAULT_SECONDS,
    gpu: GpuSpec | None = None,
    tells: Callable[[Trial], None] | None = None,
) -> FoundBatch:
    """
    Return the largest batch with which the step of *program* runs on a GPU of this machine, found by running it.

    *program* is "FILE.py:function", "module:function", or the function itself, called as ``program("cuda", **values)``; it returns a
    function that runs one whole training step. *name*: the value that is the batch; None takes the first called `batch`, `batch_size` or
    the like. *start*: where to begin; None asks a rehearsal. *margin*: share of the free memory that stays free. *gpu*: None takes the
    first that CUDA shows. *tells* is told of each trial.

    Raises MissingError without a GPU or a PyTorch for CUDA, UsageError for a program that fails for another reason than memory.
    """
    if REHEARSING in os.environ:
        raise UsageError(
            "a program that is being run to find its batch asked for another search",
            hint='call memplan.find_batch under `if __name__ == "__main__":`, so that loading the file does not call it',
        )
    _check(start, margin, most_tries)
    target = target_from(program) if isinstance(program, str) else target_of(program)
    card = calibrated(_card_of_this_machine(gpu), find_torch().version)
    budget = MemoryBudget(total_bytes=card.total_memory_bytes, others_used_bytes=card.others_used_bytes, margin=margin)
    given = dict(values or {})
    begin = _beginning(target, card, budget, given, name, start)
    with Measurer(target, card) as measurer:
        guess = _Guess(begin.size, budget, context_of(card).expected_bytes, begin.reserved)
        search = _Search(lambda size: measurer.measure(given | {begin.name: size}), guess, budget, tells)
        trials, ended = largest_by_trial(search, guess, unit=begin.unit, most_tries=most_tries, most_seconds=most_seconds)
    return search.found(begin.name, trials, ended, card, begin.size, begin.origin)


def _check(start: int | None, margin: float, most_tries: int) -> None:
    """Raise UsageError for what makes no sense, before anything runs."""
    for name, value, is_sound in (
        ("start", start, start is None or start >= 1),
        ("margin", margin, 0 <= margin < 1),
        ("most_tries", most_tries, most_tries >= 1),
    ):
        if not is_sound:
            raise UsageError(f"{name}={value} makes no sense", hint="a start and tries from 1 on, a margin from 0 to below 1")


def _card_of_this_machine(gpu: GpuSpec | None) -> GpuSpec:
    """Return *gpu* where it is of this machine, or the one with least free. Raises UsageError for another's."""
    found = detect_gpus()
    if gpu is None:
        return min(found, key=lambda card: card.free_memory_bytes)
    if not any((card.uuid, card.name) == (gpu.uuid, gpu.name) for card in found):
        here = ", ".join(card.name for card in found)
        raise UsageError(f"{gpu.name} is not a GPU of this machine ({here})", hint="take one of `memplan.hardware.detect.detect_gpus()`")
    return gpu


def find_micro_batch(
    workload: Workload,
    card: GpuSpec,
    *,
    method: str = "auto",
    start: int | None = None,
    margin: float = DEFAULT_MARGIN,
    most_tries: int = DEFAULT_TRIES,
    most_seconds: float = DEFAULT_SECONDS,
    tells: Callable[[Trial], None] | None = None,
) -> FoundBatch:
    """
    Return the largest micro-batch with which the heaviest stage of *workload* runs on *card*, of this machine; else as `find_batch`.

    *start*: None asks the estimator of *method*.
    """
    _check(start, margin, most_tries)
    budget = MemoryBudget(total_bytes=card.total_memory_bytes, others_used_bytes=card.others_used_bytes, margin=margin)
    method, estimator, _ = best_estimator() if method == "auto" else (method, estimator_by(method), None)

    def of_size(size: int) -> Workload:
        return workload.with_training(micro_batch_size=size)

    begin = start or largest_micro_batch(of_size, card, estimator, budget, most=MOST_BATCH) or 1
    stage = heaviest_stage(of_size(begin), card, estimator)
    with WorkloadMeasurements(card) as measure:
        guess = _Guess(begin, budget, context_of(card).expected_bytes)
        search = _Search(lambda size: measure(of_size(size), card, stage), guess, budget, tells)
        trials, ended = largest_by_trial(search, guess, most_tries=most_tries, most_seconds=most_seconds)
    return search.found("micro_batch_size", trials, ended, card, begin, "you" if start else f"the plan ({method})")


MOST_POWER = 5
"""The largest power of two that is tried for the least that a program takes."""


class _Search:
    """Runs trials, and makes of them what was found."""

    def __init__(
        self, measure: Callable[[int], Measurement], guess: _Guess, budget: MemoryBudget, tells: Callable[[Trial], None] | None
    ) -> None:
        self._measure = measure
        self._guess = guess
        self._budget = budget
        self._tells = tells
        self._whole: list[Measurement] = []

    def __call__(self, size: int) -> Trial:
        """Run the step with *size*, and tell of it."""
        began = time.monotonic()
        try:
            measured = self._measure(size)
            if measured.fits:
                self._whole.append(measured)
                self._guess.learn(size, measured)
            trial = Trial(size=size, device_used_bytes=measured.device_used_bytes, problem=contradiction(measured, self._budget))
        except DoesNotFitError as error:
            trial = Trial(size=size, problem=error.message)
        except UsageError as error:
            if not self._whole:
                raise  # it may not be the size
            reason = error.message.splitlines()[0].removesuffix("; its last words:")
            trial = Trial(size=size, problem=f"the program does not take it: {reason}", is_refused=True)
        trial = trial.model_copy(update={"seconds": time.monotonic() - began})
        if self._tells is not None:
            self._tells(trial)
        return trial

    def found(self, name: str, trials: list[Trial], ended: Ended, card: GpuSpec, start: int, origin: str) -> FoundBatch:
        """Return what *trials* found; what was learnt of the card is kept."""
        keep_calibration(card, self._whole)
        size = largest_that_ran(trials)
        if ended == "found" and any(trial.is_refused and trial.size == (size or 0) + 1 for trial in trials):
            ended = "refused"
        return FoundBatch(
            name=name,
            size=size,
            start=trials[0].size if trials else start,
            start_is_from=origin,
            ended=ended,
            budget_bytes=self._budget.budget_bytes,
            card=card.name,
            trials=tuple(trials),
        )


class _Guess:
    """
    Guesses whether a size fits: as if memory were a straight line through the two nearest sizes of which it is known.

    *reserved*: peaks that a rehearsal saw, by size. Until two sizes are known, *start* is where it thinks that the end is.
    """

    def __init__(self, start: int, budget: MemoryBudget, outside_bytes: int, reserved: Mapping[int, int] | None = None) -> None:
        self._start = start
        self._budget_bytes = budget.budget_bytes
        self._outside_bytes = outside_bytes
        self._reserved = dict(reserved or {})

    def learn(self, size: int, measured: Measurement) -> None:
        """Take in what a trial showed that ran to its end: its own peak, and what CUDA takes beside PyTorch."""
        self._reserved[size] = measured.peak_reserved_bytes
        self._outside_bytes = measured.device_used.expected_bytes - measured.peak_reserved_bytes

    def __call__(self, size: int) -> bool:
        """Say whether *size* fits, as far as is known."""
        nearest = sorted(sorted(self._reserved.items(), key=lambda each: abs(each[0] - size))[:2])
        if len(nearest) < 2:
            return size <= self._start
        (low, low_bytes), (high, high_bytes) = nearest
        return low_bytes + max(0, high_bytes - low_bytes) * (size - low) // (high - low) + self._outside_bytes <= self._budget_bytes


class _Beginning(NamedTuple):
    """Where a search begins."""

    name: str
    """The value to vary."""
    size: int
    origin: str
    """Who said so."""
    unit: int = 1
    """What sizes are multiples of: a program may take no others."""
    reserved: Mapping[int, int] | None = None
    """Peaks that a rehearsal saw, by size."""


def _beginning(
    target: Target, card: GpuSpec, budget: MemoryBudget, values: dict[str, Any], name: str | None, start: int | None
) -> _Beginning:
    try:
        with Rehearser(target) as rehearser:

            def rehearse(tried: Mapping[str, Any]) -> Rehearsal:
                return rehearser.rehearse(gpu=of_some_kind(card).endless(), values=tried, looks=False)

            varied = name or _name_of(rehearse, values)

            def reserved(size: int) -> int:
                return rehearse(values | {varied: size}).peak_reserved_bytes

            if start is None:
                return _foreseen(varied, budget, context_of(card), reserved)
            least, unit = _least_and_unit(reserved)
            return _Beginning(
                varied, max(least, start // unit * unit), "you" if start % unit == 0 and start >= least else "the program", unit
            )
    except MissingError as error:
        name = name or batch_name(values)
        if name is None:
            raise UsageError(
                "nobody knows which value is the batch, since the program cannot be rehearsed here: " + error.message,
                hint="name it with `--value NAME`, and its value with `--set`",
            ) from error
        found = values.get(name)
        return _Beginning(name, start or (found if isinstance(found, int) and found > 0 else 1), f"the program, since {error.message}")


def _name_of(rehearse: Callable[[Mapping[str, Any]], Rehearsal], values: Mapping[str, Any]) -> str:
    """Return which value of the program is the batch. Raises UsageError where none is called so."""
    try:
        present = rehearse(values).values
    except UsageError as error:
        required = re.search(r"missing a required argument: '(\w+)'", error.message)  # as inspect says it, of the first
        if required is None or batch_name({required[1]: 1}) is None:
            raise
        return required[1]
    name = batch_name(present)
    if name is None:
        called = ", ".join(present) or "none"
        raise UsageError(f"no value of the program is called batch (its values: {called})", hint="name it with `--value NAME`")
    return name


def _foreseen(name: str, budget: MemoryBudget, context: MemoryRange, rehearse: Callable[[int], int]) -> _Beginning:
    """Return the largest size that fits *budget* with its reserved peak, by *rehearse*, and *context*."""
    known: dict[int, int] = {}

    def reserved(size: int) -> int:
        if size not in known:
            known[size] = rehearse(size)
        return known[size]

    least, unit = _least_and_unit(reserved)
    reserved(least + unit)

    def fits(count: int) -> bool:
        try:
            return reserved(count * unit) + context.expected_bytes <= budget.budget_bytes
        except UsageError:  # a size that the program does not take
            return False

    def rough(count: int) -> bool:
        return _Guess(least, budget, context.expected_bytes, known)(count * unit)

    found = largest_fitting(fits, low=least // unit, high=MOST_BATCH // unit, rough=rough)
    size = least if found is None else found * unit
    told = f"a rehearsal, {'with' if found else 'though even that takes'} {format_bytes(known[size])}"
    return _Beginning(name, size, told, unit, known)


def _least_and_unit(reserved: Callable[[int], int]) -> tuple[int, int]:
    """
    Return the smallest power of two that the program takes, and what the sizes that it takes are multiples of.

    Batch normalisation refuses a single sample and takes all others; some programs take multiples of 8 only. Raises UsageError where the
    program takes none.
    """
    for power in range(MOST_POWER + 1):
        least = 2**power
        try:
            reserved(least)
        except UsageError:
            if power == MOST_POWER:
                raise
        else:
            break
    if least > 1:
        try:
            reserved(least + 1)
        except UsageError:
            return least, least
    return least, 1
