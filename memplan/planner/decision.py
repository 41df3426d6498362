"""What a plan decides: the micro-batch, the accumulation and the negatives. Pure: no files, no clock, no printing.

1. what is pinned is put in place
2. one micro-batch for all stages: the largest that fits with the negatives each stage has, then the rule of `batch.py`
3. more negatives for each stage, where that is asked for
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from memplan.errors import UsageError
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.planner.batch import BatchChoice, choose_batch
from memplan.planner.fitting import (
    NEAR,
    all_stages_fit,
    all_stages_seem_to_fit,
    budget_of,
    heaviest_stage,
    largest_micro_batch,
    near_misses,
    outcome_of,
    questions_of,
)
from memplan.planner.negatives import has_negatives, most_negatives, with_negatives
from memplan.planner.pins import Pins, pin
from memplan.planner.search import Largest, Outcome, largest_fitting
from memplan.programs.user_program import UserProgram
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.training import MOST_STEPS

NO_PINS = Pins()


class DecisionOptions(TypedDict, total=False):
    """What `decide` can be told besides."""

    target: int | None
    tolerance: float | None
    margin: float
    fills_gpu: bool
    grows_negatives: bool


TRIES_BEYOND = 3
"""How many sizes above the first that does not fit are tried, where the rule would prefer them."""

FAR = 2
"""Formulas are off by less: what they put at more than so many times the budget is not asked about first."""

LARGEST_MICRO_BATCH = 65_536
"""Where trying ends without a target: a model without activations would never fill a GPU."""

FEWEST_THAT_MOST_TAKE = 2
"""
Samples that a program whose batch is not known is run with first. With one, BatchNorm raises an error, other programs leave the batch out,
and what is asked of padding has another answer.
"""


class Decision(NamedTuple):
    """What a plan decides, before anything is explained."""

    pinned: Program
    """The program with its pins, before any choice."""
    budget: MemoryBudget
    target: int
    """The effective batch that is aimed at."""
    largest: int | None = None
    """The largest micro-batch that fits; None where nothing does."""
    choice: BatchChoice | None = None
    """The micro-batch and accumulation; None where nothing fits."""
    after: Program | None = None
    """The program as planned."""
    unit: int = 1
    """It takes multiples of it, as far as was seen."""
    smallest: int = 1
    """The smallest micro-batch that it takes, as far as was seen."""
    fills_gpu: bool = False
    """Nobody named a target: it is the largest micro-batch that fits, without accumulation."""


def decide(
    program: Program,
    gpu: GpuSpec,
    estimator: Estimator,
    *,
    target: int | None = None,
    tolerance: float | None = None,
    margin: float = DEFAULT_MARGIN,
    pins: Pins = NO_PINS,
    fills_gpu: bool = False,
    grows_negatives: bool = False,
) -> Decision:
    """
    Return what to use for *program* on *gpu*.

    *target*: the effective batch to reach; else the program's own, else the one it has now; with *fills_gpu* the largest micro-batch that
    fits, without accumulation. *tolerance*: share of the target by which the effective batch may be above it (`choose_batch`).
    *grows_negatives*: give each stage as many negatives as fit beside the micro-batch. Raises UsageError for pins or allocator settings
    that make no sense, or a target below one micro-batch on each rank.
    """
    while True:
        num_corrections = estimator.num_corrections
        decision = _decided(
            program,
            gpu,
            estimator,
            target=target,
            tolerance=tolerance,
            margin=margin,
            pins=pins,
            fills_gpu=fills_gpu,
            grows_negatives=grows_negatives,
        )
        if estimator.num_corrections == num_corrections:
            return decision


def _decided(
    program: Program,
    gpu: GpuSpec,
    estimator: Estimator,
    *,
    target: int | None,
    tolerance: float | None,
    margin: float,
    pins: Pins,
    fills_gpu: bool,
    grows_negatives: bool,
) -> Decision:
    """Return what to use as *estimator* has it now: what it says of the sizes that are tried may prove wrong for the one that is chosen."""
    pinned = pin(program, pins)
    if grows_negatives and isinstance(pinned, UserProgram) and "n_negatives" not in pinned.stage_variables:
        raise UsageError(
            f"nothing says where the negatives of {pinned.name} are written, which `grow_negatives=True` is to change",
            hint='name the files of its stages and the key in each: `stages=["conf/*_stage.yaml"]`, '
            '`fields=["n_negatives=STAGE:data.n_negatives"]`',
        )
    if target is not None and pins.pins("target_effective_batch_size"):
        raise UsageError("the target effective batch is given twice", hint="leave out `target_effective_batch_size` or the pin")
    ranks = pinned.parallelism.data_parallel_size
    least = ranks * (pinned.training.micro_batch_size if pins.pins("micro_batch_size") else 1)
    budget = budget_of(gpu, margin, pinned)
    filling = None
    if fills_gpu and not pins.pins("target_effective_batch_size") and not pins.pins("micro_batch_size"):
        with estimator.searching():
            filling = _filling(pinned, gpu, estimator, budget)
        if filling.size is None:
            return Decision(pinned, budget, ranks * filling.smallest, unit=filling.unit, smallest=filling.smallest, fills_gpu=True)
        target = ranks * filling.size
    target = target or pinned.training.target_effective_batch_size or max(least, _present_batch(program, pinned))
    if target < least:
        raise UsageError(
            f"a target effective batch of {target} is below one micro-batch of {least // ranks} on each of {ranks} GPU(s)",
            hint=f"`target_effective_batch_size={least}` or more, or pin a smaller micro-batch",
        )
    if target > MOST_STEPS * LARGEST_MICRO_BATCH:
        raise UsageError(f"a target effective batch of {target} samples is more than any training has", hint="check its digits")
    search = BatchSearch(pinned, gpu, estimator, budget=budget, target=target, tolerance=tolerance, pins=pins)
    if filling is not None:
        search.unit, search.smallest = filling.unit, filling.smallest
    num_corrections = estimator.num_corrections
    with estimator.searching():
        largest = search.largest()
    for choice in search.by_preference(largest) if largest is not None else ():
        if choice.gradient_accumulation_steps > MOST_STEPS:
            raise UsageError(
                f"a target effective batch of {target} takes {choice.gradient_accumulation_steps} accumulation steps of a micro-batch of "
                f"{choice.micro_batch_size}: more than {MOST_STEPS}",
                hint="ask for a smaller target",
            )
        after = _with_choice(pinned, choice)
        if grows_negatives:
            after = after.model_copy(update={"stages": tuple(_grown(stage, after, gpu, estimator, budget, pins) for stage in after.stages)})
        if all_stages_fit(after, gpu, estimator, budget):
            with estimator.searching():
                end = search.end_from(max(largest or 0, choice.micro_batch_size))
            if end != choice.micro_batch_size:
                search.fits(end)  # it is told: not as the search had it
            if filling is None:
                return Decision(pinned, budget, target, end, choice, after, search.unit, search.smallest)
            rule = choice.rule
            if choice.micro_batch_size == filling.size:
                rule = "the largest that fits" if filling.size < LARGEST_MICRO_BATCH else "the largest that is tried without a target"
            return Decision(pinned, budget, target, end, choice._replace(rule=rule), after, filling.unit, filling.smallest, fills_gpu=True)
        if estimator.num_corrections > num_corrections:
            break
    return Decision(pinned, budget, target, unit=search.unit, smallest=search.smallest)


def _filling(pinned: Program, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> Largest:
    """Return the largest micro-batch with which every stage fits without accumulation."""
    once = pinned.with_training(gradient_accumulation_steps=1)

    def of_size(size: int) -> Program:
        return once.with_training(micro_batch_size=size)

    return largest_micro_batch(of_size, gpu, estimator, budget, most=LARGEST_MICRO_BATCH, first=_first_size(pinned))


def _first_size(program: Program) -> int:
    """Return the micro-batch to begin with: the one that *program* has now, where that is known."""
    return program.training.micro_batch_size if program.has_present_batch else FEWEST_THAT_MOST_TAKE


def _present_batch(program: Program, pinned: Program) -> int:
    """The effective batch that the configuration has now, on the ranks that the plan is for."""
    present = program.training.micro_batch_size * program.training.gradient_accumulation_steps
    return present * pinned.parallelism.data_parallel_size


def most_useful(target: int, ranks: int) -> int:
    """The micro-batch that meets the target without accumulation: a larger one would only go past it."""
    return max(1, min(MOST_STEPS, -(-target // ranks)))


class BatchSearch:
    """Finds the micro-batch and the accumulation of a plan, with the estimator's word for every size that decides."""

    def __init__(
        self,
        pinned: Program,
        gpu: GpuSpec,
        estimator: Estimator,
        *,
        budget: MemoryBudget,
        target: int,
        tolerance: float | None,
        pins: Pins,
    ) -> None:
        self.pinned, self.gpu, self.estimator, self.budget, self.target = pinned, gpu, estimator, budget, target
        self.tolerance = tolerance
        self.ranks = pinned.parallelism.data_parallel_size
        self.most = most_useful(target, self.ranks)
        self.micro_batch_size = pinned.training.micro_batch_size if pins.pins("micro_batch_size") else None
        self.accumulation = None
        if pins.pins("gradient_accumulation_steps") or not pinned.varies("gradient_accumulation_steps"):
            self.accumulation = pinned.training.gradient_accumulation_steps
        self.unit = 1
        """The program takes multiples of it, as far as has been seen."""
        self.smallest = 1
        """The smallest micro-batch that it takes, as far as has been seen."""

    def of_size(self, micro_batch_size: int) -> Program:
        """
        Return the program with that micro-batch.

        With accumulation the gradients stay through every micro-batch but the first; only a batch of the whole target is without it.
        """
        steps = self.accumulation or (1 if micro_batch_size >= self.most else self._few_steps(micro_batch_size))
        return self.pinned.with_training(micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)

    def _few_steps(self, micro_batch_size: int) -> int:
        """Return as few accumulation steps as take what all of them take: two, or those of the target where a pipeline holds several."""
        return 2 if self.pinned.parallelism.pipeline_parallel_size == 1 else max(2, -(-self.most // micro_batch_size))

    def fits(self, micro_batch_size: int) -> bool:
        """Say whether the heaviest stage fits with that micro-batch; of the user's own program, whether all do."""
        program = self.of_size(micro_batch_size)
        if self.estimator.is_slow:
            return all_stages_fit(program, self.gpu, self.estimator, self.budget)
        stage = heaviest_stage(program, self.gpu, self.estimator)
        return outcome_of(program, self.gpu, stage, self.estimator, self.budget) is Outcome.FITS

    def largest(self) -> int | None:
        """Return the largest micro-batch with which the heaviest stage fits, or None; what is pinned is the only one tried."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size if self.fits(self.micro_batch_size) else None
        # Without accumulation the whole target at once can fit where a smaller micro-batch with it does not: it is asked about, but where
        # it seems to be far over the budget not before sizes have been run that tell more of it. Of the user's own program nothing is known
        # before it has run.
        comes_last = not self._may_be_near(self.most)
        if not comes_last and self.fits(self.most):
            return self.most
        if self.most == 1:
            return 1 if comes_last and self.fits(1) else None
        most = self.most if comes_last else self.most - 1
        found = largest_micro_batch(
            self.of_size,
            self.gpu,
            self.estimator,
            self.budget,
            most=most,
            guessed_by=self._accumulated if comes_last else None,
            chosen=self._chosen_of,
            first=_first_size(self.pinned),
        )
        self.unit, self.smallest = found.unit, found.smallest
        if comes_last and found.size != self.most and self._may_fit_at_once(found.size) and self.fits(self.most):
            return self.most
        return found.size

    def _may_be_near(self, size: int) -> bool:
        """Say whether the quick estimate knows of that size, and of no more than twice the budget."""
        program = self.of_size(size)
        quick = self.estimator.quick_estimate(program, self.gpu, heaviest_stage(program, self.gpu, self.estimator))
        return quick is not None and quick.high_bytes <= FAR * self.budget.budget_bytes

    def _may_fit_at_once(self, largest: int | None) -> bool:
        """Say whether the whole target may fit without accumulation, by what was seen with it."""
        wider = self.budget.model_copy(update={"margin": 1 - (1 - self.budget.margin) * NEAR})
        return largest == self.most - 1 or all_stages_seem_to_fit(self._accumulated(self.most), self.gpu, self.estimator, wider)

    def _accumulated(self, micro_batch_size: int) -> Program:
        """Return the program with that micro-batch and with accumulation, whatever the target: as that is seen at smaller sizes."""
        steps = self.accumulation or self._few_steps(micro_batch_size)
        return self.pinned.with_training(micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)

    def by_preference(self, largest: int) -> Iterator[BatchChoice]:
        """
        Yield what the rule of `batch.py` makes of sizes up to *largest*, the best first; whether it fits is to be seen at its values.

        Memory is not strictly monotone: one that seems to be hardly over the budget may fit, and a smaller one may not.
        """
        near = near_misses(self.of_size, self.gpu, self.estimator, self.budget, largest=largest, most=self.most)
        for _ in range(TRIES_BEYOND if near and self.micro_batch_size is None else 0):
            beyond = self.by_rule(near[-1])
            if beyond.micro_batch_size not in near:
                break
            yield beyond
            near = [size for size in near if size < beyond.micro_batch_size]
            if not near:
                break
        choice = self.by_rule(largest)
        yield choice
        while choice.micro_batch_size > self.unit and self.micro_batch_size is None:
            choice = self.by_rule(choice.micro_batch_size - 1)
            yield choice

    def end_from(self, size: int) -> int:
        """Return the last of the sizes from *size* on that fit one after the other, which is mostly *size* itself."""
        if self.micro_batch_size is not None:
            return size
        return next((after for after in range(size, self.most, self.unit) if not self.fits(after + self.unit)), self.most)

    def _chosen_of(self, largest: int) -> Program:
        """Return what would be planned if *largest* were the largest that fits; with no more steps than a training may have."""
        choice = self.by_rule(largest)
        return _with_choice(self.pinned, choice._replace(gradient_accumulation_steps=min(choice.gradient_accumulation_steps, MOST_STEPS)))

    def by_rule(self, largest: int) -> BatchChoice:
        """Return what the rule of `batch.py` makes of that largest micro-batch."""
        return choose_batch(
            largest=largest,
            target=self.target,
            data_parallel_size=self.ranks,
            tolerance=self.tolerance,
            pinned_micro_batch=self.micro_batch_size,
            pinned_accumulation=self.accumulation,
            is_accumulation_fixed=not self.pinned.varies("gradient_accumulation_steps"),
            unit=self.unit,
        )


def probable_choice(program: Program, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, *, target: int) -> BatchChoice | None:
    """
    Return what the rule of `batch.py` makes of the largest micro-batch that seems to fit; None where nothing does, or that does not fit.

    It is run at its values and nowhere else: a search for the largest that fits may find a larger one.
    """
    search = BatchSearch(program, gpu, estimator, budget=budget, target=target, tolerance=None, pins=NO_PINS)
    largest = largest_fitting(lambda size: all_stages_seem_to_fit(search.of_size(size), gpu, estimator, budget), low=1, high=search.most)
    choice = None if largest is None else search.by_rule(largest)
    return choice if choice is not None and all_stages_fit(_with_choice(program, choice), gpu, estimator, budget) else None


def _with_choice(program: Program, choice: BatchChoice) -> Program:
    return program.with_training(micro_batch_size=choice.micro_batch_size, gradient_accumulation_steps=choice.gradient_accumulation_steps)


def _grown(stage: Stage, program: Program, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, pins: Pins) -> Stage:
    """Return *stage* with as many negatives as fit; as it is where they are pinned, or where it trains without any."""
    if pins.pins("n_negatives", stage.name) or not has_negatives(stage):
        return stage
    return with_negatives(stage, most_negatives(stage, questions_of(program, gpu, estimator, budget)))


def smallest_try(decision: Decision, pins: Pins) -> Program:
    """Return the least that is tried where nothing fits: the smallest micro-batch, accumulated up to the target, but for what is pinned."""
    pinned = decision.pinned
    smallest = pinned if pins.pins("micro_batch_size") else pinned.with_training(micro_batch_size=decision.smallest)
    steps = min(MOST_STEPS, -(-decision.target // (smallest.training.micro_batch_size * smallest.parallelism.data_parallel_size)))
    is_fixed = pins.pins("gradient_accumulation_steps") or not pinned.varies("gradient_accumulation_steps")
    return smallest if is_fixed else smallest.with_training(gradient_accumulation_steps=steps)
