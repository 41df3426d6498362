"""The planner: from a workload, a card and an estimator to a Plan. Pure: no files, no clock, no printing.

1. what is pinned is put in place
2. one micro-batch for all stages: the largest that fits with the negatives each stage has now, then the rule of `batch.py`
3. each stage's n_negatives grow into what is left, up to the stage's limit
4. where nothing fits: how many bytes are missing, and what would help (`levers.py`)
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.errors import UsageError
from memplan.estimators import guide
from memplan.estimators.base import Estimator, rough_of
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.planner.batch import BatchChoice, choose_batch
from memplan.planner.explain import explain_guide, explain_misfit, explain_plan, warn
from memplan.planner.levers import find_levers
from memplan.planner.negatives import grow, limit_of
from memplan.planner.pins import Pins, pin
from memplan.planner.plan import Plan, StagePlan, StageValues
from memplan.planner.search import Fits, largest_fitting
from memplan.units import GIB
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

NO_PINS = Pins()

LARGEST_MICRO_BATCH = 65_536
"""Where trying ends: a model without activations would never fill a card."""


def make_plan(
    workload: Workload,
    gpu: GpuSpec,
    estimator: Estimator,
    *,
    method: str,
    target: int | None = None,
    margin: float = DEFAULT_MARGIN,
    pins: Pins = NO_PINS,
    fills_card: bool = False,
) -> Plan:
    """
    Return the plan of *workload* for *gpu*.

    *target*: the effective batch to reach; else the workload's own, else the one it has now; with *fills_card* the largest micro-batch that
    fits, without accumulation. A plan that does not fit is returned too: it says so, and what is missing. Raises UsageError for pins that
    make no sense, or a target below one micro-batch on each rank.
    """
    pinned = pin(workload, pins)
    if target is not None and pins.pins("target_effective_batch_size"):
        raise UsageError("the target effective batch is given twice", hint="give `--target-effective-batch` or the pin, not both")
    ranks = pinned.parallelism.data_parallel_size
    least = ranks * (pinned.training.micro_batch_size if pins.pins("micro_batch_size") else 1)
    budget = MemoryBudget(total_bytes=gpu.total_memory_bytes, others_used_bytes=gpu.others_used_bytes, margin=margin)
    if fills_card and not pinned.training.target_effective_batch_size and not pins.pins("micro_batch_size"):
        target = ranks * (_filling(pinned, gpu, estimator, budget) or 1)
    target = target or pinned.training.target_effective_batch_size or max(least, _present_batch(workload, pinned))
    if target < least:
        raise UsageError(
            f"a target effective batch of {target} is below one micro-batch of {least // ranks} on each of {ranks} GPU(s)",
            hint=f"ask for {least} or more with `--target-effective-batch`, or pin a smaller micro-batch",
        )
    largest = _largest_micro_batch(pinned, gpu, estimator, budget=budget, most=_most_useful(target, ranks), pins=pins)
    if largest is None:
        return _misfit(workload, pinned, gpu, estimator, budget=budget, target=target, pins=pins, method=method)
    choice = choose_batch(
        largest=largest,
        target=target,
        data_parallel_size=ranks,
        pinned_micro_batch=pinned.training.micro_batch_size if pins.pins("micro_batch_size") else None,
        pinned_accumulation=pinned.training.gradient_accumulation_steps if pins.pins("gradient_accumulation_steps") else None,
    )
    after = _with_choice(pinned, choice)
    after = after.model_copy(update={"stages": tuple(_grown(stage, after, gpu, estimator, budget, pins) for stage in after.stages)})
    stages = tuple(_stage_plan(workload, after, number, gpu, estimator, budget) for number in range(max(1, len(after.stages))))
    plan = Plan(
        fits=True,
        method=method,
        gpu=gpu,
        budget=budget,
        budget_bytes=budget.budget_bytes,
        target_effective_batch_size=target,
        effective_batch_size=after.effective_batch_size,
        stages=stages,
        rule=choice.rule,
        before=workload,
        after=after,
    )
    reasons = explain_plan(plan, pinned=pinned, largest=largest, pins=pins, estimator=estimator)
    warnings = warn(plan, estimator=estimator, largest=None if pins.pins("micro_batch_size") else largest)
    return plan.model_copy(update={"reasons": reasons, "warnings": warnings})


def _filling(pinned: Workload, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> int | None:
    """Return the largest micro-batch with which every stage fits without accumulation."""
    once = pinned.with_training(gradient_accumulation_steps=1)

    def fits_by(judge: Estimator) -> Fits:
        return lambda size: _all_stages_fit(once.with_training(micro_batch_size=size), gpu, judge, budget)

    rough = rough_of(estimator)
    return largest_fitting(fits_by(estimator), low=1, high=LARGEST_MICRO_BATCH, rough=fits_by(rough) if rough else None)


def _present_batch(workload: Workload, pinned: Workload) -> int:
    """The effective batch that the configuration has now, on the ranks that the plan is for."""
    present = workload.training.micro_batch_size * workload.training.gradient_accumulation_steps
    return present * pinned.parallelism.data_parallel_size


def _most_useful(target: int, ranks: int) -> int:
    """The micro-batch that meets the target without accumulation: a larger one would only go past it."""
    return max(1, min(LARGEST_MICRO_BATCH, -(-target // ranks)))


def _stages_of(workload: Workload) -> Sequence[Stage | None]:
    return workload.stages or (None,)


def _all_stages_fit(workload: Workload, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> bool:
    return all(budget.fits(estimator(workload, gpu, stage).device_used) for stage in _stages_of(workload))


def _largest_micro_batch(
    pinned: Workload, gpu: GpuSpec, estimator: Estimator, *, budget: MemoryBudget, most: int, pins: Pins
) -> int | None:
    """Return the largest micro-batch with which every stage fits, or None; what is pinned is the only one tried."""
    # With accumulation the gradients stay through every micro-batch but the first; only a batch of the whole target is without it.
    accumulates = pinned.training.gradient_accumulation_steps if pins.pins("gradient_accumulation_steps") else None

    def fits_by(judge: Estimator) -> Fits:
        def fits(micro_batch_size: int) -> bool:
            steps = accumulates or (1 if micro_batch_size >= most else 2)
            tried = pinned.with_training(micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)
            return _all_stages_fit(tried, gpu, judge, budget)

        return fits

    fits, rough = fits_by(estimator), rough_of(estimator)
    if pins.pins("micro_batch_size"):
        size = pinned.training.micro_batch_size
        return size if fits(size) else None
    # The largest is tried first: without accumulation it can fit where a smaller one with it does not.
    return most if fits(most) else largest_fitting(fits, low=1, high=most - 1, rough=fits_by(rough) if rough else None)


def _with_choice(workload: Workload, choice: BatchChoice) -> Workload:
    return workload.with_training(micro_batch_size=choice.micro_batch_size, gradient_accumulation_steps=choice.gradient_accumulation_steps)


def _grown(stage: Stage, workload: Workload, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, pins: Pins) -> Stage:
    if pins.pins("n_negatives", stage.name) or (stage.n_negatives == 0 and stage.max_n_negatives is None):
        return stage  # without explicit negatives it is another kind of training: they are not brought in unasked
    return grow(
        stage,
        limit=limit_of(stage, workload),
        fits=lambda tried: budget.fits(estimator(workload, gpu, tried).device_used),
    )


def _values(workload: Workload, stage: Stage | None) -> StageValues:
    training = workload.training
    seen = None
    if workload.contrastive is not None and stage is not None:
        seen = workload.contrastive.negatives_per_anchor(
            stage, micro_batch_size=training.micro_batch_size, data_parallel_size=workload.parallelism.data_parallel_size
        )
    return StageValues(
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        effective_batch_size=workload.effective_batch_size,
        n_positives=stage.n_positives if stage else None,
        n_negatives=stage.n_negatives if stage else None,
        negatives_per_anchor=seen,
    )


def _stage_plan(before: Workload, after: Workload, number: int, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> StagePlan:
    """Return the plan of stage *number* (the workload itself where it has none)."""
    old, new = _stages_of(before)[number], _stages_of(after)[number]
    present, planned = estimator(before, gpu, old), estimator(after, gpu, new)
    return StagePlan(
        name=new.name if new else after.name,
        present=_values(before, old),
        present_estimate=present,
        present_fits=budget.fits(present.device_used),
        planned=_values(after, new),
        estimate=planned,
        fits=budget.fits(planned.device_used),
    )


def _misfit(
    workload: Workload, pinned: Workload, gpu: GpuSpec, estimator: Estimator, *, budget: MemoryBudget, target: int, pins: Pins, method: str
) -> Plan:
    """Return the plan that says that nothing fits: the smallest try, what it is over, and what would help."""
    smallest = pinned if pins.pins("micro_batch_size") else pinned.with_training(micro_batch_size=1)
    steps = -(-target // (smallest.training.micro_batch_size * smallest.parallelism.data_parallel_size))
    if not pins.pins("gradient_accumulation_steps"):
        smallest = smallest.with_training(gradient_accumulation_steps=steps)
    stages = tuple(_stage_plan(workload, smallest, number, gpu, estimator, budget) for number in range(max(1, len(smallest.stages))))
    worst = max(range(len(stages)), key=lambda number: stages[number].estimate.device_used.high_bytes)
    plan = Plan(
        fits=False,
        method=method,
        gpu=gpu,
        budget=budget,
        budget_bytes=budget.budget_bytes,
        target_effective_batch_size=target,
        effective_batch_size=smallest.effective_batch_size,
        stages=stages,
        missing_bytes=budget.missing_bytes(stages[worst].estimate.device_used),
        rule="nothing fits",
        levers=find_levers(smallest, worst, gpu=gpu, budget=budget, estimator=estimator),
        before=workload,
        after=pinned,
    )
    warnings = warn(plan.model_copy(update={"after": smallest}), estimator=estimator)
    return plan.model_copy(update={"reasons": explain_misfit(plan, stages[worst]), "warnings": warnings})


def make_guide_plan(workload: Workload, gpu: GpuSpec, *, memory_gib: float) -> Plan:
    """
    Return what the guide recommends for a card of *memory_gib*: each stage a batch of its own, and its mistakes with it.

    Raises UsageError for a workload that is not the guide's kind.
    """
    budget = MemoryBudget(total_bytes=int(memory_gib * GIB), margin=1 - guide.USABLE_SHARE)
    guide.estimate(workload, gpu, _stages_of(workload)[0])  # refuses what is not the guide's kind
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
        reasons=explain_guide(stages),
        before=workload,
        after=workload,
    )


def _guide_stage(workload: Workload, number: int, gpu: GpuSpec, memory_gib: float, budget: MemoryBudget) -> StagePlan:
    batch = guide.largest_batch(workload, workload.stages[number], gpu=gpu, memory_gib=memory_gib)
    after = workload.with_training(micro_batch_size=batch, gradient_accumulation_steps=guide.accumulation(batch))
    return _stage_plan(workload, after, number, gpu, guide.estimate, budget)
