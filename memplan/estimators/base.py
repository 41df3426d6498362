"""What an estimator is: from a workload, a card and a stage to a MemoryEstimate."""

from __future__ import annotations

from typing import Protocol

from memplan.hardware.spec import GpuSpec
from memplan.memory.estimate import MemoryEstimate
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload


class Estimator(Protocol):
    """Anything that can tell the memory of a step. The planner takes one as an argument."""

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return the memory of one step of *workload* in *stage* (None: it has no stages) on *gpu*."""
        ...


def rough_of(estimator: Estimator) -> Estimator | None:
    """Return an estimator that says about the same in no time, so that a search can begin near its end; None where there is none."""
    rough: Estimator | None = getattr(estimator, "rough", None)
    return rough
