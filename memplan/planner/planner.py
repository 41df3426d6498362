"""The planner: from a workload, a card and an estimator to a Plan. Pure: no files, no clock, no printing.

1. what is pinned is put in place
2. one micro-batch for all stages: the largest that fits with the negatives each stage has now, then the rule of `batch.py`
3. each stage's n_negatives grow into what is left, up to the stage's limit
4. where nothing fits: how many bytes are missing, and what would help (`levers.py`)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypedDict

from typing_extensions import Unpack

from memplan.errors import UsageError
from memplan.estimators import guide
from memplan.estimators.base import Estimator, rough_of
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.planner.batch import BatchChoice, choose_batch
from memplan.planner.explain import explain_guide, explain_misfit, explain_plan, warn
from memplan.planner.fitting import all_stages_fit, budget_of, heaviest_stage, largest_micro_batch, near_misses, stages_of
from memplan.planner.levers import find_levers
from memplan.planner.negatives import grow, limit_of
from memplan.planner.pins import Pins, pin
from memplan.planner.plan import Lever, Plan, StagePlan, StageValues
from memplan.units import GIB
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

NO_PINS = Pins()


class DecisionOptions(TypedDict, total=False):
    """What `decide` can be told besides."""

    target: int | None
    margin: float
    fills_card: bool


TRIES_BEYOND = 3
"""How many sizes above the first that does not fit are tried, where the rule would prefer them."""

LARGEST_MICRO_BATCH = 65_536
"""Where trying ends: a model without activations would never fill a card."""


class Decision(NamedTuple):
    """What a plan decides, before anything is explained."""

    pinned: Workload
    """The workload with its pins, before any choice."""
    budget: MemoryBudget
    target: int
    """The effective batch that is aimed at."""
    largest: int | None = None
    """The largest micro-batch that fits; None where nothing does."""
    choice: BatchChoice | None = None
    """The micro-batch and accumulation; None where nothing fits."""
    after: Workload | None = None
    """The workload as planned."""


def decide(
    workload: Workload,
    gpu: GpuSpec,
    estimator: Estimator,
    *,
    target: int | None = None,
    margin: float = DEFAULT_MARGIN,
    pins: Pins = NO_PINS,
    fills_card: bool = False,
) -> Decision:
    """
    Return what to use for *workload* on *gpu*.

    *target*: the effective batch to reach; else the workload's own, else the one it has now; with *fills_card* the largest micro-batch that
    fits, without accumulation. Raises UsageError for pins or allocator settings that make no sense, or a target below one micro-batch on
    each rank.
    """
    pinned = pin(workload, pins)
    if target is not None and pins.pins("target_effective_batch_size"):
        raise UsageError("the target effective batch is given twice", hint="give `--target-effective-batch` or the pin, not both")
    ranks = pinned.parallelism.data_parallel_size
    least = ranks * (pinned.training.micro_batch_size if pins.pins("micro_batch_size") else 1)
    budget = budget_of(gpu, margin, pinned.training.allocator_settings)
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
    for choice in choosing.by_preference(largest) if largest is not None else ():
        after = _with_choice(pinned, choice)
        after = after.model_copy(update={"stages": tuple(_grown(stage, after, gpu, estimator, budget, pins) for stage in after.stages)})
        if all_stages_fit(after, gpu, estimator, budget):
            return Decision(pinned, budget, target, choosing.end_from(max(largest or 0, choice.micro_batch_size)), choice, after)
    return Decision(pinned, budget, target)


def make_plan(
    workload: Workload,
    gpu: GpuSpec,
    estimator: Estimator,
    *,
    method: str,
    pins: Pins = NO_PINS,
    with_levers: bool = False,
    **options: Unpack[DecisionOptions],
) -> Plan:
    """
    Return the plan of *workload* for *gpu*: what `decide` decides with the same *options*, what it takes, why, and what to mind.

    *with_levers*: also of a plan that fits, what changes would do. One that does not fit is returned too: it says so, and what is missing.
    """
    decision = decide(workload, gpu, estimator, pins=pins, **options)
    if decision.after is None or decision.choice is None or decision.largest is None:
        return _misfit(workload, decision, gpu, estimator, pins=pins, method=method)
    after, budget = decision.after, decision.budget
    stages = tuple(_stage_plan(workload, after, number, gpu, estimator, budget) for number in range(max(1, len(after.stages))))
    plan = Plan(
        fits=True,
        method=method,
        gpu=gpu,
        budget=budget,
        budget_bytes=budget.budget_bytes,
        target_effective_batch_size=decision.target,
        effective_batch_size=after.effective_batch_size,
        stages=stages,
        rule=decision.choice.rule,
        before=workload,
        after=after,
    )
    reasons = explain_plan(plan, pinned=decision.pinned, largest=decision.largest, pins=pins, estimator=estimator)
    warnings = warn(plan, estimator=estimator, largest=None if pins.pins("micro_batch_size") else decision.largest)
    levers: tuple[Lever, ...] = ()
    if with_levers:
        most = _most_useful(decision.target, after.parallelism.data_parallel_size)
        levers = find_levers(after, gpu=gpu, budget=budget, estimator=estimator, most=most, fits=True)
    return plan.model_copy(update={"reasons": reasons, "warnings": warnings, "levers": levers})


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
        """Say whether the heaviest stage fits with that micro-batch."""
        workload = self.of_size(micro_batch_size)
        stage = heaviest_stage(workload, self.gpu, self.estimator)
        return self.budget.fits(self.estimator(workload, self.gpu, stage).device_used)

    def largest(self) -> int | None:
        """Return the largest micro-batch with which the heaviest stage fits, or None; what is pinned is the only one tried."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size if self.fits(self.micro_batch_size) else None
        # The largest is tried first: without accumulation it can fit where a smaller one with it does not.
        rough = rough_of(self.estimator)
        if (rough is None or all_stages_fit(self.of_size(self.most), self.gpu, rough, self.budget)) and self.fits(self.most):
            return self.most
        if self.most == 1:
            return None
        return largest_micro_batch(self.of_size, self.gpu, self.estimator, self.budget, most=self.most - 1)

    def by_preference(self, largest: int) -> Iterator[BatchChoice]:
        """
        Yield what the rule of `batch.py` makes of sizes up to *largest*, the best first; whether it fits is to be seen at its values.

        Memory is not strictly monotone: one that seems to be hardly over the budget may fit, and a smaller one may not.
        """
        near = near_misses(self.of_size, self.gpu, self.estimator, self.budget, largest=largest, most=self.most)
        for _ in range(TRIES_BEYOND if near and self.micro_batch_size is None else 0):
            beyond = self._by_rule(near[-1])
            if beyond.micro_batch_size not in near:
                break
            yield beyond
            near = [size for size in near if size < beyond.micro_batch_size]
            if not near:
                break
        choice = self._by_rule(largest)
        yield choice
        while choice.micro_batch_size > 1 and self.micro_batch_size is None:
            choice = self._by_rule(choice.micro_batch_size - 1)
            yield choice

    def end_from(self, size: int) -> int:
        """Return the last of the sizes from *size* on that fit one after the other, which is mostly *size* itself."""
        if self.micro_batch_size is not None:
            return size
        return next((after for after in range(size, self.most) if not self.fits(after + 1)), self.most)

    def _by_rule(self, largest: int) -> BatchChoice:
        return choose_batch(
            largest=largest,
            target=self.target,
            data_parallel_size=self.ranks,
            pinned_micro_batch=self.micro_batch_size,
            pinned_accumulation=self.accumulation,
        )


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


