"""A step to be rehearsed, and what runs one: built from a workload, or by the user's own program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryRange
from memplan.workload.program import Program
from memplan.workload.stage import Stage

MOST_MICRO_BATCHES = 2
"""Micro-batches of a step that are run: with the second the gradients are there, and each that follows is like it."""


class Step(NamedTuple):
    """A step to be rehearsed: what it has in common with other sizes, and its size."""

    family: str
    """Equal for steps that differ in nothing but their micro-batch."""
    micro_batch_size: int
    likeness: str
    """Equal for steps that differ in nothing but their micro-batch and the kind of GPU."""
    program: Program
    """Of one stage, with at most `MOST_MICRO_BATCHES`."""
    gpu: GpuSpec
    """With unlimited memory."""


class StepRunner(ABC):
    """Makes steps of one kind of program, and runs them."""

    @abstractmethod
    def step_of(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Step:
        """Return what of *program*, *gpu* and *stage* decides a rehearsal."""

    @abstractmethod
    def check(self, step: Step) -> None:
        """Raise NotRehearsedError for a step that is known not to run: no process has to begin for that."""

    @abstractmethod
    def rehearse(self, step: Step) -> Rehearsal:
        """Return what *step* does, with its trace. Raises NotRehearsedError where it cannot be run, or its memory cannot be known."""

    def rehearse_beginning(self, step: Step) -> Rehearsal | None:
        """Return what the first two optimizer steps of *step* do; None where all of it is run as soon. Raises as `rehearse`."""
        del step
        return None

    @abstractmethod
    def kept_as(self, step: Step) -> str | None:
        """Return the family under which a cache has what *step* does as things are now; None where nothing can be kept of it."""

    @abstractmethod
    def by_formula(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """Return what formulas say of the step; None where there are none."""


def with_fewest_micro_batches(program: Program, stage: Stage | None) -> Program:
    """Return *program* as it is run for *stage*: alone, with no more micro-batches than tell of all, and without what decides nothing."""
    micro_batches = min(program.training.gradient_accumulation_steps, MOST_MICRO_BATCHES)
    reduced = program.with_training(gradient_accumulation_steps=micro_batches, target_effective_batch_size=None)
    return reduced.model_copy(update={"stages": () if stage is None else (stage,)})
