"""What fits: a workload with all its stages, on a budget, by an estimator; and the largest micro-batch that does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memplan.allocator.config import read_settings
from memplan.estimators.base import Estimator, rehearsing, rough_of
from memplan.estimators.context import context_of
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.planner.search import Fits, largest_fitting
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
    judge = rough_of(estimator) or estimator
    return max(stages_of(workload), key=lambda stage: judge(workload, gpu, stage).device_used.high_bytes)


def largest_micro_batch(
    of_size: Callable[[int], Workload], gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, *, most: int
) -> int | None:
    """
    Return the largest size up to *most* with which the heaviest stage of *of_size* fits, or None.

    Whether the others do is for the plan to see, at the size that it chooses.
    """
    stage = heaviest_stage(of_size(1), gpu, estimator)

    def fits_by(judge: Estimator) -> Fits:
        return lambda size: budget.fits(judge(of_size(size), gpu, stage).device_used)

    rough = rough_of(estimator)
    return largest_fitting(fits_by(estimator), low=1, high=most, rough=fits_by(rough) if rough else None)


def near_misses(
    of_size: Callable[[int], Workload], gpu: GpuSpec, estimator: Estimator, budget: MemoryBudget, *, largest: int, most: int
) -> list[int]:
    """Return the sizes above *largest* + 1 that may fit for all that is known: they seem to be hardly over the budget."""
    rough = rough_of(estimator)
    if rough is None:
        return []
    wider = budget.model_copy(update={"margin": 1 - (1 - budget.margin) * NEAR})
    sizes = range(largest + 2, min(most, int(largest * FARTHEST)) + 1)
    return [size for size in sizes if all_stages_fit(of_size(size), gpu, rough, wider)]


def is_tight(workload: Workload, gpu: GpuSpec, stage: Stage | None, estimator: Estimator, budget: MemoryBudget) -> bool:
    """Say whether *stage*, which does not fit, runs within the budget all the same, by giving cached memory back."""
    rehearses = rehearsing(estimator)
    capacity_bytes = max(0, budget.budget_bytes - context_of(gpu).high_bytes)
    return rehearses is not None and rehearses.squeezed(workload, gpu, stage, capacity_bytes=capacity_bytes).fits
