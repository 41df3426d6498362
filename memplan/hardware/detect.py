"""
This machine's GPUs, as plans take them: those that a CUDA program started here would see, in CUDA's order.

In a machine of unlike GPUs CUDA counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and which MIG instances a process sees
depends on the driver. So there it is asked itself, and devices are told apart by UUID. Where it does not answer, and of GPUs that are
alike, CUDA_VISIBLE_DEVICES is read as CUDA reads it: numbers, GPU and MIG UUIDs or their beginnings; the list ends at the first entry that
names nothing; numbers count in the order of the PCI bus.

Of MIG instances (NVIDIA's MIG user guide, section "CUDA Device Enumeration") a process sees, with drivers before R570, the first one only
and then no other GPU; from R570 on all that are visible, beside other GPUs. The guide says nothing of numbers. pkg/gpu/cuda/env.go of
DataDog/datadog-agent (pull request 36377) has them count the GPUs that are not in MIG mode, and then those that are, each as its first
instance. The same is assumed where such a GPU is named by its UUID.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from memplan.errors import MissingError
from memplan.hardware.catalog import CatalogGpu, catalog_gpus
from memplan.hardware.cuda_order import cuda_uuids, digits_of
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.nvml import NvmlDevice, NvmlMachine, read_machine
from memplan.units import format_bytes


def detect_gpus(*, environment: Mapping[str, str] = os.environ, meminfo: Path = Path("/proc/meminfo")) -> list[GpuSpec]:
    """
    Return the GPUs that a CUDA program started here would see, with what others hold of each now.

    Raises MissingError when there is none, or none that tells its memory.
    """
    machine = read_machine()
    visible = devices_in_order(machine, environment)
    if not visible:
        raise MissingError(_why_none(machine, environment), hint='plan for a GPU by name or size: `gpu="a100-80"`, `gpu_memory=24`')
    specs = [spec for device in visible if (spec := spec_of(device, driver=_driver_of(machine), meminfo=meminfo))]
    if not specs:
        told = "; ".join(note for device in visible for note in device.notes) or "no reason given"
        raise MissingError(
            f"the driver lists {len(visible)} GPU(s) but tells no memory size ({told})", hint='name the GPU: `gpu="a100-80"`'
        )
    return specs


def _why_none(machine: NvmlMachine, environment: Mapping[str, str]) -> str:
    if not machine.devices:
        return "the NVIDIA driver answers, but this machine has no GPU"
    if "CUDA_VISIBLE_DEVICES" not in environment or all(device.mig_enabled for device in machine.devices):
        return "this machine's GPU is in MIG mode and has no instances"
    return f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES')!r} hides all {len(machine.devices)} GPU(s) of this machine"


def devices_in_order(machine: NvmlMachine, environment: Mapping[str, str] = os.environ) -> list[NvmlDevice]:
    """Return the devices that a CUDA program sees in *environment*, in its numbering."""
    usable = [device for device in machine.devices if not device.mig_enabled]
    are_unlike = len({device.name for device in usable}) > 1  # of GPUs that are alike the order is the bus's
    uuids = cuda_uuids(environment) if are_unlike or any(device.is_mig for device in usable) else None
    if uuids is not None:
        by_digits = {digits_of(device.uuid): device for device in usable if device.uuid}
        if all(uuid in by_digits for uuid in uuids):  # else CUDA's driver answers for another machine than NVML's
            return [by_digits[uuid] for uuid in uuids]
    return visible_devices(machine, environment.get("CUDA_VISIBLE_DEVICES"))


def _driver_of(machine: NvmlMachine) -> str | None:
    return machine.driver_version and machine.driver_version + (f" (CUDA {machine.cuda_version})" if machine.cuda_version else "")


def visible_devices(machine: NvmlMachine, variable: str | None) -> list[NvmlDevice]:
    """Return the devices that a CUDA_VISIBLE_DEVICES of *variable* leaves, in its order."""
    if variable is None:
        chosen = sorted((device for device in machine.devices if not device.mig_enabled), key=lambda device: device.is_mig)
    else:
        chosen = _chosen(variable, machine)
    first_instance = next((device for device in chosen if device.is_mig), None)
    return [first_instance] if first_instance and not _shows_many_instances(machine.driver_version) else chosen


def _chosen(variable: str, machine: NvmlMachine) -> list[NvmlDevice]:
    chosen: list[NvmlDevice] = []
    for entry in (part.strip() for part in variable.split(",")):
        found = _named(entry, machine.devices)
        if found is None:
            break  # CUDA reads no further than the first entry that names nothing
        if found in chosen:
            return []  # and shows no device at all when one stands twice
        chosen.append(found)
    return chosen


def _named(entry: str, devices: Sequence[NvmlDevice]) -> NvmlDevice | None:
    if entry.isascii() and entry.isdigit():
        digits = entry.lstrip("0") or "0"
        numbered = sorted((device for device in devices if not device.is_mig), key=lambda device: device.mig_enabled)
        matching = [device for number, device in enumerate(numbered) if str(number) == digits]
    elif entry.startswith(("GPU-", "MIG-")):
        matching = [device for device in devices if device.uuid and device.uuid.startswith(entry)]
    else:
        return None
    if len(matching) != 1:
        return None
    if not matching[0].mig_enabled:
        return matching[0]
    return next((device for device in devices if device.is_mig and device.parent_index == matching[0].index), None)


def _shows_many_instances(driver_version: str | None) -> bool:
    """Say whether CUDA of that driver shows a process more than one MIG instance; one that does not tell its version is taken for new."""
    branch = (driver_version or "").partition(".")[0]
    return not branch.isdecimal() or int(branch) >= 570


def spec_of(device: NvmlDevice, *, driver: str | None = None, meminfo: Path = Path("/proc/meminfo")) -> GpuSpec | None:
    """Return the GPU to plan for, run by *driver*, or None when nothing tells its memory."""
    known = _catalog_card(device)
    total_bytes, used_bytes, notes = _memory_of(device, known, meminfo)
    if total_bytes is None:
        return None
    if used_bytes:
        notes.append(f"{format_bytes(used_bytes)} in use by others now{_holders(device)}")
    return GpuSpec(
        name=device.name or (known.spec.name if known else f"GPU {device.index}"),
        total_memory_bytes=total_bytes,
        others_used_bytes=min(used_bytes, total_bytes),
        compute_capability=device.compute_capability or (known.spec.compute_capability if known else None),
        multiprocessors=known.spec.multiprocessors if known else None,
        unified_memory=known.spec.unified_memory if known else False,
        origin="; ".join(["found on this machine" + (f", driver {driver}" if driver else ""), *notes]),
        marketing_gb=known.spec.marketing_gb if known else None,
        uuid=device.uuid,
        driver_version=driver,
    )


def _holders(device: NvmlDevice) -> str:
    """Say who holds memory, who holds most first, as ": python (77) 5.00 GiB, …"."""
    from memplan.hardware.host import described, process_name  # noqa: PLC0415  (a plan for a GPU that nobody uses does without)

    told = described([(process_name(process.pid), process.pid, process.used_memory_bytes) for process in device.holders])
    return f": {told}" if told else ""


def _catalog_card(device: NvmlDevice) -> CatalogGpu | None:
    """Return the catalogue's entry of the same name and nearly the same total: one name can stand for two sizes."""
    for card in catalog_gpus():
        same_name = device.name is not None and card.spec.name == device.name
        if same_name and (
            device.total_memory_bytes is None
            or card.nvml_total_bytes is None
            or abs(card.nvml_total_bytes - device.total_memory_bytes) <= card.nvml_total_bytes // 10
        ):
            return card
    return None


