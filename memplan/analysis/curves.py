"""Curves: what the heaviest stage takes against one variable, the rest as planned, beside what the GPU has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from pydantic import NonNegativeInt

from memplan.description import Description
from memplan.estimators.base import Estimator, Interpolated, ReplayingEstimator
from memplan.hardware.gpu import GpuSpec
from memplan.planner.fitting import heaviest_stage
from memplan.planner.negatives import with_negatives
from memplan.planner.plan import Plan
from memplan.workload.model import encoder_of
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

NUM_POINTS = 9
"""Of a curve, about: few enough to be read in a terminal."""

BEYOND = 1.5
"""How far beyond the plan's value a curve goes."""

MOST_MICRO_BATCH = 4096
"""Where looking for the end of a curve ends."""


Variable = Literal["micro_batch_size", "n_negatives", "n_positives", "sequence_length"]
VARIABLES: tuple[Variable, ...] = get_args(Variable)


class CurvePoint(Description):
    """One value of what is varied."""

    value: NonNegativeInt
    """The micro-batch, or the negatives."""

    device_used_bytes: NonNegativeInt
    """What the step is expected to take, CUDA context included."""

    high_bytes: NonNegativeInt
    """The upper bound of that, which has to fit."""

    fits: bool
    """Whether that is within the budget."""

    method: Literal["rehearsed", "worked out", "analytic"]
    """Whether that value itself was rehearsed, or its allocations were worked out from others'; or the formulas."""


class Curve(Description):
    """What a stage takes against one variable, the rest as planned."""

    variable: Variable
    """What is varied."""

    stage: str
    """The stage."""

    planned: NonNegativeInt
    """Its value in the plan."""

    budget_bytes: NonNegativeInt
    """What the plan may use."""

    gpu_bytes: NonNegativeInt
    """What programs can have of the GPU."""

    points: tuple[CurvePoint, ...]
    """By rising value."""


class _Varied(NamedTuple):
    """A variable of a step: its value, where a curve of it goes, and the step with another value."""

    planned: int
    low: int
    high: int
    of_value: Callable[[int], tuple[Program, Stage | None]]


def curves_of(plan: Plan, estimator: Estimator, variables: Sequence[Variable] = ()) -> tuple[Curve, ...]:
    """
    Return the curves of *plan* along *variables*, as far as the program has them.

    None: along the micro-batch, the negatives, and the positives where they cost memory.
    """
    program, _, stage = heaviest_step(plan, estimator)
    found = _variables(plan, program, stage, estimator)
    chosen = variables or [name for name in found if name != "sequence_length"]
    name = stage.name if stage is not None else program.name
    return tuple(_curve(plan, estimator, variable, name, found[variable]) for variable in chosen if variable in found)


def _variables(plan: Plan, program: Program, stage: Stage | None, estimator: Estimator) -> dict[Variable, _Varied]:
    """Return the variables that *program* has in *stage*."""
    micro = program.training.micro_batch_size
    found: dict[Variable, _Varied] = {
        "micro_batch_size": _Varied(
            micro,
            1,
            _end_of_micro_batches(plan, program, stage, estimator),
            lambda size: (program.with_training(micro_batch_size=size), stage),
        )
    }
    contrastive = program.contrastive
    if stage is not None and contrastive is not None:
        limit = stage.max_n_negatives or max(other.n_negatives for other in program.stages)
        most = max(int(limit * BEYOND), stage.n_negatives)
        if most:
            found["n_negatives"] = _Varied(stage.n_negatives, 0, most, lambda count: (program, with_negatives(stage, count)))
        if contrastive.sampling != "pair":
            most = max(2, int(stage.n_positives * BEYOND))
            found["n_positives"] = _Varied(
                stage.n_positives, 1, most, lambda count: (program, stage.model_copy(update={"n_positives": count}))
            )
    if isinstance(program, Workload) and encoder_of(program.model) is not None:
        length = program.training.sequence_length
        found["sequence_length"] = _Varied(
            length, max(1, length // 8), length, lambda tokens: (program.with_training(sequence_length=tokens), stage)
        )
    return found


def heaviest_step(plan: Plan, estimator: Estimator) -> tuple[Program, GpuSpec, Stage | None]:
    """Return the program as planned (the smallest try where nothing fits), the GPU, and the stage that takes most."""
    return plan.tried, plan.gpu, heaviest_stage(plan.tried, plan.gpu, estimator)


def _end_of_micro_batches(plan: Plan, program: Program, stage: Stage | None, estimator: Estimator) -> int:
    """Return a micro-batch with which the GPU would be full, by the quick estimate: a curve should show where it ends."""
    planned = size = program.training.micro_batch_size
    while size < MOST_MICRO_BATCH:
        quick = estimator.quick_estimate(program.with_training(micro_batch_size=size), plan.gpu, stage)
        if quick is None:  # nothing is known of sizes beyond the plan's
            return max(2, 2 * planned)
        if quick.expected_bytes > plan.gpu.total_memory_bytes:
            break
        size = max(size + 1, int(size * BEYOND))
    return max(2, size)


def _spread(low: int, high: int, planned: int) -> list[int]:
    """Return about NUM_POINTS values from *low* to *high*, evenly, with *planned* among them."""
    step = max(1, (high - low) / (NUM_POINTS - 1))
    values = {low + round(step * number) for number in range(NUM_POINTS)}
    return sorted({value for value in values if value <= high} | {planned, high})


def _curve(plan: Plan, estimator: Estimator, variable: Variable, stage_name: str, varied: _Varied) -> Curve:
    values = _spread(varied.low, varied.high, varied.planned)
    if isinstance(estimator, ReplayingEstimator):
        found = estimator.interpolate(varied.of_value, values, plan.gpu)
    else:
        each = [estimator(program, plan.gpu, stage).device_used for program, stage in map(varied.of_value, values)]
        found = [Interpolated(used, "analytic") for used in each]
    points = tuple(
        CurvePoint(
            value=value,
            device_used_bytes=used.expected_bytes,
            high_bytes=used.high_bytes,
            fits=plan.budget.fits(used),
            method=method,
        )
        for value, (used, method) in zip(values, found, strict=True)
    )
    return Curve(
        variable=variable,
        stage=stage_name,
        planned=varied.planned,
        budget_bytes=plan.budget_bytes,
        gpu_bytes=plan.gpu.total_memory_bytes,
        points=points,
    )
