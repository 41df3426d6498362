"""What a program finds on its standard input, for its further runs too: nobody types it again."""

from __future__ import annotations

import ctypes
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MOST_BYTES = 65_536
"""What a pipe holds, unless somebody made it larger (pipe(7))."""
_WAIT_SECONDS = 0.1
"""For what is written into a pipe at the same time as this program begins."""
_NOT_BLOCKING = 2  # SPLICE_F_NONBLOCK of tee(2)


class StandardInput:
    """
    The standard input of this process as it is before a program reads it.

    Of a file that is the rest of it, of a pipe what lies in it now: it stays there, since the program may leave it to who comes after. What
    comes later, and what a person types at a terminal, only the first run gets.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._path: str | None = None
        self._offset = 0
        self._content = b""
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode):
                self._path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
                self._offset = os.lseek(descriptor, 0, os.SEEK_CUR)
            elif stat.S_ISFIFO(mode):
                self._content = _lying_in(descriptor)
        except OSError:  # it is closed
            return

    @contextmanager
    def again(self) -> Iterator[int]:
        """Give a descriptor that has what the program has found before."""
        if self._path is not None and Path(self._path).is_file():
            found = os.open(self._path, os.O_RDONLY)
            os.lseek(found, self._offset, os.SEEK_SET)
        elif self._content:
            found = os.memfd_create("standard input")
            os.write(found, self._content)
            os.lseek(found, 0, os.SEEK_SET)
        else:
            found = os.open(os.devnull, os.O_RDONLY)
        try:
            yield found
        finally:
            os.close(found)


def _lying_in(pipe: int) -> bytes:
    """Return what lies in *pipe*, and leave it there."""
    if not select.select([pipe], [], [], _WAIT_SECONDS)[0]:
        return b""
    copied, copying = os.pipe()
    try:
        size = ctypes.CDLL(None).tee(pipe, copying, ctypes.c_size_t(_MOST_BYTES), _NOT_BLOCKING)
        return os.read(copied, size) if size > 0 else b""
    finally:
        os.close(copied)
        os.close(copying)
