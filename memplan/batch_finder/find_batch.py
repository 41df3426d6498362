"""`memplan.find_batch`: the largest batch with which a program's step runs on a GPU of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memplan.batch_finder.foresight import ByPeaks, Foresight, foresight_of
from memplan.batch_finder.trials import (
    DEFAULT_SECONDS,
    DEFAULT_TRIES,
    MOST_BATCH,
    FoundBatch,
    Trial,
    largest_by_trial,
    largest_that_ran,
)  # fmt: skip
from memplan.errors import DoesNotFitError, UsageError
from memplan.estimators.base import Estimator
from memplan.estimators.calibration import calibrated, keep_calibration
from memplan.estimators.measured import MeasuredEstimator
from memplan.execution.measure import Measurer
from memplan.execution.measurement import Measurement, contradiction
from memplan.execution.runner import REHEARSING, first_line
from memplan.execution.step_source import step_source_from, step_source_of
from memplan.hardware.detect import detect_gpus
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import find_torch
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.memory.cuda_context import context_of
from memplan.planner.fitting import budget_of, heaviest_stage, largest_micro_batch
from memplan.workload.program import Program
from memplan.workload.stage import Stage


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
    on_trial: Callable[[Trial], None] | None = None,
) -> FoundBatch:
    """
    Return the largest batch with which the step of *program* runs on a GPU of this machine, found by running it.

    *program* is "FILE.py:function", "module:function", or the function itself, called as ``program("cuda", **values)``; it returns a
    function that runs one whole training step. *name*: the value that is the batch; None takes the first called `batch`, `batch_size` or
    the like. *start*: where to begin; None asks a rehearsal. *margin*: share of the free memory that stays free. *gpu*: one that
    `detect_gpus` found; None takes the one of them with least free. *on_trial* is called after each trial.

    Raises MissingError without a GPU or a PyTorch for CUDA, UsageError for a program that fails for another reason than memory.

    >>> import memplan
    >>> found = memplan.find_batch("train_step.py:build", start=8, most_tries=2)
    >>> found.name, found.size >= 8
    ('batch', True)

    """
    if REHEARSING in os.environ:
        raise UsageError(
            "a program that is being run to find its batch asked for another search",
            hint='call memplan.find_batch under `if __name__ == "__main__":`, so that loading the file does not call it',
        )
    _check(start, margin, most_tries)
    target = step_source_from(program) if isinstance(program, str) else step_source_of(program)
    card = calibrated(_gpu_of_this_machine(gpu), find_torch().version)
    budget = budget_of(card, margin)
    given = dict(values or {})
    with foresight_of(target, card, budget, given, name=name, start=start) as foresight, Measurer(target, card) as measurer:
        search = _Search(lambda size: measurer.measure(given | {foresight.name: size}), foresight, budget, on_trial)
        return search.found(card, most_tries=most_tries, most_seconds=most_seconds)


def _check(start: int | None, margin: float, most_tries: int) -> None:
    """Raise UsageError for what makes no sense, before anything runs."""
    for name, value, is_sound in (
        ("start", start, start is None or (isinstance(start, int) and start >= 1)),
        ("margin", margin, isinstance(margin, (int, float)) and 0 <= margin < 1),
        ("most_tries", most_tries, isinstance(most_tries, int) and most_tries >= 1),
    ):
        if not is_sound:
            raise UsageError(f"{name}={value} is not valid", hint="use 1 or more for start and most_tries, 0 to below 1 for margin")


def _gpu_of_this_machine(gpu: GpuSpec | None) -> GpuSpec:
    """Return *gpu* where it is of this machine, or the one with least free. Raises UsageError for another's."""
    found = detect_gpus()
    if gpu is None:
        return min(found, key=lambda card: card.free_memory_bytes)
    if not any((card.uuid, card.name) == (gpu.uuid, gpu.name) for card in found):
        here = ", ".join(card.name for card in found)
        raise UsageError(f"{gpu.name} is not a GPU of this machine ({here})", hint="take one of `memplan.hardware.detect.detect_gpus()`")
    return gpu


