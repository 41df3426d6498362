"""A profile: the steps of a plan run on the GPU itself, beside what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pydantic import PositiveInt

from memplan.description import Description
from memplan.execution.measurement import Measurement, contradiction
from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryEstimate
from memplan.planner.plan import Plan
from memplan.workload.program import Program
from memplan.workload.stage import Stage


class StageProfile(Description):
    """The step of one or several stages that take the same, as planned and as it ran."""

    stages: tuple[str, ...]
    """Their names."""

    estimate: MemoryEstimate
    """What was planned."""

    measured: Measurement
    """What the GPU showed."""

    contradiction: str | None
    """Why the plan does not hold; None where it does."""

    rank: int = 0
    """Of the process that ran it, where several did."""


class Profile(Description):
    """What the GPU says to a plan."""

    stages: tuple[StageProfile, ...]
    """Each step that was run."""

    num_ranks: PositiveInt = 1
    """Processes that ran them, each on its own GPU; those told of took most."""

    is_kept: bool = False
    """Whether what was learnt of this machine is kept for the next plan."""

    @property
    def contradiction(self) -> str | None:
        """Return why the plan does not hold; None where it does."""
        return next((f"{' and '.join(stage.stages)}: {stage.contradiction}" for stage in self.stages if stage.contradiction), None)


def profile_of(plan: Plan, measure: Callable[[Program, GpuSpec, Stage | None], Measurement]) -> tuple[StageProfile, ...]:
    """Return the steps of *plan* as *measure* runs them, each that differs once; where nothing fits, those of its smallest try."""
    program, found = plan.tried, []
    alike: dict[object, list[int]] = {}
    for number, stage in enumerate(program.stages or (None,)):
        alike.setdefault(_likeness(program, stage), []).append(number)
    for numbers in alike.values():
        stage = program.stages[numbers[0]] if program.stages else None
        measured = measure(program, plan.gpu, stage)
        planned = plan.stages[numbers[0]]
        found.append(
            StageProfile(
                stages=tuple(plan.stages[number].name for number in numbers),
                estimate=planned.estimate,
                measured=measured,
                contradiction=contradiction(measured, plan.budget),
            )
        )
    return tuple(found)


def _likeness(program: Program, stage: Stage | None) -> object:
    """Return what of *stage* decides its step: what it encodes, in contrastive training that is described; of a program, nobody knows."""
    if stage is None or program.contrastive is None:
        return stage
    return program.contrastive.encode_calls(stage, micro_batch_size=program.training.micro_batch_size)


def largest_of_ranks(ranks: Sequence[Iterable[StageProfile]]) -> tuple[StageProfile, ...]:
    """Return each step as it went on the rank that contradicts the plan, or else on the one that took most. *ranks*: by number."""
    by_step = zip(*([stage.model_copy(update={"rank": rank}) for stage in stages] for rank, stages in enumerate(ranks)), strict=True)
    return tuple(max(step, key=lambda each: (each.contradiction is not None, each.measured.device_used_bytes)) for step in by_step)
