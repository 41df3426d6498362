"""The machine around the GPUs: its processes, its processors, its memory. The one module that uses psutil."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psutil

from memplan.units import format_bytes

MOST_DESCRIBED = 3
"""Processes that are named of those that hold memory of a GPU."""


class HostUse(NamedTuple):
    """What the host is doing."""

    cpu_percent: float
    """Of all processors together, since the last time this was asked in this process; 0 at the first."""
    ram_used_bytes: int
    """What cannot be given to a program that asks for it."""
    ram_total_bytes: int


def host_use() -> HostUse:
    """Return what the host is doing now."""
    memory = psutil.virtual_memory()
    return HostUse(psutil.cpu_percent(), int(memory.total - memory.available), int(memory.total))


def process_name(pid: int) -> str | None:
    """Return the program that process *pid* runs; None where it has ended, or this container does not show it."""
    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, OSError, ValueError):
        return None


def described(processes: Sequence[tuple[str | None, int, int | None]]) -> str:
    """Say which processes (name, number, bytes) hold memory of a GPU, as "python (77) 5.00 GiB, 2 more"."""
    told = [
        f"{name or 'process'} ({pid})" + (f" {format_bytes(used_bytes)}" if used_bytes is not None else "")
        for name, pid, used_bytes in processes[:MOST_DESCRIBED]
    ]
    more = len(processes) - MOST_DESCRIBED
    return ", ".join([*told, *([f"{more} more"] if more > 0 else [])])
