"""The planner: from a workload, a card and an estimator to a Plan. Pure: no files, no clock, no printing.

1. what is pinned is put in place
2. one micro-batch for all stages: the largest that fits with the negatives each stage has now, then the rule of `batch.py`
3. each stage's n_negatives grow into what is left, up to the stage's limit
4. where nothing fits: how many bytes are missing, and what would help (`levers.py`)
"""

from __future__ import annotations

from memplan.errors import UsageError
from memplan.estimators import guide
from memplan.estimators.base import Estimator, rough_of
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.planner.batch import BatchChoice, choose_batch
from memplan.planner.explain import explain_guide, explain_misfit, explain_plan, warn
from memplan.planner.fitting import all_stages_fit, largest_micro_batch, near_misses, stages_of
from memplan.planner.levers import find_levers
from memplan.planner.negatives import grow, limit_of
from memplan.planner.pins import Pins, pin
from memplan.planner.plan import Plan, StagePlan, StageValues
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
    choosing = _Choosing(pinned, gpu, estimator, budget=budget, target=target, pins=pins)
    largest = choosing.largest()
    choice = choosing.choose(largest) if largest is not None else None
    if largest is None or choice is None:
        return _misfit(workload, pinned, gpu, estimator, budget=budget, target=target, pins=pins, method=method)
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
    return largest_micro_batch(lambda size: once.with_training(micro_batch_size=size), gpu, estimator, budget, most=LARGEST_MICRO_BATCH)


def _present_batch(workload: Workload, pinned: Workload) -> int:
    """The effective batch that the configuration has now, on the ranks that the plan is for."""
    present = workload.training.micro_batch_size * workload.training.gradient_accumulation_steps
    return present * pinned.parallelism.data_parallel_size


def _most_useful(target: int, ranks: int) -> int:
    """The micro-batch that meets the target without accumulation: a larger one would only go past it."""
    return max(1, min(LARGEST_MICRO_BATCH, -(-target // ranks)))


class _Choosing:
    """Finds the micro-batch and the accumulation of a plan."""

    def __init__(self, pinned: Workload, gpu: GpuSpec, estimator: Estimator, *, budget: MemoryBudget, target: int, pins: Pins) -> None:
        self.pinned, self.gpu, self.estimator, self.budget, self.target = pinned, gpu, estimator, budget, target
        self.ranks = pinned.parallelism.data_parallel_size
        self.most = _most_useful(target, self.ranks)
        self.micro_batch_size = pinned.training.micro_batch_size if pins.pins("micro_batch_size") else None
        self.accumulation = pinned.training.gradient_accumulation_steps if pins.pins("gradient_accumulation_steps") else None

    def of_size(self, micro_batch_size: int) -> Workload:
        """
        Return the workload with that micro-batch.

        With accumulation the gradients stay through every micro-batch but the first; only a batch of the whole target is without it.
        """
        steps = self.accumulation or (1 if micro_batch_size >= self.most else 2)
        return self.pinned.with_training(micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)

    def fits(self, micro_batch_size: int) -> bool:
        """Say whether every stage fits with that micro-batch."""
        return all_stages_fit(self.of_size(micro_batch_size), self.gpu, self.estimator, self.budget)

    def largest(self) -> int | None:
        """Return the largest micro-batch with which every stage fits, or None; what is pinned is the only one tried."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size if self.fits(self.micro_batch_size) else None
        # The largest is tried first: without accumulation it can fit where a smaller one with it does not.
        rough = rough_of(self.estimator)
        if (rough is None or all_stages_fit(self.of_size(self.most), self.gpu, rough, self.budget)) and self.fits(self.most):
            return self.most
        if self.most == 1:
            return None
        return largest_micro_batch(self.of_size, self.gpu, self.estimator, self.budget, most=self.most - 1)

    def choose(self, largest: int) -> BatchChoice | None:
        """
        Return what the rule of `batch.py` makes of sizes up to *largest*, tried at exactly those values; None where nothing fits.

        Memory is not strictly monotone: a smaller size may not fit, and then the rule's next is taken; one that is hardly above may.
        """
        choice = self._by_rule(largest)
        near = near_misses(self.of_size, self.gpu, self.estimator, self.budget, largest=largest, most=self.most)
        if near and self.micro_batch_size is None:
            beyond = self._by_rule(near[-1])
            if beyond.micro_batch_size in near and self._fits(beyond):
                return beyond
        while not self._fits(choice):
            if choice.micro_batch_size == 1 or self.micro_batch_size is not None:
                return None
            choice = self._by_rule(choice.micro_batch_size - 1)
        return choice

    def _by_rule(self, largest: int) -> BatchChoice:
        return choose_batch(
            largest=largest,
            target=self.target,
            data_parallel_size=self.ranks,
            pinned_micro_batch=self.micro_batch_size,
            pinned_accumulation=self.accumulation,
        )

    def _fits(self, choice: BatchChoice) -> bool:
        return all_stages_fit(_with_choice(self.pinned, choice), self.gpu, self.estimator, self.budget)


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
    old, new = stages_of(before)[number], stages_of(after)[number]
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
    guide.estimate(workload, gpu, stages_of(workload)[0])  # refuses what is not the guide's kind
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
