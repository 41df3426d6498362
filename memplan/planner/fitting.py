"""What fits: a program with all its stages, on a budget, by an estimator; and the largest micro-batch that does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from memplan.allocator.config import read_settings
from memplan.errors import SizeRefusedError
from memplan.estimators.base import Estimator, ReplayingEstimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MODEL_ERROR, MemoryBudget
from memplan.memory.estimate import MemoryRange
from memplan.planner.search import Largest, Outcome, largest_accepted
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

NEAR = 1.1
FARTHEST = 1.25
"""Memory is not strictly monotone in the batch: sizes up to so many times the largest that fits may fit too, if they seem to be over the
budget by less than a tenth."""

ENOUGH = 2
"""Sizes of a program, from which a guess of the end is mostly near: if it is right, the next size is asked for too."""


LEAP = 4
"""Times as many samples as the one run had that tells of a program: there its word is rough, and two sizes are asked for at once."""

TOO_FAR = 32
"""
Times as many samples, from which on the word of one run is not believed: so far away, workspaces of convolutions and lengths of texts put
the end at a half to three times where it is, and the size that was asked for may take longer than all others together.
"""

PART = 8
"""Of such a way one part is gone first: two runs tell the end better."""


def budget_of(gpu: GpuSpec, margin: float, program: Program | None = None) -> MemoryBudget:
    """Return what *program* may use of *gpu*: no more than its allocator's settings leave it, less where it is a model of another."""
    fraction = None if program is None else read_settings(program.training.allocator_settings).memory_fraction
    total_bytes = gpu.total_memory_bytes if fraction is None else int(fraction * gpu.total_memory_bytes)
    model_error = MODEL_ERROR if isinstance(program, Workload) and program.stands_for_a_program else 0.0
    return MemoryBudget(total_bytes=total_bytes, others_used_bytes=gpu.others_used_bytes, margin=margin, model_error=model_error)


def stages_of(program: Program) -> Sequence[Stage | None]:
    """Return the stages; None for a program without any."""
    return program.stages or (None,)


def outcome_of(program: Program, gpu: GpuSpec, stage: Stage | None, estimator: Estimator, budget: MemoryBudget) -> Outcome:
    """Return what comes of *stage*: it is within the budget, or not, or does not run with its micro-batch."""
    try:
        used = estimator(program, gpu, stage).device_used
    except SizeRefusedError as error:
        return Outcome.TOO_LARGE if error.is_limit else Outcome.REFUSED
    return Outcome.FITS if budget.fits(used) else Outcome.TOO_LARGE


