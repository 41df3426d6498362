"""The measured estimator: the step of a workload or of the user's own program, the same that a rehearsal runs, on a GPU of this machine."""

from __future__ import annotations

from memplan.errors import NotEstimatedError, NotRehearsedError, UsageError
from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.base import Estimator
from memplan.estimators.measure_program import measure_program
from memplan.estimators.steps import Step, with_fewest_micro_batches
from memplan.estimators.workload_steps import allocator_environment, check_packages, instead_of_running, step_of, values_of
from memplan.execution.measure import Measurer
from memplan.execution.measurement import Measurement
from memplan.execution.runner import Closing, not_run
from memplan.execution.step_source import StepSource
from memplan.hardware.gpu import GpuSpec
from memplan.memory.cuda_context import context_of
from memplan.memory.estimate import MemoryRange
from memplan.programs.user_program import UserProgram
from memplan.workload.parallelism import Parallelism
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import workload_of


class MeasuredEstimator(Estimator, Closing):
    """
    Runs steps on one GPU of this machine, each once. To be closed, or used in a `with`.

    A step that ran out of memory takes all of the GPU and what the failed allocation lacked, at the least, and by formulas more.
    """

    method = "measured"
    is_slow = True

    def __init__(self, gpu: GpuSpec) -> None:
        self._measurer = Measurer(StepSource("memplan.child.models.built_in", "build"), gpu)
        self._measured: dict[str, Measurement] = {}

    def close(self) -> None:
        """End the process that runs the steps."""
        self._measurer.close()

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Measurement:
        """
        Return what one step of *program* in *stage* took of the GPU.

        Raises NotRehearsedError where the step cannot be built or run, DoesNotFitError where not even CUDA itself can begin.
        """
        if isinstance(program, UserProgram):
            own = with_fewest_micro_batches(program, stage)
            assert isinstance(own, UserProgram)
            key = own.model_dump_json()
            found = self._measured.get(key) or measure_program(own, gpu)
        else:
            step = step_of(workload_of(program), gpu, stage)
            key = f"{step.family} {step.micro_batch_size}"
            found = self._measured.get(key) or self._of_workload(step)
        if key not in self._measured:
            found = found.model_copy(update={"values": {}, "trace": None})
            self._measured[key] = _with_what_was_missing(found, self.quick_estimate(program, gpu, stage), gpu)
        return self._measured[key]

    def _of_workload(self, step: Step) -> Measurement:
        check_packages(step)
        _check_is_whole(step.program.parallelism)
        settings = allocator_environment(step.program.training.allocator_settings)
        try:
            return self._measurer.measure(values_of(step), environment=settings)
        except UsageError as error:
            raise not_run(error, instead=instead_of_running(step)) from error

    def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """Return about what it takes, by the formulas; None where there are none."""
        if isinstance(program, UserProgram):
            return None
        try:
            return estimate(workload_of(program), gpu, stage).device_used
        except NotEstimatedError:
            return None


def _check_is_whole(parallelism: Parallelism) -> None:
    """Raise NotRehearsedError where each rank has a part of the model, or of the sequence: one GPU has nobody to share with."""
    if parallelism.is_sharded or parallelism.split_by:
        what = " and ".join(parallelism.split_by) or parallelism.strategy
        raise NotRehearsedError(f"{what} on {parallelism.num_gpus} GPUs cannot be measured on one", hint='use `method="rehearsed"`')


def _with_what_was_missing(found: Measurement, formula: MemoryRange | None, gpu: GpuSpec) -> Measurement:
    """Return *found*, where memory ran out, with what it takes: all of the GPU and the allocation that failed, or more by *formula*."""
    if found.fits or found.out_of_memory is None:
        return found
    outside = found.outside_bytes or context_of(gpu).expected_bytes
    asked = max(0, found.out_of_memory.requested_bytes - found.out_of_memory.free_bytes)
    least = max(found.peak_reserved_bytes + outside, gpu.free_memory_bytes) + asked
    expected, high = (formula.expected_bytes, formula.high_bytes) if formula is not None else (least, least)
    whole = MemoryRange(low_bytes=least, expected_bytes=max(least, expected), high_bytes=max(least, high))
    return found.model_copy(update={"device_used": whole})
