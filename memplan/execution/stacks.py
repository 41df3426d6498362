"""
Where a program is that does not end: each process that is recorded writes its stack when it is asked to.

It does so by the signal that `child/script.py` has faulthandler wait for, which works in the midst of a call into C: most programs that do
not end wait there, for a rank that is not there or a lock.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STACK_SIGNAL = signal.SIGRTMAX - 1
"""The same as in `child/script.py`."""

SUFFIX = ".stack"
"""Of the file PROCESS.stack that a process writes its stack into, where it writes its results."""

_MOST_SECONDS = 2.0
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$', re.MULTILINE)  # as faulthandler writes one
# Files of packages, and what Inductor has written for a compiled function: cbsh….py in a folder of two letters.
_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/[a-z2-7]{2}/c[a-z2-7]{51}\.py$|^<")
_OURS = (str(Path(__file__).parents[1]), "<frozen importlib._memplan>")
"""Where memplan's own frames are: in its folder, or under the name that torch.compile leaves out (`child/not_compiled.py`)."""


class _Frame(NamedTuple):
    file: str
    line: str
    function: str


def where_it_is(results: Path) -> str | None:
    """
    Return the line that a program is at whose processes write into *results*, as `train.py:12, in torch.distributed: barrier`.

    Of several processes, that which was started last, by its number, of those that are in the program's own code: a worker of a DataLoader
    that waits to be asked is not. None where none of them answers.
    """
    asked: dict[Path, int] = {}
    """The files of those that are asked, with their sizes: what one wrote when it was asked before is over."""
    for file in sorted(results.glob(f"*{SUFFIX}"), key=lambda path: int(path.stem)):
        with suppress(OSError):  # it has ended
            if _waits_to_be_asked(int(file.stem)):
                asked[file] = file.stat().st_size
                os.kill(int(file.stem), STACK_SIGNAL)
    waiting: list[_Frame] = []
    for file, size in reversed(asked.items()):
        frames = list(_frames_of(_written(file, after=size)))
        if any(map(_is_own, frames)):
            return _described(frames)
        waiting = waiting or frames
    return _described(waiting) if waiting else None


def _waits_to_be_asked(process: int) -> bool:
    """Say whether *process* catches the signal, which would end any other: what it has become since, or what has its number now."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def _written(file: Path, *, after: int) -> str:
    """Return what *file* has behind byte *after*, as soon as it has a frame, and grows no more: a stack is written frame by frame."""
    deadline = time.monotonic() + _MOST_SECONDS
    before, text = "", _text_of(file, after)
    while (text != before or not _FRAME.search(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
        before, text = text, _text_of(file, after)
    return text


def _text_of(file: Path, after: int) -> str:
    return file.read_bytes()[after:].decode(errors="replace")


def _frames_of(text: str) -> Iterator[_Frame]:
    """Yield the frames of a stack as faulthandler writes it, the innermost first."""
    for match in _FRAME.finditer(text):
        if not match["file"].startswith(_OURS):
            yield _Frame(match["file"], match["line"], match["function"])


def _is_own(frame: _Frame) -> bool:
    return not _INSTALLED.search(frame.file)


def _described(frames: Iterable[_Frame]) -> str:
    """Return where the program's own code is, and what it calls there."""
    frames = list(frames)
    own = next(filter(_is_own, frames), frames[-1])
    inner = frames[0]
    called = "" if inner == own else f", in `{inner.function}` of {_short(inner.file)}:{inner.line}"
    return f"{_short(own.file)}:{own.line}{called}"


def _short(file: str) -> str:
    """Return the path of *file* within its package, or below this folder."""
    packaged = re.split(r"/(?:site|dist)-packages/|/lib/python3\.\d+/", file)[-1]
    if packaged != file:
        return packaged
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
