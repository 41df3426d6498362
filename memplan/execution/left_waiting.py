"""
Programs that wait for a process which has ended: a launcher that gets its trainer's result from a queue waits for ever when there is none.

There is none where `steps` ended the trainer, or where it failed. What is left is over when no process of the program does anything any
more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

OVER = ".over"
"""Of the empty file PROCESS.over that child/script.py makes where a process ends before its program has had what it wants of it."""

IDLE_SECONDS = 5.0
"""For how long nothing is done."""

_LOOKS_EVERY_SECONDS = 1.0
_IDLE_SHARE = 0.02
"""Of one core: a launcher that looks from time to time how its processes are uses less."""

_USER_TIME, _SYSTEM_TIME = 11, 12  # of the fields behind the name in /proc/PID/stat (proc_pid_stat(5): utime 14, stime 15)


class LeftWaiting:
    """Looks whether the processes of a run, which writes into *results*, wait for one that is over; *processes* are those left."""

    def __init__(self, results: Path, processes: Callable[[], Iterable[int]]) -> None:
        self._results, self._processes = results, processes
        self.was_idle = False
        self._looked_at = 0.0
        self._since: tuple[float, float] | None = None
        """Since when the program may be idle, and the seconds that it had worked then."""

    def is_idle(self) -> bool:
        """Say whether nothing has been done for a while since a process was over."""
        now = time.monotonic()
        if now < self._looked_at + _LOOKS_EVERY_SECONDS:
            return False
        self._looked_at = now
        if not any(map(_has_ended, _processes_over(self._results))):
            return False
        worked = sum(map(_worked_seconds, self._processes()))
        if self._since is None or not 0 <= worked - self._since[1] <= _IDLE_SHARE * (now - self._since[0]):
            self._since = now, worked
        self.was_idle = now - self._since[0] >= IDLE_SECONDS
        return self.was_idle


def _processes_over(results: Path) -> Iterator[int]:
    for file in results.glob(f"*{OVER}"):
        yield int(file.stem)


def _has_ended(process: int) -> bool:
    """Say whether a process is gone, or ended and is not waited for."""
    fields = _fields(process)
    return not fields or fields[0] == "Z"


def _worked_seconds(process: int) -> float:
    """Return the seconds of processor time that a process has had."""
    fields = _fields(process)
    return (int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _fields(process: int) -> list[str]:
    """Return what /proc says of a process, behind its name; nothing of one that is gone."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []
