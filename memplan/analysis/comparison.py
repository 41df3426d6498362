"""The recommended settings of one program for many GPUs, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import NonNegativeInt
from typing_extensions import Unpack

from memplan.description import Description
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.planner.decision import NO_PINS, DecisionOptions, decide, smallest_try
from memplan.planner.fitting import stages_of
from memplan.planner.pins import Pins
from memplan.planner.plan import StageValues
from memplan.planner.planning import values_of
from memplan.workload.program import Program


class ComparedStage(Description):
    """One stage on one GPU."""

    name: str
    """The stage's name; the program's where it has no stages."""

    planned: StageValues
    """As planned; where nothing fits, the smallest try."""

    device_used_bytes: NonNegativeInt
    """What that takes, CUDA context included."""


class ComparedGpu(Description):
    """One GPU of a comparison."""

    gpu: GpuSpec
    """The GPU."""

    budget_bytes: NonNegativeInt
    """What the plan may use of it."""

    fits: bool
    """Whether there is a plan for it."""

    missing_bytes: NonNegativeInt
    """What is missing where there is none."""

    stages: tuple[ComparedStage, ...]
    """Each stage, in order."""

    @property
    def device_used_bytes(self) -> int:
        """Return what the stage takes that takes most."""
        return max(stage.device_used_bytes for stage in self.stages)


def compare(
    program: Program, gpus: Sequence[GpuSpec], estimator: Estimator, *, pins: Pins = NO_PINS, **options: Unpack[DecisionOptions]
) -> Iterator[ComparedGpu]:
    """Yield what is decided for *program* on each of *gpus*, in their order; *options* are those of `decide`."""
    for gpu in gpus:
        decision = decide(program, gpu, estimator, pins=pins, **options)
        planned = decision.after or smallest_try(decision, pins)
        used = [estimator(planned, gpu, stage).device_used for stage in stages_of(planned)]
        yield ComparedGpu(
            gpu=gpu,
            budget_bytes=decision.budget.budget_bytes,
            fits=decision.after is not None,
            missing_bytes=max(map(decision.budget.missing_bytes, used)),
            stages=tuple(
                ComparedStage(
                    name=stage.name if stage else planned.name, planned=values_of(planned, stage), device_used_bytes=found.expected_bytes
                )
                for stage, found in zip(stages_of(planned), used, strict=True)
            ),
        )
