"""
The process of a whole program: waited for while signals are passed on to it, and ended with everything that it started.

It is one that was started for the program, or a fork of one that is warm (`warm.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from memplan.errors import UsageError

_GRACE_SECONDS = 10.0
"""What a program gets to end in, when it was asked to."""

_LOOKS_EVERY_SECONDS = 0.05

_SAME_SECONDS = 0.1
"""Within which a signal that comes again is the same one: `timeout -s INT` sends it to the process, and then to its group."""

USERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By which a person ends a program: they are passed on to it."""

_SI_KERNEL = 0x80  # siginfo's si_code of Ctrl-C (sigaction(2)): the terminal sends it to the program as well


class NotEndedError(UsageError):
    """A program did not end in the time that it was given."""

    after: signal.Signals | None = None
    """The signal that was to end it, where one was."""


class EndedTwiceError(UsageError):
    """A second signal came while a program was ending: whoever sent it waits for nothing more."""


class ProgramProcess(Protocol):
    """A process that was started, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """Return how it ended: an exit code, or minus the signal that ended it; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, where it still runs."""
        ...


def ignored_signals() -> list[signal.Signals]:
    """Return the signals that this process ignores, as `nohup` has it for SIGHUP, and that what it starts ignores too."""
    return [number for number in USERS_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]


def wait_for(
    process: ProgramProcess, timeout_seconds: float | None, *, is_over: Callable[[], bool] = lambda: False
) -> signal.Signals | None:
    """
    Wait for *process*, and pass on to it the signals that end programs; return the one that was, where there was one.

    It is left the time to end as it likes, and what it did until then is reported; a second signal ends it at once. *is_over* is asked
    from time to time, and ends the wait. Raises NotEndedError for one that does not end, EndedTwiceError after a second signal.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    asked: signal.Signals | None = None
    asked_at = 0.0
    awaited = {*USERS_SIGNALS, signal.SIGCHLD} - set(ignored_signals())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        while process.poll() is None:
            left = _LOOKS_EVERY_SECONDS if deadline is None else min(_LOOKS_EVERY_SECONDS, deadline - time.monotonic())
            if left <= 0:
                after = f"after {asked.name}" if asked else f"within {timeout_seconds:g} seconds"
                error = NotEndedError(
                    f"the program did not end {after}", hint="end it after fewer steps, or give it longer: `steps=3`, `timeout_seconds=600`"
                )
                error.after = asked
                raise error
            if is_over():
                break
            found = signal.sigtimedwait(awaited, left)
            if found is None or found.si_signo not in awaited or found.si_signo == signal.SIGCHLD:
                continue  # Python (3.11) returns what is no signal where its process was stopped for as long as it was to wait
            if asked is not None:
                if found.si_signo == asked and time.monotonic() < asked_at + _SAME_SECONDS:
                    continue
                name = signal.Signals(found.si_signo).name
                raise EndedTwiceError(f"the program was ended by a second {name}: there is nothing to report")
            asked, asked_at = signal.Signals(found.si_signo), time.monotonic()
            if found.si_code != _SI_KERNEL or not isinstance(process, subprocess.Popen):  # a fork has no terminal
                process.send_signal(asked)
            deadline = time.monotonic() + _GRACE_SECONDS
        return asked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ended_after(process: ProgramProcess, folder: str) -> Iterator[None]:
    """Leave no process behind: asked to end first, so that each can end its own and write what it saw, and then ended."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        _end_all_of(folder)


def _end_all_of(folder: str) -> None:
    """End every process that inherited the environment of the rehearsal whose results go to *folder*, whoever started it."""
    deadline = time.monotonic() + _GRACE_SECONDS
    left = all_of(folder)
    for number in left:
        with suppress(OSError):
            os.kill(number, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = all_of(folder)
    for number in left:
        with suppress(OSError):
            os.kill(number, signal.SIGKILL)


def all_of(folder: str) -> list[int]:
    """Return the processes of the rehearsal whose results go to *folder*."""
    mark = f"MEMPLAN_RESULTS={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is another's, or has ended
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found
