"""A step to be rehearsed, and what runs one: built from a workload, or by the user's own program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from memplan.errors import MemplanError
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryRange
from memplan.workload.program import Program
from memplan.workload.stage import Stage

if TYPE_CHECKING:
    from memplan.estimators.beside import Begun, Beside, Job
    from memplan.execution.program_runs import ProgramProgress

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
    num_likely: int = 0
    """How many others will probably be asked for, as far as that is known when this one begins."""
    where: str | None = None
    """Where its program is, where it has not ended an optimizer step for long; empty when it has; None of a step that begins."""


class StepRunner(ABC):
    """Makes steps of one kind of program, and runs them."""

    def __init__(self) -> None:
        self._beside: Beside | None = None
        self.is_searching = False
        """What is run now only orders or rules out: values that decided nothing with another size may be taken to decide nothing."""
        self.on_where: Callable[[str], None] | None = None
        """Called from time to time with where a program is that has not ended an optimizer step for long; empty: it has."""

    @abstractmethod
    def step_of(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Step:
        """Return what of *program*, *gpu* and *stage* decides a rehearsal."""

    @abstractmethod
    def check(self, step: Step) -> None:
        """Raise NotRehearsedError for a step that is known not to run: no process has to begin for that."""

    @abstractmethod
    def rehearse(self, step: Step) -> Rehearsal:
        """Return what *step* does, with its trace. Raises NotRehearsedError where it cannot be run, or its memory cannot be known."""

    def learn(self, step: Step, found: Rehearsal) -> None:
        """Take in what a run of *step* was like that was kept, and is not made again."""
        del step, found

    def suffices(self, step: Step, found: Rehearsal) -> bool:
        """Say whether *found*, what *step* did, is enough by what is known of its program now: another size may have shown it to vary."""
        del step, found
        return True

    def sizes_to_confirm(self, step: Step) -> Iterable[int]:
        """
        Yield micro-batches with which *step*, which was run, would show that its program reads the one that it is given, until that is
        known. A program that asks for the same memory with all of them is an error of the run that shows it.
        """
        del step
        return ()

    def begin(self, step: Step) -> None:
        """Run *step* beside what is asked for meanwhile, where there is room for that; `rehearse` has it then."""
        job = self.job_of(step)
        if job is None:
            return
        if self._beside is None:
            from memplan.estimators.beside import Beside  # noqa: PLC0415  (a plan whose rehearsals are kept runs nothing)

            self._beside = Beside()
        self._beside.begin((step.family, step.micro_batch_size), job)

    def begun(self, step: Step) -> Begun | None:
        """Return what came of *step*, where it was begun, when that is done; None where it has to be run."""
        return None if self._beside is None else self._beside.take((step.family, step.micro_batch_size), on_progress=self.tell)

    def tell(self, progress: ProgramProgress) -> None:
        """Take in how far the step is that is waited for."""
        del progress

    def run_apart(self, run: Callable[[], Rehearsal]) -> Rehearsal:
        """
        Return what *run* returns, or raise what it raises.

        Where it fails while another is run beside it that does not, it is run again alone: both may want the same port.
        """
        beside = self._beside
        in_the_way = beside.meanwhile() if beside is not None else list
        try:
            found = run()
        except MemplanError:
            if beside is None or beside.all_fail(in_the_way()):
                raise
        else:
            if is_answer(found) or beside is None or beside.all_fail(in_the_way()):
                return found
        self.end()
        return run()

    def end(self) -> None:
        """End what was begun."""
        if self._beside is not None:
            self._beside.end()

    def job_of(self, step: Step) -> Job | None:
        """Return what another process does to run *step*; None where it is to be run in its turn."""
        del step
        return None

    def beginning_of(self, step: Step) -> Callable[[], Rehearsal] | None:
        """Return what runs the first optimizer steps of *step* alone, and raises as `rehearse`; None where all of it is run as soon."""
        del step
        return None

    def takes_values_for_nothing(self, step: Step) -> bool:
        """Say whether values that *step* reads are known to decide nothing with another size, and with none to decide something."""
        del step
        return False

    @abstractmethod
    def kept_as(self, step: Step) -> str | None:
        """Return the family under which a cache has what *step* does as things are now; None where nothing can be kept of it."""

    @abstractmethod
    def by_formula(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """Return what formulas say of the step; None where there are none."""


def is_answer(rehearsal: Rehearsal) -> bool:
    """Say whether a plan can rest on *rehearsal*: the program did not fail, and no size in it was guessed."""
    return rehearsal.failure is None and not rehearsal.lower_bound_reasons


def with_fewest_micro_batches(program: Program, stage: Stage | None) -> Program:
    """Return *program* as it is run for *stage*: alone, with no more micro-batches than tell of all, and without what decides nothing."""
    micro_batches = program.training.gradient_accumulation_steps
    if program.parallelism.pipeline_parallel_size == 1:  # the stages of a pipeline hold several at once
        micro_batches = min(micro_batches, MOST_MICRO_BATCHES)
    reduced = program.with_training(gradient_accumulation_steps=micro_batches, target_effective_batch_size=None)
    return reduced.model_copy(update={"stages": () if stage is None else (stage,)})
