"""`memplan.find_batch`: the largest batch with which a program's step runs on a card of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from memplan.errors import DoesNotFitError, UsageError
from memplan.estimators.calibration import calibrated, keep_calibration
from memplan.estimators.context import context_of
from memplan.estimators.measured import Measurer
from memplan.estimators.registry import best_estimator, estimator_by
from memplan.estimators.running import REHEARSING, first_line
from memplan.estimators.target import target_from, target_of
from memplan.estimators.workload_measurement import WorkloadMeasurements
from memplan.hardware.detect import detect_gpus
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.memory.measurement import Measurement, contradiction
from memplan.planner.beginning import Guess, beginning_of
from memplan.planner.fitting import budget_of, heaviest_stage, largest_micro_batch
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
from memplan.standin.build import find_torch
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
    the like. *start*: where to begin; None asks a rehearsal. *margin*: share of the free memory that stays free. *gpu*: one that
    `detect_gpus` found; None takes the one of them with least free. *tells* is told of each trial.

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
    budget = budget_of(card, margin)
    given = dict(values or {})
    begin = beginning_of(target, card, budget, given, name, start)
    with Measurer(target, card) as measurer:
        guess = Guess(begin.size, budget, context_of(card).expected_bytes, begin.reserved)
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
    budget = budget_of(card, margin, workload.training.allocator_settings)
    method, estimator, _ = (method, estimator_by(method), None) if method in ("analytic", "rehearsed") else best_estimator()

    def of_size(size: int) -> Workload:
        return workload.with_training(micro_batch_size=size)

    begin = start or largest_micro_batch(of_size, card, estimator, budget, most=MOST_BATCH) or 1
    stage = heaviest_stage(of_size(begin), card, estimator)
    with WorkloadMeasurements(card) as measure:
        guess = Guess(begin, budget, context_of(card).expected_bytes)
        search = _Search(lambda size: measure(of_size(size), card, stage), guess, budget, tells)
        trials, ended = largest_by_trial(search, guess, most_tries=most_tries, most_seconds=most_seconds)
    return search.found("micro_batch_size", trials, ended, card, begin, "you" if start else f"the plan ({method})")


class _Search:
    """Runs trials, and makes of them what was found."""

    def __init__(
        self, measure: Callable[[int], Measurement], guess: Guess, budget: MemoryBudget, tells: Callable[[Trial], None] | None
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
            trial = Trial(size=size, problem=f"the program does not take it: {first_line(error)}", is_refused=True)
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
