"""The one module that uses NVML: what the driver says of this machine's GPUs, field by field.

Every query can fail on its own: a container without permission, WSL, a MIG parent, unified memory, a driver older than the call,
a GPU that fell off the bus. A failed query makes its field None and leaves a note; it never hides the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from memplan.errors import MissingError

T = TypeVar("T")


@dataclass(frozen=True)
class NvmlProcess:
    """A process that holds memory of a GPU."""

    pid: int
    used_memory_bytes: int | None
    """None where the driver does not say (WSL, containers)."""


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU, or one MIG instance, as the driver describes it. A field that it would not tell is None."""

    index: int
    """NVML's number: the order of the PCI bus, not CUDA's unless CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    uuid: str | None
    name: str | None
    total_memory_bytes: int | None
    used_memory_bytes: int | None
    """Without what the driver reserves for itself, where it tells the two apart."""
    compute_capability: tuple[int, int] | None
    reserved_memory_bytes: int | None = None
    """What the driver reserves for itself; None where it does not tell it from what programs use."""
    is_mig: bool = False
    parent_index: int | None = None
    mig_enabled: bool = False
    processes: tuple[NvmlProcess, ...] | None = None
    utilization_percent: int | None = None
    """Of the last sample period (a sixth of a second to a second), the share of the time in which a kernel ran."""
    notes: tuple[str, ...] = field(default=())

    @property
    def holders(self) -> list[NvmlProcess]:
        """Return the processes, who holds most first."""
        return sorted(self.processes or (), key=lambda process: -(process.used_memory_bytes or 0))


@dataclass(frozen=True)
class NvmlMachine:
    """All that NVML says of this machine."""

    driver_version: str | None
    devices: tuple[NvmlDevice, ...]
    cuda_version: str | None = None
    """The newest CUDA that the driver can run, as 13.0."""


@dataclass(frozen=True)
class NvmlDetails:
    """What a report says of one GPU besides. A field that the driver would not tell is None."""

    sm_clock_mhz: int | None
    """Now: an idle GPU is slow."""
    max_sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    max_memory_clock_mhz: int | None
    has_ecc_on: bool | None
    """None too for a GPU without ECC."""
    has_mig_on: bool | None
    """None too for a GPU that cannot be cut into instances."""
    num_nvlinks: int | None
    """Links that are active; None for a GPU without any."""
    num_peers: int | None
    """Other GPUs of this machine whose memory it can read by itself (P2P)."""


def read_machine() -> NvmlMachine:
    """
    Ask the driver for every GPU and MIG instance of this machine.

    Raises MissingError when there is no driver to ask, or it refuses to answer at all.
    """
    import pynvml

    with _session(pynvml):
        notes: list[str] = []
        driver = _ask(notes, "driver version", lambda: _text(pynvml.nvmlSystemGetDriverVersion()))
        cuda = _ask(notes, "CUDA version", pynvml.nvmlSystemGetCudaDriverVersion_v2)
        count = _ask(notes, "device count", pynvml.nvmlDeviceGetCount)
        if count is None:
            raise MissingError(f"the NVIDIA driver does not list its GPUs ({notes[-1]})", hint=_WITHOUT_GPU)
        devices = [device for index in range(count) for device in _read_card(pynvml, index)]
    return NvmlMachine(driver, tuple(devices), f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None)


def read_details(uuid: str) -> NvmlDetails | None:
    """Return what the driver says besides of the GPU or MIG instance *uuid*; None where it does not know it, or there is no driver."""
    import pynvml

    try:
        with _session(pynvml):
            handle = _ask([], "handle", lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
            return None if handle is None else _details(pynvml, handle, uuid)
    except MissingError:
        return None


def _details(pynvml: Any, handle: Any, uuid: str) -> NvmlDetails:
    sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    ecc = _ask([], "ECC", lambda: pynvml.nvmlDeviceGetEccMode(handle))
    mig = _ask([], "MIG mode", lambda: pynvml.nvmlDeviceGetMigMode(handle))
    return NvmlDetails(
        sm_clock_mhz=_ask([], "clock", lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, sm))),
        max_sm_clock_mhz=_ask([], "clock", lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, sm))),
        memory_clock_mhz=_ask([], "clock", lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, memory))),
        max_memory_clock_mhz=_ask([], "clock", lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, memory))),
        has_ecc_on=None if ecc is None else ecc[0] == pynvml.NVML_FEATURE_ENABLED,
        has_mig_on=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        num_nvlinks=_num_nvlinks(pynvml, handle),
        num_peers=_num_peers(pynvml, handle, uuid),
    )


def _num_nvlinks(pynvml: Any, handle: Any) -> int | None:
    told = [_link_state(pynvml, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    return None if all(state is None for state in told) else sum(state or 0 for state in told)


def _link_state(pynvml: Any, handle: Any, link: int) -> int | None:
    return _ask([], "NVLink", lambda: int(pynvml.nvmlDeviceGetNvLinkState(handle, link)))


_READ = 0  # NVML_P2P_CAPS_INDEX_READ of nvml.h; nvidia-ml-py 13 has a tuple by that name


def _num_peers(pynvml: Any, handle: Any, uuid: str) -> int | None:
    """Return how many other GPUs can be read; None where the driver tells of none, or this is the only one."""
    count = _ask([], "device count", pynvml.nvmlDeviceGetCount) or 0
    told = [_reads(pynvml, handle, uuid, index) for index in range(count)]
    return None if all(answer is None for answer in told) else sum(answer or False for answer in told)


def _reads(pynvml: Any, handle: Any, uuid: str, index: int) -> bool | None:
    """Say whether the GPU reads the one with that *index*; None where that is itself, or the driver does not tell."""
    other = _ask([], "handle", lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if other is None or _ask([], "UUID", lambda: _text(pynvml.nvmlDeviceGetUUID(other))) == uuid:
        return None
    return _ask([], "P2P", lambda: bool(pynvml.nvmlDeviceGetP2PStatus(handle, other, _READ) == pynvml.NVML_P2P_STATUS_OK))


class GpuUse(NamedTuple):
    """What is used of one GPU at one moment. None where the driver does not tell."""

    used_bytes: int | None
    """By all processes."""
    by_process: Mapping[int, int] | None
    """Bytes by process number, for those of which the driver tells."""


@contextmanager
def watched_gpu(uuid: str | None) -> Iterator[Callable[[], GpuUse]]:
    """
    Give a function that says what is used of the GPU now, as often as asked.

    Where there is no driver, or no such GPU, it says that nothing is known.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        yield lambda: GpuUse(None, None)
        return

    def use() -> GpuUse:
        handle = _ask([], "handle", lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid)) if uuid else None
        if handle is None:
            return GpuUse(None, None)
        listed = _read_processes(pynvml, handle, [])
        told = {each.pid: each.used_memory_bytes for each in listed or () if each.used_memory_bytes is not None}
        return GpuUse(_read_memory(pynvml, handle, [])[1], None if listed is None else told)

    try:
        yield use
    finally:
        _ask([], "shutdown", pynvml.nvmlShutdown)


