"""Whether a program fits as it is configured: each of its stages by itself, and the worst decides."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from memplan.description import Description
from memplan.errors import UsageError
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryRange
from memplan.planner.fitting import budget_of, is_tight, stages_of
from memplan.planner.pins import Pins, pin
from memplan.planner.plan import StageValues
from memplan.planner.planning import values_of
from memplan.programs.user_program import UserProgram
from memplan.workload.program import Program

Verdict = Literal["fits", "tight", "does_not_fit"]

Evidence = Literal["formulas", "kept rehearsal", "rehearsed now"]


class CheckedStage(Description):
    """One stage as it is configured."""

    name: str
    """The stage's name; the program's where it has no stages."""

    values: StageValues | None
    """As configured; None for a program whose values memplan does not know, as they are its own."""

    device_used: MemoryRange
    """What it takes, CUDA context included."""

    verdict: Verdict
    """tight: it is over the budget, and runs within it by releasing cached memory."""

    missing_bytes: NonNegativeInt
    """Bytes over the budget."""


class Check(Description):
    """Whether what is configured fits."""

    fits: bool
    """Whether every stage is within the budget."""

    gpu: GpuSpec
    """The GPU."""

    budget: MemoryBudget
    """What the program may use of it."""

    budget_bytes: NonNegativeInt
    """The same in one number."""

    stages: tuple[CheckedStage, ...]
    """Each stage, in order."""

    evidence: Evidence
    """How it was found out."""

    @property
    def worst(self) -> CheckedStage:
        """Return the stage that decides: the one that takes most."""
        return max(self.stages, key=lambda stage: stage.device_used.high_bytes)


def check_program(program: Program, gpu: GpuSpec, estimator: Estimator, *, pins: Pins, margin: float, evidence: Evidence) -> Check:
    """
    Return whether *program* fits on *gpu* with its present values, but for those pinned.

    Raises UsageError where a value that decides is not known.
    """
    _refuse_unknown(program, pins)
    present = pin(program, pins)
    budget = budget_of(gpu, margin, present)
    stages = []
    for stage in stages_of(present):
        used = estimator(present, gpu, stage).device_used
        verdict: Verdict = "fits" if budget.fits(used) else "does_not_fit"
        if verdict != "fits" and is_tight(present, gpu, stage, estimator, budget):
            verdict = "tight"
        stages.append(
            CheckedStage(
                name=stage.name if stage else present.name,
                values=values_of(present, stage) if _knows_its_values(present) else None,
                device_used=used,
                verdict=verdict,
                missing_bytes=budget.missing_bytes(used),
            )
        )
    for stage in stages_of(present):
        estimator.confirm(present, gpu, stage)
    fits = all(stage.verdict == "fits" for stage in stages)
    return Check(fits=fits, gpu=gpu, budget=budget, budget_bytes=budget.budget_bytes, stages=tuple(stages), evidence=evidence)


def _knows_its_values(program: Program) -> bool:
    return not isinstance(program, UserProgram) or "micro_batch_size" in program.variables


def _refuse_unknown(program: Program, pins: Pins) -> None:
    """Raise UsageError for a program with a variable whose present value nobody gives."""
    unknown = [name for name in program.without_value if not pins.pins(name)] if isinstance(program, UserProgram) else []
    if unknown:
        raise UsageError(
            f"the present value of {unknown[0]} is not known",
            hint=f'write the value in its place, or give it: `pins={{"{unknown[0]}": 8}}`',
        )
