"""Curves: what the heaviest stage takes against the micro-batch, and against its negatives, beside what the card has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import NonNegativeInt

from memplan.description import Description
from memplan.estimators import analytic
from memplan.estimators.base import Estimator, worker_of
from memplan.hardware.spec import GpuSpec
from memplan.planner.fitting import heaviest_stage
from memplan.planner.negatives import limit_of, with_negatives
from memplan.planner.plan import Plan
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

NUM_POINTS = 9
"""Of a curve, about: few enough to be read in a terminal."""

BEYOND = 1.5
"""How far beyond the plan's value a curve goes."""

MOST_MICRO_BATCH = 4096
"""Where looking for the end of a curve ends."""


class CurvePoint(Description):
    """One value of what is varied."""

    value: NonNegativeInt
    """The micro-batch, or the negatives."""

    device_used_bytes: NonNegativeInt
    """What the step is expected to take, CUDA context included."""

    high_bytes: NonNegativeInt
    """The high end of that, which has to fit."""

    fits: bool
    """Whether that is within the budget."""

    method: Literal["rehearsed", "worked out", "analytic"]
    """Whether that value itself was rehearsed, or its allocations were worked out from others'; or the formulas."""


class Curve(Description):
    """What a stage takes against one variable, the rest as planned."""

    variable: Literal["micro_batch_size", "n_negatives"]
    """What is varied."""

    stage: str
    """The stage."""

    planned: NonNegativeInt
    """Its value in the plan."""

    budget_bytes: NonNegativeInt
    """What the plan may use."""

    card_bytes: NonNegativeInt
    """What programs can have of the card."""

    points: tuple[CurvePoint, ...]
    """By rising value."""


def curves_of(plan: Plan, estimator: Estimator) -> tuple[Curve, ...]:
    """Return the curves of *plan*: along the micro-batch, and along the negatives where the stage has any."""
    workload, _, stage = heaviest_step(plan, estimator)
    name = stage.name if stage is not None else workload.name
    micro = workload.training.micro_batch_size
    most = _end_of_micro_batches(plan, workload, stage)
    curves = [
        _curve(
            plan, estimator, "micro_batch_size", name, micro, _spread(1, most, micro),
            lambda size: (workload.with_training(micro_batch_size=size), stage),
        )
    ]  # fmt: skip
    if stage is not None and workload.contrastive is not None and limit_of(stage, workload) > 0:
        most = max(int(limit_of(stage, workload) * BEYOND), stage.n_negatives)
        curves.append(
            _curve(
                plan, estimator, "n_negatives", name, stage.n_negatives, _spread(0, most, stage.n_negatives),
                lambda count: (workload, with_negatives(stage, count)),
            )
        )  # fmt: skip
    return tuple(curves)


def heaviest_step(plan: Plan, estimator: Estimator) -> tuple[Workload, GpuSpec, Stage | None]:
    """Return the workload as planned (the smallest try where nothing fits), the card, and the stage that takes most."""
    workload = plan.after
    if not plan.fits:
        smallest = plan.stages[0].planned
        workload = workload.with_training(
            micro_batch_size=smallest.micro_batch_size, gradient_accumulation_steps=smallest.gradient_accumulation_steps
        )
    return workload, plan.gpu, heaviest_stage(workload, plan.gpu, estimator)


def _end_of_micro_batches(plan: Plan, workload: Workload, stage: Stage | None) -> int:
    """Return a micro-batch with which the card would be full, by the formulas: a curve should show where it ends."""
    size = workload.training.micro_batch_size
    while size < MOST_MICRO_BATCH:
        tried = workload.with_training(micro_batch_size=size)
        if analytic.estimate(tried, plan.gpu, stage).device_used_bytes > plan.gpu.total_memory_bytes:
            break
        size = max(size + 1, int(size * BEYOND))
    return max(2, size)


def _spread(low: int, high: int, planned: int) -> list[int]:
    """Return about NUM_POINTS values from *low* to *high*, evenly, with *planned* among them."""
    step = max(1, (high - low) / (NUM_POINTS - 1))
    values = {low + round(step * number) for number in range(NUM_POINTS)}
    return sorted({value for value in values if value <= high} | {planned, high})


def _curve(
    plan: Plan,
    estimator: Estimator,
    variable: Literal["micro_batch_size", "n_negatives"],
    stage_name: str,
    planned: int,
    values: Sequence[int],
    of_value: Callable[[int], tuple[Workload, Stage | None]],
) -> Curve:
    works_out = worker_of(estimator)
    if works_out is None:
        found = [(estimator(workload, plan.gpu, stage).device_used, "analytic") for workload, stage in map(of_value, values)]
    else:
        found = works_out(of_value, values, plan.gpu)
    points = tuple(
        CurvePoint.model_validate(
            {
                "value": value,
                "device_used_bytes": used.expected_bytes,
                "high_bytes": used.high_bytes,
                "fits": plan.budget.fits(used),
                "method": method,
            }
        )
        for value, (used, method) in zip(values, found, strict=True)
    )
    return Curve(
        variable=variable,
        stage=stage_name,
        planned=planned,
        budget_bytes=plan.budget_bytes,
        card_bytes=plan.gpu.total_memory_bytes,
        points=points,
    )
