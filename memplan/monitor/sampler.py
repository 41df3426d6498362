"""
What a machine does at one moment, and the peaks since somebody began to look.

Every sample asks the driver anew, so that a GPU that falls off the bus, a driver that is restarted or a process that ends is seen as such.
A figure that the driver does not tell (MIG, WSL, unified memory, permissions) is None, and hides no other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from pydantic import NonNegativeFloat, NonNegativeInt

from memplan.description import Description
from memplan.errors import MissingError
from memplan.hardware.detect import devices_in_order, spec_of
from memplan.hardware.host import host_use, process_name
from memplan.hardware.nvml import NvmlDevice, NvmlMachine, read_machine


class ProcessUse(Description):
    """A process that holds memory of a GPU."""

    pid: int
    """Its number; in a container that of the host."""

    name: str | None
    """Its program; None where this system does not show it."""

    used_bytes: NonNegativeInt | None
    """What it holds; None where the driver does not tell."""


class GpuSample(Description):
    """One GPU at one moment. What the driver does not tell is None."""

    number: NonNegativeInt
    """CUDA's number of it."""

    uuid: str | None = None
    """The driver's name for this one GPU."""

    name: str | None = None
    """The kind of GPU."""

    used_bytes: NonNegativeInt | None = None
    """By all processes."""

    total_bytes: NonNegativeInt | None = None
    """What programs can have."""

    utilization_percent: NonNegativeInt | None = None
    """Share of the last moment in which a kernel ran."""

    processes: tuple[ProcessUse, ...] | None = None
    """Who holds memory, who holds most first."""

    notes: tuple[str, ...] = ()
    """Why what is None is None."""


class Sample(Description):
    """A machine at one moment."""

    time: float
    """Seconds since 1970."""

    gpus: tuple[GpuSample, ...] = ()
    """Those that CUDA shows."""

    cpu_percent: NonNegativeFloat = 0.0
    """Of all processors together, since the sample before."""

    ram_used_bytes: NonNegativeInt = 0
    """What cannot be given to a program that asks."""

    ram_total_bytes: NonNegativeInt = 0
    """The host's memory."""

    torch_peak_reserved_bytes: NonNegativeInt | None = None
    """torch.cuda.max_memory_reserved() of this process, where it watches itself: a peak between samples too. Of its largest GPU."""

    problem: str | None = None
    """Why there are no GPUs, where the driver did not answer."""


class Sampler:
    """
    Takes samples, and keeps the peaks.

    *watches_itself*: this process trains, so that PyTorch's own peak counts; PyTorch is never loaded for that.
    """

    def __init__(self, *, watches_itself: bool = False) -> None:
        self._watches_itself = watches_itself
        self._peaks: dict[str, int] = {}
        self._order: list[str | None] | None = None
        host_use()  # the first figure of a processor's use is since nothing
        self._has_seen_gpus = False

    @property
    def peaks(self) -> Mapping[str, int]:
        """Return the most bytes that were used of each GPU, by `key_of`; of this process's own between samples too."""
        return self._peaks

    def sample(self) -> Sample:
        """Return what the machine does now. Raises MissingError where no GPU has ever been seen."""
        gpus: tuple[GpuSample, ...] = ()
        problem = None
        try:
            machine = read_machine()
            gpus = tuple(gpu_sample(number, device) for number, device in enumerate(self._in_order(machine)))
        except MissingError as error:
            problem = error.message
            if not self._has_seen_gpus:
                raise
        if not gpus and not self._has_seen_gpus:
            raise MissingError("CUDA shows no GPU here", hint="see what there is: `memplan gpus`")
        self._has_seen_gpus = True
        own = torch_peak_bytes() if self._watches_itself else {}
        host = host_use()
        for gpu in gpus:
            if gpu.used_bytes is not None:
                self._peaks[key_of(gpu)] = max(self._peaks.get(key_of(gpu), 0), gpu.used_bytes, own.get(gpu.number, 0))
        return Sample(
            time=time.time(),
            gpus=gpus,
            cpu_percent=host.cpu_percent,
            ram_used_bytes=host.ram_used_bytes,
            ram_total_bytes=host.ram_total_bytes,
            torch_peak_reserved_bytes=max(own.values(), default=None),
            problem=problem,
        )

    def _in_order(self, machine: NvmlMachine) -> list[NvmlDevice]:
        """Return the devices as CUDA showed them at first: CUDA is asked once, and a GPU that has fallen off keeps its number."""
        if self._order is None:
            found = devices_in_order(machine)
            self._order = [device.uuid for device in found]
            return found
        by_uuid = {device.uuid: device for device in machine.devices if device.uuid is not None}
        lost = iter([device for device in machine.devices if device.uuid is None])
        gone = NvmlDevice(0, None, None, None, None, None, notes=("it has disappeared",))
        return [(by_uuid.get(uuid) if uuid else None) or next(lost, gone) for uuid in self._order]


def key_of(gpu: GpuSample) -> str:
    """Return what tells *gpu* from the others of its machine."""
    return gpu.uuid or f"GPU {gpu.number}"


def gpu_sample(number: int, device: NvmlDevice) -> GpuSample:
    """Return *device*, CUDA's number *number*, as it is now."""
    spec = spec_of(device)
    is_told = device.used_memory_bytes is not None or (spec is not None and spec.unified_memory)
    processes = None
    if device.processes is not None:
        named = ((process_name(each.pid), each) for each in device.holders)
        processes = tuple(ProcessUse(pid=each.pid, name=name, used_bytes=each.used_memory_bytes) for name, each in named)
    return GpuSample(
        number=number,
        uuid=device.uuid,
        name=device.name,
        used_bytes=spec.others_used_bytes if spec is not None and is_told else None,
        total_bytes=spec.total_memory_bytes if spec is not None else None,
        utilization_percent=device.utilization_percent,
        processes=processes,
        notes=device.notes,
    )


def torch_peak_bytes() -> dict[int, int]:
    """Return PyTorch's reserved peak of this process on each GPU, by CUDA's number; nothing where it has not used CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {number: int(torch.cuda.max_memory_reserved(number)) for number in range(torch._C._cuda_getDeviceCount())}
