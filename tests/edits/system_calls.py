"""A system where one chosen call fails: whatever Python asks of files, counted and refused from below the program.

`faults.py` fails the steps that `Files` names. Here the call itself fails: each open, read, write, flush to the disk, close, and each
question and change of names, wherever in memplan it is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CALLS = (
    "access",
    "chmod",
    "chown",
    "close",
    "fsync",
    "link",
    "listdir",
    "mkdir",
    "open",
    "rename",
    "replace",
    "scandir",
    "stat",
    "unlink",
    "utime",
)
"""What of `os` asks the system for something about files."""


class FailingCalls:
    """The calls of a stretch of a program, of which number *failing* fails with *code*; None fails none."""

    def __init__(self, failing: int | None, code: int = errno.EIO) -> None:
        self.failing = failing
        self.code = code
        self.made: list[str] = []

    def before(self, name: str) -> None:
        """Count the call, and fail where it is its turn."""
        self.made.append(name)
        if len(self.made) - 1 == self.failing:
            raise OSError(self.code, os.strerror(self.code))

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return *call*, counted."""

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.before(name)
            return call(*arguments, **keywords)

        return counted

    @contextlib.contextmanager
    def at_work(self) -> Iterator[FailingCalls]:
        """Count, and fail, what is called here."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self.around(name, getattr(os, name)))
            patch.setattr(fcntl, "flock", self.around("flock", fcntl.flock))
            patch.setattr(io, "open", self._opened)
            yield self

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *others: Any, **more: Any) -> Any:
        """Open *file* as `open` does, its raw file a counted one."""
        self.before("open")
        raw = _RawFile(file, mode.replace("b", "").replace("t", ""), calls=self)
        kind = io.BufferedReader if mode in ("r", "rb") else io.BufferedRandom if "+" in mode else io.BufferedWriter
        buffered: Any = kind(raw)  # type: ignore[arg-type, type-var]
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8")


class _RawFile(io.FileIO):
    """A file whose calls are counted."""

    def __init__(self, file: Any, mode: str, *, calls: FailingCalls) -> None:
        self._calls = calls
        super().__init__(file, mode)

    def readinto(self, buffer: Any) -> int:
        self._calls.before("read")
        return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        self._calls.before("read")
        return super().readall() or b""

    def write(self, data: Any) -> int:
        self._calls.before("write")
        return super().write(data) or 0

    def truncate(self, size: int | None = None) -> int:
        self._calls.before("truncate")
        return super().truncate(size)

    def close(self) -> None:
        if not self.closed:
            super().close()  # a close that fails has closed all the same
            self._calls.before("close")
