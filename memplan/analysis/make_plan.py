"""The whole plan: decided, worked out, explained, with what would help."""

from __future__ import annotations

from typing_extensions import Unpack

from memplan.analysis.explain import expect_for_warnings, explain_guide, explain_misfit, explain_plan, warn
from memplan.analysis.levers import find_levers
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.planner.decision import NO_PINS, DecisionOptions, most_useful
from memplan.planner.pins import Pins
from memplan.planner.plan import Lever, Plan
from memplan.planner.planning import plan_by_guide, plan_program, with_room
from memplan.workload.program import Program
from memplan.workload.workload import Workload


def make_plan(
    program: Program,
    gpu: GpuSpec,
    estimator: Estimator,
    *,
    pins: Pins = NO_PINS,
    with_levers: bool = False,
    finds_room: bool = True,
    **options: Unpack[DecisionOptions],
) -> Plan:
    """
    Return the plan of *program* for *gpu*, with its reasons and warnings, and with what would help where nothing fits.

    *with_levers*: also of a plan that fits, what changes would do. *finds_room*: how many negatives and positives each stage could have.
    The rest is as for `plan_program`.
    """
    plan, decision = plan_program(program, gpu, estimator, pins=pins, **options)
    expect_for_warnings(plan, estimator)
    if finds_room and plan.fits:
        plan = with_room(plan, estimator)
    reasons = explain_plan(plan, decision, pins, estimator) if plan.fits else explain_misfit(plan)
    warnings = warn(plan.model_copy(update={"after": plan.tried}), estimator)
    levers: tuple[Lever, ...] = ()
    if with_levers or not plan.fits:
        most = most_useful(decision.target, plan.tried.parallelism.data_parallel_size)
        levers = find_levers(plan.tried, gpu=gpu, budget=plan.budget, estimator=estimator, most=most, fits=plan.fits)
    return plan.model_copy(update={"reasons": reasons, "warnings": warnings, "levers": levers})


def make_guide_plan(workload: Workload, gpu: GpuSpec, *, memory_gib: float) -> Plan:
    """
    Return what the guide recommends for a GPU of *memory_gib*, with its mistakes said.

    Raises UsageError for a workload that is not the guide's kind.
    """
    plan = plan_by_guide(workload, gpu, memory_gib=memory_gib)
    return plan.model_copy(update={"reasons": explain_guide(plan.stages)})
