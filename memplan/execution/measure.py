"""
The measurement: the real step on a GPU of this machine, in a process of its own that sees no other GPU.

That process runs the steps as a rehearsal does (`running.py`), and waits at its end, with all its memory, until the driver has been asked
what it holds. Running out of memory is an answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memplan.execution.measurement import Measurement, measured_range
from memplan.execution.run_record import RunRecord
from memplan.execution.runner import DEFAULT_TIMEOUT_SECONDS, Closing, Runner
from memplan.execution.step_source import StepSource
from memplan.execution.summary import Run, rehearsal_of
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.nvml import GpuUse, watched_gpu
from memplan.hardware.torch_install import find_torch
from memplan.memory.cuda_context import context_of

_LOOK_SECONDS = 0.005


class Measurer(Closing):
    """
    Runs one program on *gpu*, a GPU of this machine, as often as asked. To be closed, or used in a `with`.

    Raises MissingError where this Python has no PyTorch for CUDA.
    """

    def __init__(self, source: StepSource, gpu: GpuSpec) -> None:
        find_torch()
        self._gpu = gpu
        self._runner = Runner(source)

    def close(self) -> None:
        """End the process and leave no file."""
        self._runner.close()

    def measure(
        self,
        values: Mapping[str, Any],
        *,
        steps: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> Measurement:
        """
        Return what the program does to the memory of the GPU, in a process that has used it for nothing before.

        *steps*: how many; None runs three, and ten where the third still takes more than the second or is of another size.
        *environment*: variables for this run.

        Raises UsageError when the program fails for another reason than memory, DoesNotFitError where not even CUDA itself can begin.
        """
        until = self._runner.folder / "until"
        for left_behind in (until, self._runner.result):  # by the run before: what is watched for would be there at once
            left_behind.unlink(missing_ok=True)
        with watched_gpu(self._gpu.uuid) as use, seen_at_the_end(use, self._runner.result.exists, until) as seen:
            before = use()
            status = self._runner.run(
                device=self._device,
                environment=environment or {},
                values=values,
                steps=steps,
                answers=None,
                checks_tensor_types=False,
                timeout_seconds=timeout_seconds,
                until=until,
            )
            record = self._runner.record(status)
        self._runner.check(record)
        return measurement_of(record, self._gpu, held_bytes(record.pid, before, seen))

    def _device(self) -> Mapping[str, str]:
        """Return the environment in which CUDA shows the GPU alone."""
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": self._gpu.uuid} if self._gpu.uuid else {})}


@contextmanager
def seen_at_the_end(use: Any, is_at_its_end: Callable[[], bool], until: Path) -> Iterator[list[GpuUse]]:
    """Ask what the GPU holds when the run *is at its end*, and let it go on by making *until*."""
    seen: list[GpuUse] = []
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(_LOOK_SECONDS):
            if is_at_its_end():
                seen.append(use())
                until.touch()
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        ends.set()
        watcher.join()


def held_bytes(pid: int, before: GpuUse, seen: list[GpuUse]) -> int | None:
    """Return what the process held at its end, by its number, or else by what all hold more than before; None where nobody tells."""
    if not seen:
        return None
    after = seen[0]
    if after.by_process is not None and pid in after.by_process:
        return after.by_process[pid]
    if after.used_bytes is None or before.used_bytes is None:
        return None
    return max(0, after.used_bytes - before.used_bytes)  # in a container the driver's process numbers are those of its host


def measurement_of(record: RunRecord, gpu: GpuSpec, held: int | None) -> Measurement:
    """Return what *record* shows of a run on *gpu*, and *held* bytes of it at its end where the driver told."""
    reserved = record.reserved_bytes
    outside = None if held is None or held <= reserved else held - reserved
    rehearsal = rehearsal_of(Run(record), context=context_of(gpu) if outside is None else measured_range(outside))
    told = dict(rehearsal) | {"method": "measured", "driver_version": gpu.driver_version, "step_seconds": record.step_seconds}
    if outside is None:
        return Measurement(**told)
    libraries = min(record.outside_bytes, outside)
    device = rehearsal.peak_reserved_bytes + outside
    return Measurement(**told, device_bytes=device, context_bytes=outside - libraries, libraries_bytes=libraries)