class Begin(NamedTuple):
    """Where the search for a program's micro-batch begins."""

    size: int
    stage: Stage | None
    """The stage that takes most."""
    origin: str
    """Who said so."""


def begin_by(estimator: Estimator, program: Program, gpu: GpuSpec, *, start: int | None, margin: float) -> Begin:
    """Return where to begin for *program* on *gpu*: at *start*, or where *estimator* sees the end."""
    _check(start, margin, DEFAULT_TRIES)
    budget = budget_of(gpu, margin, program)

    def of_size(size: int) -> Program:
        return program.with_training(micro_batch_size=size)

    size = start or largest_micro_batch(of_size, gpu, estimator, budget, most=MOST_BATCH).size or 1
    stage = heaviest_stage(of_size(size), gpu, estimator)
    return Begin(size, stage, "you" if start else f"the plan ({estimator.method})")


def find_micro_batch(
    program: Program,
    gpu: GpuSpec,
    begin: Begin,
    *,
    margin: float = DEFAULT_MARGIN,
    most_tries: int = DEFAULT_TRIES,
    most_seconds: float = DEFAULT_SECONDS,
    on_trial: Callable[[Trial], None] | None = None,
) -> FoundBatch:
    """Return the largest micro-batch with which the heaviest stage of *program* runs on *gpu*, of this machine; else as `find_batch`."""
    _check(begin.size, margin, most_tries)
    budget = budget_of(gpu, margin, program)
    foresight = ByPeaks("micro_batch_size", begin.size, begin.origin, budget, context_of(gpu).expected_bytes)
    with MeasuredEstimator(gpu) as measure:
        search = _Search(lambda size: measure(program.with_training(micro_batch_size=size), gpu, begin.stage), foresight, budget, on_trial)
        return search.found(gpu, most_tries=most_tries, most_seconds=most_seconds)


class _Search:
    """Runs trials, and makes of them what was found."""

    def __init__(
        self, measure: Callable[[int], Measurement], foresight: Foresight, budget: MemoryBudget, on_trial: Callable[[Trial], None] | None
    ) -> None:
        self._measure = measure
        self._foresight = foresight
        self._budget = budget
        self._on_trial = on_trial
        self._whole: list[Measurement] = []
        self._refusals: list[UsageError] = []

    def __call__(self, size: int) -> Trial:
        """Run the step with *size*, and tell of it."""
        began = time.monotonic()
        try:
            measured = self._measure(size)
            if measured.fits:
                self._whole.append(measured)
                self._foresight.learn(size, measured)
            trial = Trial(size=size, device_used_bytes=measured.device_used_bytes, problem=contradiction(measured, self._budget))
        except DoesNotFitError as error:
            trial = Trial(size=size, problem=error.message)
        except UsageError as error:
            self._refusals.append(error)
            trial = Trial(size=size, problem=f"the program does not take it: {first_line(error)}", is_refused=True)
        trial = trial.model_copy(update={"seconds": time.monotonic() - began})
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial

    def found(self, gpu: GpuSpec, *, most_tries: int, most_seconds: float) -> FoundBatch:
        """
        Run the trials; return what they found. What was learnt of the GPU is kept.

        Raises the program's own error where it refused every size: it may not be the size.
        """
        foresight = self._foresight
        trials, ended = largest_by_trial(
            self,
            foresight,
            leaps=foresight.is_nearly_sure,
            unit=foresight.unit,
            refused=foresight.refused,
            most_tries=most_tries,
            most_seconds=most_seconds,
        )
        keep_calibration(gpu, self._whole)
        if self._refusals and len(self._refusals) == len(trials):
            raise self._refusals[0]
        return FoundBatch(
            name=foresight.name,
            size=largest_that_ran(trials),
            start=trials[0].size if trials else foresight.start,
            start_is_from=foresight.origin,
            ended=ended,
            budget_bytes=self._budget.budget_bytes,
            gpu_name=gpu.name,
            trials=tuple(trials),
        )