def _memory_of(device: NvmlDevice, known: CatalogGpu | None, meminfo: Path) -> tuple[int | None, int, list[str]]:
    """Return what programs can have of the device, what others hold of it, and what to say of that."""
    used_bytes = device.used_memory_bytes or 0
    if device.total_memory_bytes is not None:
        # What programs can have is a little less than NVML's total; the catalogue says by how much for a GPU it knows, the driver's own
        # reserve for others.
        offered_bytes = device.total_memory_bytes - (device.reserved_memory_bytes or 0)
        if known is not None:
            offered_bytes = min(device.total_memory_bytes, known.spec.total_memory_bytes)
        return offered_bytes, used_bytes, []
    if known is not None and known.spec.unified_memory:
        total_bytes, available_bytes = _read_meminfo(meminfo)
        if total_bytes is not None:
            return total_bytes, total_bytes - (available_bytes or total_bytes), ["unified memory: the host's total and what it has free"]
    if known is not None:
        return known.spec.total_memory_bytes, 0, ["the driver tells no memory size: the catalogue's is taken"]
    return None, 0, []


def _read_meminfo(meminfo: Path) -> tuple[int | None, int | None]:
    """Return the host's total and available bytes, or None where the file does not say."""
    if not meminfo.exists():
        return None, None
    lines = (line.split() for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    return (total * 1024 if total else None), (available * 1024 if available else None)
