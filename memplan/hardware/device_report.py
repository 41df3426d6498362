"""One GPU of this machine as a report has it: memory, driver, precisions, clocks, and how it reaches other GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.description import Description
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.nvml import NvmlDetails, read_details
from memplan.hardware.precisions import Support, precision_support
from memplan.units import format_bytes


class DeviceReport(Description):
    """A GPU. What the driver does not tell is None."""

    name: str
    """As the driver has it."""

    total_memory_bytes: int
    """What a program can allocate on the empty GPU."""

    others_used_bytes: int
    """What other processes hold now."""

    driver_version: str | None
    """With the newest CUDA that it runs."""

    compute_capability: tuple[int, int] | None
    """Major and minor."""

    precisions: dict[str, Support] | None
    """By type: native, emulated, or none."""

    is_mig: bool
    """It is a MIG instance."""

    sm_clock_mhz: int | None = None
    """Now."""

    max_sm_clock_mhz: int | None = None
    """At most."""

    memory_clock_mhz: int | None = None
    """Now."""

    max_memory_clock_mhz: int | None = None
    """At most."""

    has_ecc_on: bool | None = None
    """None too for a GPU without ECC."""

    has_mig_on: bool | None = None
    """None too for a GPU that cannot be cut into instances, and for an instance."""

    num_nvlinks: int | None = None
    """Links that are active."""

    num_peers: int | None = None
    """Other GPUs of this machine whose memory it can read by itself."""

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return what there is to say, name by name; what nobody told is left out."""
        return tuple(_facts(self))


def report_of(gpu: GpuSpec) -> DeviceReport:
    """Return the report of *gpu*, one of this machine."""
    details = read_details(gpu.uuid) if gpu.uuid else None
    more = {} if details is None else {name: getattr(details, name) for name in NvmlDetails.__dataclass_fields__}
    return DeviceReport(
        name=gpu.name,
        total_memory_bytes=gpu.total_memory_bytes,
        others_used_bytes=gpu.others_used_bytes,
        driver_version=gpu.driver_version,
        compute_capability=gpu.compute_capability,
        precisions=precision_support(gpu.compute_capability) if gpu.compute_capability else None,
        is_mig=(gpu.uuid or "").startswith("MIG-"),
        **more,
    )


def _facts(report: DeviceReport) -> Iterator[tuple[str, str]]:
    free = f", {format_bytes(report.others_used_bytes)} in use by others" if report.others_used_bytes else ""
    yield "memory", f"{format_bytes(report.total_memory_bytes)} for programs{free}"
    if report.driver_version:
        yield "driver", report.driver_version
    if report.compute_capability:
        yield "capability", ".".join(map(str, report.compute_capability))
    if report.precisions:
        yield "precisions", ", ".join(f"{name} {support}" for name, support in report.precisions.items())
    yield from _clock("SM clock", report.sm_clock_mhz, report.max_sm_clock_mhz)
    yield from _clock("memory clock", report.memory_clock_mhz, report.max_memory_clock_mhz)
    if report.has_ecc_on is not None:
        yield "ECC", "on" if report.has_ecc_on else "off"
    if report.is_mig or report.has_mig_on is not None:
        yield "MIG", "an instance" if report.is_mig else "on" if report.has_mig_on else "off"
    if report.num_nvlinks is not None:
        yield "NVLink", f"{report.num_nvlinks} links active"
    if report.num_peers is not None:
        yield "P2P", f"reads the memory of {report.num_peers} other GPU{'' if report.num_peers == 1 else 's'}"


def _clock(name: str, now: int | None, most: int | None) -> Iterator[tuple[str, str]]:
    if now is not None or most is not None:
        yield name, f"{'?' if now is None else now} MHz now, {'?' if most is None else most} at most"
