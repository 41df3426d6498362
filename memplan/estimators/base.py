"""What an estimator is: from a workload, a card and a stage to a MemoryEstimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from memplan.hardware.spec import GpuSpec
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.memory.requests import Replayed
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

if TYPE_CHECKING:
    from memplan.memory.measurement import Measurement
    from memplan.memory.trace import MemoryTrace


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


class Rehearsing(Estimator, Protocol):
    """An estimator that has run the steps, and so knows more of them than their peaks."""

    tells: Callable[[Any], None] | None
    """Is told of each rehearsal before it begins."""

    def trace(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryTrace:
        """Return every event of the allocator in that step."""
        ...

    def squeezed(
        self, workload: Workload, gpu: GpuSpec, stage: Stage | None, *, capacity_bytes: int, settings: str | None = None
    ) -> Replayed:
        """Return how the step goes where the allocator can have *capacity_bytes*, with its own settings or others."""
        ...

    def work_out(
        self, of_value: Callable[[int], tuple[Workload, Stage | None]], values: Sequence[int], gpu: GpuSpec
    ) -> list[tuple[MemoryRange, str]]:
        """Return what the step takes that *of_value* makes of each of *values*, and how that was found out: many from a few."""
        ...

    def under(self, settings: str) -> Estimator:
        """Return the estimator of the same steps under other allocator settings."""
        ...


def rehearsing(estimator: Estimator) -> Rehearsing | None:
    """Return *estimator* as one that rehearses; None for formulas, measurements and the like."""
    return cast("Rehearsing", estimator) if hasattr(estimator, "squeezed") else None
