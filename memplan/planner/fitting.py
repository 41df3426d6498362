"""What fits: a workload with all its stages, on a budget, by an estimator; and the largest micro-batch that does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memplan.allocator.config import read_settings
from memplan.estimators.base import Estimator, ReplayingEstimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.memory.cuda_context import context_of
from memplan.planner.search import largest_fitting
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

NEAR = 1.1
FARTHEST = 1.25
"""Memory is not strictly monotone in the batch: sizes up to so many times the largest that fits may fit too, if they seem to be over the
budget by less than a tenth."""


def budget_of(gpu: GpuSpec, margin: float, allocator_settings: str = "") -> MemoryBudget:
    """Return what a plan may use of *gpu*: no more than the allocator's settings leave the process."""
    fraction = read_settings(allocator_settings).memory_fraction
    total_bytes = gpu.total_memory_bytes if fraction is None else int(fraction * gpu.total_memory_bytes)
    return MemoryBudget(total_bytes=total_bytes, others_used_bytes=gpu.others_used_bytes, margin=margin)


def stages_of(workload: Workload) -> Sequence[Stage | None]:
    """Return the stages; None for a workload without any."""
    return workload.stages or (None,)


def all_stages_fit(workload: Workload, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether every stage is within the budget, without giving anything back."""
    return all(budget.fits(estimator(workload, gpu, stage).device_used) for stage in stages_of(workload))


def heaviest_stage(workload: Workload, gpu: GpuSpec, estimator: Estimator) -> Stage | None:
    """Return the stage that takes most, as far as it is known without running any."""
    stages = stages_of(workload)
    if len(stages) == 1:
        return stages[0]

    def weight(stage: Stage | None) -> tuple[int, int]:
        quick = estimator.quick_estimate(workload, gpu, stage)
        items = workload.contrastive.samples_per_anchor(stage) if workload.contrastive is not None and stage is not None else 0
        return (quick.high_bytes if quick is not None else 0), items

    return max(stages, key=weight)


def largest_micro_batch(
    of_size: Callable[[int], Workload], gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, *, most: int
) -> int | None:
    """
    Return the largest size up to *most* with which the heaviest stage of *of_size* fits, or None.

    Whether the others do is for the plan to see, at the size that it chooses.
    """
    stage = heaviest_stage(of_size(1), gpu, estimator)
    return largest_fitting(
        lambda size: budget.fits(estimator(of_size(size), gpu, stage).device_used),
        low=1,
        high=most,
        guess=lambda size: _seems_to_fit(of_size(size), gpu, stage, estimator, budget),
    )


def _seems_to_fit(workload: Workload, gpu: GpuSpec, stage: Stage | None, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether *stage* fits by the quick estimate; what nothing is known of does not, so that a search begins small."""
    quick = estimator.quick_estimate(workload, gpu, stage)
    return quick is not None and budget.fits(quick)


def all_stages_seem_to_fit(workload: Workload, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether every stage fits by the quick estimate."""
    return all(_seems_to_fit(workload, gpu, stage, estimator, budget) for stage in stages_of(workload))


class StageQuestions(NamedTuple):
    """Whether a stage fits: by the estimator, and by its quick estimate."""

    fits: Callable[[Stage], bool]
    seems_to_fit: Callable[[Stage], bool]


def questions_of(workload: Workload, gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget) -> StageQuestions:
    """Return what can be asked of stages of *workload*, its micro-batch as it is."""
    return StageQuestions(
        fits=lambda stage: budget.fits(estimator(workload, gpu, stage).device_used),
        seems_to_fit=lambda stage: _seems_to_fit(workload, gpu, stage, estimator, budget),
    )


def near_misses(
    of_size: Callable[[int], Workload], gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, *, largest: int, most: int
) -> list[int]:
    """Return the sizes above *largest* + 1 that may fit for all that is known: they seem to be hardly over the budget."""
    if estimator.is_slow:
        return []
    wider = budget.model_copy(update={"margin": 1 - (1 - budget.margin) * NEAR})
    sizes = range(largest + 2, min(most, int(largest * FARTHEST)) + 1)
    return [size for size in sizes if all_stages_seem_to_fit(of_size(size), gpu, estimator, wider)]


def is_tight(workload: Workload, gpu: GpuSpec, stage: Stage | None, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether *stage*, which does not fit, runs within the budget all the same, by giving cached memory back."""
    if not isinstance(estimator, ReplayingEstimator):
        return False
    capacity_bytes = max(0, budget.budget_bytes - context_of(gpu).high_bytes)
    return estimator.replay_with_capacity(workload, gpu, stage, capacity_bytes=capacity_bytes).fits