def all_stages_fit(program: Program, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether every stage is within the budget, without giving anything back."""
    return stage_over_budget(program, gpu, estimator, budget) is None


class OverBudget(NamedTuple):
    """A stage that is not within the budget, or does not run."""

    stage: Stage | None


def stage_over_budget(program: Program, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> OverBudget | None:
    """Return a stage that is not within the budget, the heaviest asked first where asking is slow; None where all are."""
    stages = _by_weight(program, gpu, estimator) if estimator.is_slow else stages_of(program)
    estimator.expect(program, gpu, stages[1:])
    over = (stage for stage in stages if outcome_of(program, gpu, stage, estimator, budget) is not Outcome.FITS)
    return next(map(OverBudget, over), None)


def heaviest_stage(program: Program, gpu: GpuSpec, estimator: Estimator) -> Stage | None:
    """Return the stage that takes most, as far as it is known without running any."""
    return _by_weight(program, gpu, estimator)[0]


def _by_weight(program: Program, gpu: GpuSpec, estimator: Estimator) -> Sequence[Stage | None]:
    """Return the stages, that which takes most first, as far as it is known without running any."""
    stages = stages_of(program)
    if len(stages) == 1:
        return stages

    def weight(stage: Stage | None) -> tuple[int, int]:
        quick = estimator.quick_estimate(program, gpu, stage)
        return (quick.high_bytes if quick is not None else 0), 0 if stage is None else items_of_anchor(program, stage)

    return sorted(stages, key=weight, reverse=True)


def items_of_anchor(program: Program, stage: Stage) -> int:
    """
    Return how many items a step of *stage* encodes for an anchor; more of them take more.

    What a user's own program makes of positives and negatives only a run can tell: all of them are counted.
    """
    return stage.n_positives + stage.n_negatives if program.contrastive is None else program.contrastive.samples_per_anchor(stage)


def largest_micro_batch(
    of_size: Callable[[int], Program],
    gpu: GpuSpec,
    estimator: Estimator,
    budget: MemoryBudget,
    *,
    most: int,
    guessed_by: Callable[[int], Program] | None = None,
    chosen: Callable[[int], Program] | None = None,
    first: int | None = None,
) -> Largest:
    """
    Return the largest size up to *most* with which the heaviest stage of *of_size* fits, of those that the program takes.

    *guessed_by*: whose memory at a size says about what *of_size* takes there; None: its own. *chosen*: what would be planned if that size
    were the largest; it may be run meanwhile. *first*: the size of a user's own program that is asked for first. The one that it has now is
    run in any case, is nearer to the answer than the smallest, and shows more of what that takes.

    Whether the other stages fit is for the plan to see, at the size that it chooses; but of the user's own program nobody knows which stage
    is the heaviest before all have run: there every stage fits. Raises SizeRefusedError where it takes none of those tried.
    """
    stage = heaviest_stage(of_size(1), gpu, estimator)
    find = functools.partial(
        _largest_of_stage,
        of_size=of_size,
        gpu=gpu,
        estimator=estimator,
        budget=budget,
        guessed_by=guessed_by,
        chosen=chosen,
        first=first if estimator.is_slow else None,
    )
    found = find(stage, most=most)
    while estimator.is_slow and found.size is not None:
        over = stage_over_budget(of_size(found.size), gpu, estimator, budget)
        if over is None:
            break
        if found.size == 1:
            return found._replace(size=None)
        found = find(over.stage, most=found.size - 1)
    return found


def _largest_of_stage(
    stage: Stage | None,
    *,
    of_size: Callable[[int], Program],
    gpu: GpuSpec,
    estimator: Estimator,
    budget: MemoryBudget,
    most: int,
    guessed_by: Callable[[int], Program] | None,
    chosen: Callable[[int], Program] | None,
    first: int | None,
) -> Largest:
    refusals: list[SizeRefusedError] = []
    ran: dict[int, MemoryRange] = {}
    fitting: list[int] = []
    ended: list[int] = []  # those beyond a limit that is none of the GPU's memory, and that no estimate knows
    sure_ends: list[int] = []  # that limit, where a refusal has said it

    def estimated_to_fit(size: int) -> bool:
        return _seems_to_fit((guessed_by or of_size)(size), gpu, stage, estimator, budget)

    def is_far() -> bool:
        """Say whether the end is far from the one run that tells of the program, as that has it."""
        return estimator.is_slow and len(ran) == 1 and not estimated_to_fit(most) and estimated_to_fit(TOO_FAR * max(ran))

    def ask(size: int) -> Outcome:
        is_leap = estimator.is_slow and len(ran) == 1 and size >= LEAP * max(ran) and not is_far()
        more = half_as_much_again(size) if is_leap else most
        for program in [of_size(more)] if more < most else likely_after(size):
            estimator.expect(program, gpu, [stage])
        try:
            used = run(size)
        except SizeRefusedError as error:
            return Outcome.TOO_LARGE if error.is_limit else Outcome.REFUSED
        if not budget.fits(used):
            return Outcome.TOO_LARGE
        fitting.append(size)
        if more < most:  # by one run alone a guess is rough: with two that are large the next one is mostly the end
            with suppress(SizeRefusedError):
                run(more)
        return Outcome.FITS

    def run(size: int) -> MemoryRange:
        try:
            ran[size] = estimator(of_size(size), gpu, stage).device_used
        except SizeRefusedError as error:
            refusals.append(error)
            if error.largest is not None:
                sure_ends.append(error.largest)
            elif error.is_limit:
                ended.append(size)
            raise
        return ran[size]

    def likely_after(size: int) -> Iterator[Program]:
        """Yield what will probably be run after *size*, the soonest last."""
        if not is_far() and seems_to_fit(size) and not (size < most and seems_to_fit(size + 1)):  # the end, as it seems
            if chosen is not None and (choice := chosen(size)).training.micro_batch_size != size:
                yield choice
            if size < most and (not estimator.is_slow or len(ran) >= ENOUGH):
                yield of_size(size + 1)

    def seems_to_fit(size: int) -> bool:
        if size > min(sure_ends, default=size) or (ended and size > (max(fitting, default=0) + min(ended)) // 2):
            return False
        if is_far():  # a power of two: it is a size that most programs take
            return size <= max(ran) or estimated_to_fit(PART * (1 << (size - 1).bit_length()))
        return estimated_to_fit(size)

    known = {} if first is None or first > most else {first: ask(first)}
    if Outcome.REFUSED in known.values():  # which sizes it takes the search finds out, from the smallest on
        known = {}
    found = largest_accepted(ask, high=most, guess=seems_to_fit, leaps=estimator.is_slow, known=known)
    if refusals and not ran:
        raise refusals[0]
    if found.size is not None and (end := min(sure_ends, default=found.size)) < found.size and ask(end) is Outcome.FITS:
        return found._replace(size=end)
    in_data = min((error.num_samples for error in refusals if error.num_samples is not None), default=None)
    if in_data is not None and found.size is not None and in_data < found.size and ask(in_data) is Outcome.FITS:
        return found._replace(size=in_data) if ran[in_data] == ran[found.size] else found
    return found


def half_as_much_again(size: int) -> int:
    """Return about half as much again as *size*, a multiple of the same power of two: a program may take no others."""
    power = size & -size
    return size + max(power, size // 2 // power * power)


def _seems_to_fit(program: Program, gpu: GpuSpec, stage: Stage | None, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether *stage* fits by the quick estimate; what nothing is known of does not, so that a search begins small."""
    quick = estimator.quick_estimate(program, gpu, stage)
    return quick is not None and budget.fits(quick)


def all_stages_seem_to_fit(program: Program, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether every stage fits by the quick estimate."""
    return all(_seems_to_fit(program, gpu, stage, estimator, budget) for stage in stages_of(program))


class StageQuestions(NamedTuple):
    """What a stage takes at most: by the estimator, and by its quick estimate."""

    peak_bytes: Callable[[Stage], int | None]
    """None for one that does not run."""
    quick_bytes: Callable[[Stage], int | None]
    """None where nothing is known of one like it: of the user's own program, of any with another number of negatives."""
    expect: Callable[[Stage], None]
    """Say that it will probably be asked for soon."""
    items_of: Callable[[Stage], int]
    """How many items it encodes for an anchor, as `items_of_anchor`."""
    budget_bytes: int


def questions_of(program: Program, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> StageQuestions:
    """Return what can be asked of stages of *program*, its micro-batch as it is."""

    def peak_bytes(stage: Stage) -> int | None:
        try:
            return estimator(program, gpu, stage).device_used.high_bytes
        except SizeRefusedError:
            return None

    def quick_bytes(stage: Stage) -> int | None:
        quick = estimator.quick_estimate(program, gpu, stage)
        return None if quick is None else quick.high_bytes

    return StageQuestions(
        peak_bytes,
        quick_bytes,
        expect=lambda stage: estimator.expect(program, gpu, [stage]),
        items_of=lambda stage: items_of_anchor(program, stage),
        budget_bytes=budget.budget_bytes,
    )


def near_misses(
    of_size: Callable[[int], Program], gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, *, largest: int, most: int
) -> list[int]:
    """Return the sizes above *largest* + 1 that may fit for all that is known: they seem to be hardly over the budget."""
    if estimator.is_slow:
        return []
    wider = budget.model_copy(update={"margin": 1 - (1 - budget.margin) * NEAR})
    sizes = range(largest + 2, min(most, int(largest * FARTHEST)) + 1)
    return [size for size in sizes if all_stages_seem_to_fit(of_size(size), gpu, estimator, wider)]


def is_tight(program: Program, gpu: GpuSpec, stage: Stage | None, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether *stage*, which does not fit, runs within the budget all the same, by giving cached memory back."""
    if not isinstance(estimator, ReplayingEstimator):
        return False
    usual = estimator(program, gpu, stage)
    beside_bytes = usual.device_used.high_bytes - usual.peak_reserved_bytes  # the context, and NCCL
    capacity_bytes = max(0, budget.budget_bytes - beside_bytes)
    return estimator.replay_with_capacity(program, gpu, stage, capacity_bytes=capacity_bytes).fits
