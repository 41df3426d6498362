"""The estimators by name."""

from __future__ import annotations

from memplan.estimators import analytic, guide
from memplan.estimators.base import Estimator
from memplan.hardware.spec import GpuSpec
from memplan.memory.estimate import MemoryEstimate
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload


class _Rehearsed:
    """The rehearsal of a workload, loaded when it is asked for: an analytic plan starts without it."""

    rough = staticmethod(analytic.estimate)

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        from memplan.estimators.workload_rehearsal import estimate  # noqa: PLC0415

        return estimate(workload, gpu, stage)


ESTIMATORS: dict[str, Estimator] = {
    "auto": analytic.estimate,  # the best that is there
    "analytic": analytic.estimate,
    "rehearsed": _Rehearsed(),
    "guide": guide.estimate,
}
