"""The machine around the GPUs: its processes, its processors, its memory. The one module that uses psutil."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
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


_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""What a container may take and has taken: cgroups of version 2, and of 1."""


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that programs can still have, in this container where it is limited."""
    found = [int(psutil.virtual_memory().available)]
    for limit, taken in _LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or no limit ("max")
            found.append(int((cgroups / limit).read_text(encoding="ascii")) - int((cgroups / taken).read_text(encoding="ascii")))
    return max(0, min(found))


def has_room_for_another(pid: int) -> bool:
    """Say whether a process like *pid* can run beside it: on a processor of its own, and if both come to take twice what one does now."""
    try:
        taken = int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return False
    return len(os.sched_getaffinity(0)) > 1 and available_bytes() >= 3 * taken


def num_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # the first is Linux's


def bytes_of_children() -> int:
    """Return the memory that the processes that this one started have to themselves, what they share with others not counted."""
    found = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found += int(child.memory_full_info().uss)
    return found


def shared_memory_bytes(place: Path = Path("/dev/shm")) -> int | None:
    """Return what is free of the memory that processes share; None on a system without such a folder."""
    return shutil.disk_usage(place).free if place.is_dir() else None


def most_processes_of(size_bytes: int) -> int:
    """Return how many processes that take *size_bytes* each, and a processor, can run at once; at least 1."""
    return max(1, min(num_processors(), available_bytes() // size_bytes))


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
