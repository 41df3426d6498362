"""What an estimator is: from a workload, a card and a stage to a MemoryEstimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from memplan.hardware.spec import GpuSpec
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.memory.requests import Replayed
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

if TYPE_CHECKING:
    from memplan.memory.measurement import Measurement


class Estimator(Protocol):
    """Anything that can tell the memory of a step. The planner takes one as an argument."""

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return the memory of one step of *workload* in *stage* (None: it has no stages) on *gpu*."""
        ...


def rough_of(estimator: Estimator) -> Estimator | None:
    """Return an estimator that says about the same in no time, so that a search can begin near its end; None where there is none."""
    rough: Estimator | None = getattr(estimator, "rough", None)
    return rough


class Measures(Protocol):
    """Runs a step on a real card. Another that the planner takes as an argument."""

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> Measurement:
        """Return what one step of *workload* in *stage* took of *gpu*."""
        ...


class Squeezer(Protocol):
    """Tells how a step goes on a card that is too small for all that it would reserve."""

    def __call__(
        self, workload: Workload, gpu: GpuSpec, stage: Stage | None, *, capacity_bytes: int, settings: str | None = None
    ) -> Replayed:
        """Return how the step goes where the allocator can have *capacity_bytes*, with its own settings or others."""
        ...


def squeezer_of(estimator: Estimator) -> Squeezer | None:
    """Return what tells so for the steps of *estimator*; None where it knows their peaks only."""
    squeezed: Squeezer | None = getattr(estimator, "squeezed", None)
    return squeezed


WorksOut = Callable[[Callable[[int], tuple[Workload, Stage | None]], Sequence[int], GpuSpec], list[tuple[MemoryRange, str]]]
"""From what a value makes of a workload, and values, to what each takes and how that was found out."""


def worker_of(estimator: Estimator) -> WorksOut | None:
    """Return what works out many sizes from a few; None where each is an estimate of its own."""
    works_out: WorksOut | None = getattr(estimator, "work_out", None)
    return works_out


def settings_of(estimator: Estimator) -> Callable[[str], Estimator] | None:
    """Return what gives the estimator of the same steps under other allocator settings; None where that makes no difference to it."""
    under: Callable[[str], Estimator] | None = getattr(estimator, "under", None)
    return under
