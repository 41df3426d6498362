"""`--profile` and `--method measured`: the step of a workload, the same that a rehearsal runs, on a GPU of this machine."""

from __future__ import annotations

from memplan.errors import UsageError
from memplan.estimators import analytic
from memplan.estimators.context import context_of
from memplan.estimators.measured import Measurer
from memplan.estimators.running import Closing, not_run
from memplan.estimators.target import Target
from memplan.estimators.workload_rehearsal import check_packages, step_of
from memplan.hardware.spec import GpuSpec
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.memory.measurement import Measurement
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload


class WorkloadMeasurements(Closing):
    """
    Runs steps of workloads on one card of this machine, each once: an Estimator. To be closed, or used in a `with`.

    A step that ran out of memory takes all of the card and what the failed allocation lacked, at the least, and by formulas more.
    """

    def __init__(self, gpu: GpuSpec) -> None:
        self._measurer = Measurer(Target("memplan.programs.built_in", "build"), gpu)
        self._measured: dict[tuple[str, int], Measurement] = {}

    def close(self) -> None:
        """End the process that runs the steps."""
        self._measurer.close()

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> Measurement:
        """
        Return what one step of *workload* in *stage* took of the card.

        Raises NotRehearsedError where the step cannot be built or run, DoesNotFitError where not even CUDA itself can begin.
        """
        step = step_of(workload, gpu, stage)
        key = step.family, step.micro_batch_size
        if key not in self._measured:
            check_packages(step)
            settings = {"PYTORCH_CUDA_ALLOC_CONF": workload.training.allocator_settings}
            try:
                found = self._measurer.measure({"workload": step.workload}, environment=settings)
            except UsageError as error:
                raise not_run(error) from error
            found = found.model_copy(update={"values": {}, "trace": None})
            self._measured[key] = _with_what_was_missing(found, self.rough(workload, gpu, stage), gpu)
        return self._measured[key]

    def rough(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return about what it takes, without running it."""
        return analytic.estimate(workload, gpu, stage)


def _with_what_was_missing(found: Measurement, formula: MemoryEstimate, gpu: GpuSpec) -> Measurement:
    """Return *found*, where memory ran out, with what it takes: all of the card and the allocation that failed, or more by *formula*."""
    if found.fits or found.out_of_memory is None:
        return found
    outside = found.outside_bytes or context_of(gpu).expected_bytes
    asked = max(0, found.out_of_memory.requested_bytes - found.out_of_memory.free_bytes)
    least = max(found.peak_reserved_bytes + outside, gpu.free_memory_bytes) + asked
    used = formula.device_used
    whole = MemoryRange(low_bytes=least, expected_bytes=max(least, used.expected_bytes), high_bytes=max(least, used.high_bytes))
    return found.model_copy(update={"device_used": whole})