def values_of(workload: Workload, stage: Stage | None) -> StageValues:
    """Return what a plan of *workload* decides for *stage*."""
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
        present=values_of(before, old),
        present_estimate=present,
        present_fits=budget.fits(present.device_used),
        planned=values_of(after, new),
        estimate=planned,
        fits=budget.fits(planned.device_used),
    )


def smallest_try(decision: Decision, pins: Pins) -> Workload:
    """Return the least that is tried where nothing fits: micro-batches of 1, accumulated up to the target, but for what is pinned."""
    pinned = decision.pinned
    smallest = pinned if pins.pins("micro_batch_size") else pinned.with_training(micro_batch_size=1)
    steps = -(-decision.target // (smallest.training.micro_batch_size * smallest.parallelism.data_parallel_size))
    return smallest if pins.pins("gradient_accumulation_steps") else smallest.with_training(gradient_accumulation_steps=steps)


def _misfit(workload: Workload, decision: Decision, gpu: GpuSpec, estimator: Estimator, *, pins: Pins, method: str) -> Plan:
    """Return the plan that says that nothing fits: the smallest try, what it is over, and what would help."""
    smallest, budget = smallest_try(decision, pins), decision.budget
    stages = tuple(_stage_plan(workload, smallest, number, gpu, estimator, budget) for number in range(max(1, len(smallest.stages))))
    worst = max(range(len(stages)), key=lambda number: stages[number].estimate.device_used.high_bytes)
    plan = Plan(
        fits=False,
        method=method,
        gpu=gpu,
        budget=budget,
        budget_bytes=budget.budget_bytes,
        target_effective_batch_size=decision.target,
        effective_batch_size=smallest.effective_batch_size,
        stages=stages,
        missing_bytes=budget.missing_bytes(stages[worst].estimate.device_used),
        rule="nothing fits",
        levers=find_levers(
            smallest,
            gpu=gpu,
            budget=budget,
            estimator=estimator,
            most=_most_useful(decision.target, smallest.parallelism.data_parallel_size),
        ),
        before=workload,
        after=decision.pinned,
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
