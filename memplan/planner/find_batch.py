"""`memplan.find_batch`: the largest batch with which a program's step runs on a card of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from memplan.errors import DoesNotFitError, MissingError, UsageError
from memplan.estimators.calibration import calibrated, keep_calibration
from memplan.estimators.context import context_of
from memplan.estimators.measured import Measurer
from memplan.estimators.registry import best_estimator
from memplan.estimators.rehearsed import Rehearser
from memplan.estimators.running import REHEARSING
from memplan.estimators.target import Target, target_from, target_of
from memplan.estimators.workload_measurement import WorkloadMeasurements
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.detect import detect_gpus
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
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
    sizes_to_begin_with,
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
    target = target_from(program) if isinstance(program, str) else target_of(program)
    card = gpu or calibrated(detect_gpus()[0], find_torch().version)
    budget = MemoryBudget(total_bytes=card.total_memory_bytes, others_used_bytes=card.others_used_bytes, margin=margin)
    given = dict(values or {})
    name, begin, origin = _beginning(target, card, budget, given, name, start)
    with Measurer(target, card) as measurer:
        search = _Search(lambda size: measurer.measure(given | {name: size}), budget, tells)
        trials, ended = largest_by_trial(search, start=begin, most_tries=most_tries, most_seconds=most_seconds)
    return search.found(name, trials, ended, card, begin, origin)


def find_micro_batch(
    workload: Workload,
    card: GpuSpec,
    *,
    start: int | None = None,
    margin: float = DEFAULT_MARGIN,
    most_tries: int = DEFAULT_TRIES,
    most_seconds: float = DEFAULT_SECONDS,
    tells: Callable[[Trial], None] | None = None,
) -> FoundBatch:
    """
    Return the largest micro-batch with which the heaviest stage of *workload* runs on *card*, of this machine; else as `find_batch`.

    *start*: None asks the best estimator that there is.
    """
    budget = MemoryBudget(total_bytes=card.total_memory_bytes, others_used_bytes=card.others_used_bytes, margin=margin)
    method, estimator, _ = best_estimator()

    def of_size(size: int) -> Workload:
        return workload.with_training(micro_batch_size=size)

    begin = start or largest_micro_batch(of_size, card, estimator, budget, most=MOST_BATCH) or 1
    stage = heaviest_stage(of_size(begin), card, estimator)
    with WorkloadMeasurements(card) as measure:
        search = _Search(lambda size: measure(of_size(size), card, stage), budget, tells)
        trials, ended = largest_by_trial(search, start=begin, most_tries=most_tries, most_seconds=most_seconds)
    return search.found("micro_batch_size", trials, ended, card, begin, "you" if start else f"the plan ({method})")


class _Search:
    """Runs trials, and makes of them what was found."""

    def __init__(self, measure: Callable[[int], Measurement], budget: MemoryBudget, tells: Callable[[Trial], None] | None) -> None:
        self._measure = measure
        self._budget = budget
        self._tells = tells
        self._last: Measurement | None = None

    def __call__(self, size: int) -> Trial:
        """Run the step with *size*, and tell of it."""
        began = time.monotonic()
        try:
            self._last = measured = self._measure(size)
            trial = Trial(size=size, device_used_bytes=measured.device_used_bytes, problem=contradiction(measured, self._budget))
        except DoesNotFitError as error:
            trial = Trial(size=size, problem=error.message)
        trial = trial.model_copy(update={"seconds": time.monotonic() - began})
        if self._tells is not None:
            self._tells(trial)
        return trial

    def found(self, name: str, trials: list[Trial], ended: Ended, card: GpuSpec, start: int, origin: str) -> FoundBatch:
        """Return what *trials* found; what was learnt of the card is kept."""
        if self._last is not None:
            keep_calibration(card, self._last)
        return FoundBatch(
            name=name,
            size=largest_that_ran(trials),
            start=start,
            start_is_from=origin,
            ended=ended,
            budget_bytes=self._budget.budget_bytes,
            card=card.name,
            trials=tuple(trials),
        )


def _beginning(
    target: Target, card: GpuSpec, budget: MemoryBudget, values: dict[str, Any], name: str | None, start: int | None
) -> tuple[str, int, str]:
    """Return the value to vary, where to begin, and who said so."""
    if name is not None and start is not None:
        return name, start, "you"
    try:
        with Rehearser(target) as rehearser:
            return _rehearsed_beginning(rehearser, card, budget, values, name, start)
    except MissingError as error:
        name = name or batch_name(values)
        if name is None:
            raise UsageError(
                "nobody knows which value is the batch, since the program cannot be rehearsed here: " + error.message,
                hint="name it with `--value NAME`, and its value with `--set`",
            ) from error
        found = values.get(name)
        return name, start or (found if isinstance(found, int) and found > 0 else 1), f"the program, since {error.message}"


def _rehearsed_beginning(
    rehearser: Rehearser, card: GpuSpec, budget: MemoryBudget, values: dict[str, Any], name: str | None, start: int | None
) -> tuple[str, int, str]:
    endless, room = of_some_kind(card).endless(), budget.budget_bytes - context_of(card).expected_bytes
    known: dict[int, int] = {}

    def rehearse(tried: Mapping[str, Any]) -> Rehearsal:
        return rehearser.rehearse(gpu=endless, values=tried, looks=False, library_workspaces=True)

    if name is None:
        present = rehearse(values)
        name = batch_name(present.values)
        if name is None:
            called = ", ".join(present.values) or "none"
            raise UsageError(f"no value of the program is called batch (its values: {called})", hint="name it with `--value NAME`")
        known[int(str(present.values[name]))] = present.peak_reserved_bytes
    if start is not None:
        return name, start, "you"
    varied = name

    def reserved(size: int) -> int:
        if size not in known:
            known[size] = rehearse(values | {varied: size}).peak_reserved_bytes
        return known[size]

    problem = _know_two(reserved, known)
    if problem is not None:
        raise problem

    def rough(size: int) -> bool:
        """Say whether *size* fits, if memory is a straight line through the two sizes nearest to it."""
        (low, low_bytes), (high, high_bytes) = sorted(sorted(known.items(), key=lambda each: abs(each[0] - size))[:2])
        return low_bytes + max(0, high_bytes - low_bytes) * (size - low) // (high - low) <= room

    def fits(size: int) -> bool:
        try:
            return reserved(size) <= room
        except UsageError:  # a size that the program does not take
            return False

    found = largest_fitting(fits, low=min(known), high=MOST_BATCH, rough=rough)
    return name, found or 1, f"a rehearsal, with {format_bytes(known[found]) if found else 'none that fits'}"


def _know_two(reserved: Callable[[int], int], known: dict[int, int]) -> UsageError | None:
    """Rehearse small sizes until two are known; return why the program takes none, where it takes none."""
    problem = None
    for size in sizes_to_begin_with():
        if len(known) >= 2:
            return None
        try:
            reserved(size)
        except UsageError as error:
            problem = error
    return problem if len(known) < 2 else None