_WITHOUT_GPU = 'plan for a GPU by name or size instead: `gpu="rtx4090"`, `gpu_memory=24`'


@contextmanager
def _session(pynvml: Any) -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError) as error:
        raise MissingError(f"no NVIDIA driver answers on this machine ({error})", hint=_WITHOUT_GPU) from error
    try:
        yield
    finally:
        _ask([], "shutdown", pynvml.nvmlShutdown)  # all is read by then


def _ask(notes: list[str], what: str, question: Callable[[], T]) -> T | None:
    """Return the driver's answer, or None and a note of why there is none."""
    try:
        return question()
    except Exception as error:  # besides NVMLError, nvidia-ml-py has errors of its own: a missing call, bytes that are no text, a mismatch
        notes.append(f"{what}: {error}")
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _read_card(pynvml: Any, index: int) -> Iterator[NvmlDevice]:
    """Yield the GPU with this index and, behind it, its MIG instances."""
    notes: list[str] = []
    handle = _ask(notes, "handle", lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        yield NvmlDevice(index, None, None, None, None, None, notes=tuple(notes))
        return
    mode = _ask([], "MIG mode", lambda: pynvml.nvmlDeviceGetMigMode(handle))
    mig_enabled = mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    yield _read_device(pynvml, handle, index, notes, mig_enabled=mig_enabled)
    if mig_enabled:
        instances = _ask(notes, "MIG instances", lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
        for number in range(instances):
            instance = _ask([], "MIG instance", lambda number=number: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))  # type: ignore[misc]
            if instance is not None:
                yield _read_device(pynvml, instance, number, [], parent=(index, handle))


def _read_device(
    pynvml: Any, handle: Any, index: int, notes: list[str], *, mig_enabled: bool = False, parent: tuple[int, Any] | None = None
) -> NvmlDevice:
    total_memory_bytes, used_memory_bytes, reserved_memory_bytes = _read_memory(pynvml, handle, notes)
    capability_of = parent[1] if parent else handle  # a MIG instance is asked through its GPU
    return NvmlDevice(
        index=index,
        uuid=_ask(notes, "UUID", lambda: _text(pynvml.nvmlDeviceGetUUID(handle))),
        name=_ask(notes, "name", lambda: _text(pynvml.nvmlDeviceGetName(handle))),
        total_memory_bytes=total_memory_bytes,
        used_memory_bytes=used_memory_bytes,
        reserved_memory_bytes=reserved_memory_bytes,
        compute_capability=_ask(notes, "compute capability", lambda: tuple(pynvml.nvmlDeviceGetCudaComputeCapability(capability_of))),
        is_mig=parent is not None,
        parent_index=parent[0] if parent else None,
        mig_enabled=mig_enabled,
        processes=_read_processes(pynvml, handle, notes),
        utilization_percent=_ask(notes, "utilization", lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        notes=tuple(notes),
    )


def _read_memory(pynvml: Any, handle: Any, notes: list[str]) -> tuple[int | None, int | None, int | None]:
    """
    Return total, used and reserved bytes.

    The second version of the call (driver 510 on) tells the driver's own reserve from what programs use; without it
    the first version's "used" holds both. WSL answers the second version with an error, unified memory both.
    """
    memory = _ask([], "memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    reserved_bytes = int(memory.reserved) if memory is not None else None
    if memory is None:
        memory = _ask(notes, "memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    if memory is None or not memory.total:
        return None, None, None
    return int(memory.total), int(memory.used), reserved_bytes


def _read_processes(pynvml: Any, handle: Any, notes: list[str]) -> tuple[NvmlProcess, ...] | None:
    listed = _ask(notes, "processes", lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if listed is None:
        return None
    return tuple(NvmlProcess(int(entry.pid), None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)) for entry in listed)
