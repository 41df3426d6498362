"""From a decision to a Plan: what each stage takes and could have. Why, and what would help, `analysis/` adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from typing_extensions import Unpack

from memplan.estimators import guide
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.planner.batch import BatchChoice
from memplan.planner.decision import NO_PINS, Decision, DecisionOptions, decide, smallest_try
from memplan.planner.fitting import StageQuestions, questions_of, stages_of
from memplan.planner.negatives import has_negatives, most_negatives, most_positives, positives_cost_memory, with_negatives
from memplan.planner.pins import Pins
from memplan.planner.plan import BatchAlternative, Plan, StagePlan, StageRoom, StageValues
from memplan.units import GIB
from memplan.workload.contrastive import Contrastive
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload


class Planned(NamedTuple):
    """A plan that is not explained yet, and the decision behind it."""

    plan: Plan
    decision: Decision


def plan_program(
    program: Program,
    gpu: GpuSpec,
    estimator: Estimator,
    *,
    pins: Pins = NO_PINS,
    **options: Unpack[DecisionOptions],
) -> Planned:
    """
    Return the plan of *program* for *gpu*: what `decide` decides with the same *options*, and what it takes.

    A plan that does not fit is returned too: it says so, and how many bytes it is short of.
    """
    if program.has_present_batch:
        estimator.expect(program, gpu, stages_of(program))
    decision = decide(program, gpu, estimator, pins=pins, **options)
    if decision.after is None or decision.choice is None:
        return Planned(_misfit(program, decision, gpu, estimator, pins), decision)
    after, budget = decision.after, decision.budget
    before = program if program.has_present_batch else after
    stages = tuple(_stage_plan(before, after, number, gpu, estimator, budget) for number in range(len(stages_of(after))))
    for stage in stages_of(after):
        estimator.confirm(after, gpu, stage)
    plan = Plan(
        fits=True,
        method=estimator.method,
        gpu=gpu,
        budget=budget,
        budget_bytes=budget.budget_bytes,
        target_effective_batch_size=decision.target,
        effective_batch_size=after.effective_batch_size,
        stages=stages,
        rule=decision.choice.rule,
        alternative=_alternative_of(decision.choice),
        before=before,
        after=after,
    )
    return Planned(plan, decision)


def with_room(plan: Plan, estimator: Estimator) -> Plan:
    """Return *plan*, which fits, with how many negatives and positives each of its stages could have at the planned micro-batch."""
    asked, both = questions_of(plan.after, plan.gpu, estimator, plan.budget), list(zip(plan.stages, stages_of(plan.after), strict=True))
    known = {asked.items_of(stage): planned.estimate.device_used.high_bytes for planned, stage in both if stage is not None}
    stages = tuple(planned.model_copy(update={"room": _room(stage, plan.after.contrastive, asked, known)}) for planned, stage in both)
    return plan.model_copy(update={"stages": stages})


def _alternative_of(choice: BatchChoice) -> BatchAlternative | None:
    return BatchAlternative.model_validate(choice.alternative._asdict()) if choice.alternative is not None else None


def _room(stage: Stage | None, contrastive: Contrastive | None, asked: StageQuestions, known: Mapping[int, int]) -> StageRoom | None:
    """Return how many negatives and positives *stage* could have at the planned micro-batch; None outside contrastive training."""
    if stage is None or contrastive is None:
        return None
    negatives = most_negatives(stage, asked, known) if has_negatives(stage) else None
    positives = most_positives(stage, asked, known) if positives_cost_memory(contrastive) else None
    return StageRoom(
        items_per_anchor=contrastive.samples_per_anchor(stage),
        n_negatives=negatives,
        items_per_anchor_with_negatives=None if negatives is None else contrastive.samples_per_anchor(with_negatives(stage, negatives)),
        n_positives=positives,
        items_per_anchor_with_positives=None
        if positives is None
        else contrastive.samples_per_anchor(stage.model_copy(update={"n_positives": positives})),
    )


def values_of(program: Program, stage: Stage | None) -> StageValues:
    """Return what a plan of *program* decides for *stage*."""
    training = program.training
    seen = None
    if program.contrastive is not None and stage is not None:
        seen = program.contrastive.negatives_per_anchor(
            stage, micro_batch_size=training.micro_batch_size, data_parallel_size=program.parallelism.data_parallel_size
        )
    return StageValues(
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        effective_batch_size=program.effective_batch_size,
        n_positives=stage.n_positives if stage and "n_positives" in program.stage_variables else None,
        n_negatives=stage.n_negatives if stage and "n_negatives" in program.stage_variables else None,
        negatives_per_anchor=seen,
    )


def _stage_plan(before: Program, after: Program, number: int, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> StagePlan:
    """Return the plan of stage *number* (the program itself where it has none)."""
    old, new = stages_of(before)[number], stages_of(after)[number]
    present, planned = estimator(before, gpu, old), estimator(after, gpu, new)
    return StagePlan(
        name=new.name if new else after.name,
        present=values_of(before, old),
        present_estimate=present,
        present_fits=budget.fits(present.device_used),
        planned=values_of(after, new),
        estimate=planned,
        fits=budget.fits(planned.device_used),
    )


def _misfit(program: Program, decision: Decision, gpu: GpuSpec, estimator: Estimator, pins: Pins) -> Plan:
    """Return the plan that says that nothing fits: the smallest try, and what it is over."""
    smallest, budget = smallest_try(decision, pins), decision.budget
    before = program if program.has_present_batch else smallest
    stages = tuple(_stage_plan(before, smallest, number, gpu, estimator, budget) for number in range(len(stages_of(smallest))))
    return Plan(
        fits=False,
        method=estimator.method,
        gpu=gpu,
        budget=budget,
        budget_bytes=budget.budget_bytes,
        target_effective_batch_size=decision.target,
        effective_batch_size=smallest.effective_batch_size,
        stages=stages,
        missing_bytes=max(budget.missing_bytes(stage.estimate.device_used) for stage in stages),
        rule="nothing fits",
        before=before,
        after=decision.pinned,
    )


def plan_by_guide(workload: Workload, gpu: GpuSpec, *, memory_gib: float) -> Plan:
    """
    Return what the guide recommends for a GPU of *memory_gib*: each stage a batch of its own, and its mistakes with it.

    Raises UsageError for a workload that is not the guide's kind.
    """
    budget = MemoryBudget(total_bytes=int(memory_gib * GIB), margin=1 - guide.USABLE_SHARE)
    guide.estimate(workload, stages_of(workload)[0])  # refuses what is not the guide's kind
    stages = tuple(_guide_stage(workload, number, gpu, memory_gib, budget) for number in range(len(workload.stages)))
    return Plan(
        fits=all(stage.fits for stage in stages),
        method="guide",
        gpu=gpu,
        budget=budget,
        budget_bytes=budget.budget_bytes,
        target_effective_batch_size=guide.TARGET_BATCH,
        effective_batch_size=stages[0].planned.effective_batch_size,
        stages=stages,
        missing_bytes=max(budget.missing_bytes(stage.estimate.device_used) for stage in stages),
        rule="the guide's: the largest batch up to 128 by its formula, accumulation rounded down",
        before=workload,
        after=workload,
    )


def _guide_stage(workload: Workload, number: int, gpu: GpuSpec, memory_gib: float, budget: MemoryBudget) -> StagePlan:
    batch = guide.largest_batch(workload, workload.stages[number], memory_gib=memory_gib)
    after = workload.with_training(micro_batch_size=batch, gradient_accumulation_steps=guide.accumulation(batch))
    return _stage_plan(workload, after, number, gpu, guide.GuideEstimator(), budget)
