"""
Values that a program reads from the device.

Nothing is computed on the simulated GPU, so what it copies back are zeros. Where that decides what the program does next (a model asks
whether its attention mask is all ones), the number that a rehearsal gives depends on the answer. So every read is counted by the line of
the source that made it, and answered: as the user said, else as an ordinary training would have it, else with zero.
"""

from __future__ import annotations

import ctypes
import itertools
import linecache
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

DECIDES = 65_536
"""Copies above this many bytes are data that goes to the host, not values that decide something."""

_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTIONS = str(Path(_TORCH) / "distributions")
_OWN = str(Path(__file__).parent)
_READER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)

_DEFAULTS: tuple[tuple[str, bool, str], ...] = (
    (r"isfinite|linalg\.eig(vals)?\(", True, "an ordinary step's values are finite"),
    (r"isnan|isinf|nonfinite|overflow|found_inf", False, "an ordinary step has no NaN and no overflow"),
    (r"^\s*assert\s+not\b", False, "an assertion holds"),
    (r"^\s*assert\b", True, "an assertion holds"),
    (r"^\s*(el)?if\s+not\b.*RAISES", True, "a check before a `raise` passes"),
    (r"^\s*(el)?if\b.*RAISES", False, "a check before a `raise` passes"),
    (r"repeat_interleave\(|\bnormal\(|\bmultinomial\(", True, "PyTorch's check of its own arguments passes"),  # multinomial's up to 2.3
    (r"\ball\(.*mask|mask.*\.all\(", False, "a mask with padding, with which attention takes more memory than without a mask"),
)
"""Words in a line that reads a yes or no, the answer, and its reason. RAISES stands for a next line that raises."""


class Answer(NamedTuple):
    """What a read gets, and why."""

    text: str
    reason: str


class Reads:
    """Counts and answers the reads of this process."""

    def __init__(self, answers: dict[str, tuple[str, str | None]]) -> None:
        self.answers = answers
        """What the user said by FILE.py:LINE, and for which line of source (None: whichever it is)."""
        self.is_counting = True
        """Off, what is read is answered and not told of."""
        self._seen: dict[tuple[str, str], dict[str, Any]] = {}
        self._callback = _READER(self._read)
        self._sizes: _Sizes | None = None

    def attach(self) -> None:
        """Be asked by the device from now on; on a real one, nothing is asked."""
        device = _device()
        if device is not None:
            device(self._callback)
            if any("/" in answer for answer, _ in self.answers.values()):
                self._sizes = _Sizes()
                self._sizes.watch()

    def detach(self) -> None:
        """Be asked no more."""
        device = _device()
        if device is not None:
            device(_READER(0))

    def seen(self) -> list[dict[str, Any]]:
        """Return the reads by place, the most frequent first."""
        return sorted(self._seen.values(), key=lambda read: -read["count"])

    def _read(self, to: int, size: int) -> None:
        if size > DECIDES:
            return
        frames = _frames(sys._getframe(1))
        place = next((frame for frame in frames if not is_own(frame.f_code.co_filename)), frames[0] if frames else None)
        where = f"{place.f_code.co_filename}:{place.f_lineno}" if place else "?"
        text = _line(place) if place else ""
        answer = self._users(frames, size) or _default(text, frames, size)
        content = _content(answer.text, size, self._sizes.last if self._sizes else None)
        ctypes.memmove(to, content, size)
        if not self.is_counting:
            return
        read = self._seen.setdefault(
            (where, answer.text), {"place": where, "text": text, "count": 0, "answer": answer.text, "reason": answer.reason}
        )
        read["count"] += 1

    def _users(self, frames: list[FrameType], size: int) -> Answer | None:
        """
        Return what the user said for a line that the program is in.

        A number is not for a yes or no: a line may ask for that first (are all counts positive?), and is answered as ever.
        """
        for frame in frames if self.answers else ():
            for place, (answer, text) in self.answers.items():
                file, _, line = place.rpartition(":")
                if line == str(frame.f_lineno) and _is_file(frame.f_code.co_filename, file) and text in (None, _line(frame)):
                    if size == 1 and answer not in ("true", "false"):
                        return None
                    return Answer(answer, "your answer")
        return None


class _Sizes(TorchFunctionMode):
    """Knows how many elements the tensor has that is being counted (a mask, or how often to repeat): a share is a share of them."""

    last: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(getattr(func, "__name__", ""), args, kwargs)
        return func(*args, **(kwargs or {}))

    def watch(self) -> None:
        """Know it from now on."""
        with self:
            torch.ones(1)[torch.ones(1, dtype=torch.bool)]
        if self.last is None:  # up to 2.3 a mode is not told of indexing (THPVariable_getitem in python_variable_indexing.cpp)
            for name in ("__getitem__", "__setitem__"):
                setattr(torch.Tensor, name, self._noting_first(name, getattr(torch.Tensor, name)))
        self.__enter__()

    def _noting_first(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._note(name, args, None)
            return method(*args)

        return call

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        mask = None
        if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
            mask = args[0]
        elif name in ("__getitem__", "masked_select", "__setitem__", "index_put_"):
            mask = next((found for found in _flat(args[1:]) if isinstance(found, torch.Tensor) and found.dtype == torch.bool), None)
        elif name == "repeat_interleave":
            mask = (kwargs or {}).get("repeats", args[1] if len(args) > 1 else args[0])
        self.last = mask.numel() if isinstance(mask, torch.Tensor) else None


def _flat(values: Any) -> list[Any]:
    return [inner for value in values for inner in (_flat(value) if isinstance(value, (list, tuple)) else [value])]


def _device() -> Any:
    """Return the function of the simulated GPU that takes a reader; None on a real device."""
    try:
        function = ctypes.CDLL(None).memplan_on_read
    except AttributeError:
        return None
    function.argtypes, function.restype = [_READER], None
    return function


def _default(text: str, frames: list[FrameType], size: int) -> Answer:
    """Return the answer that holds for ordinary training."""
    if size == 1:
        called = itertools.takewhile(is_own, (frame.f_code.co_filename for frame in frames))  # by the program, and below it
        if any(file.startswith(_DISTRIBUTIONS) for file in called):
            return Answer("true", "a distribution's check of its arguments passes")
        for pattern, value, reason in _DEFAULTS:
            if re.search(pattern, text):
                return Answer(str(value).lower(), reason)
        return Answer("false", "nothing is computed, so it reads zero")
    return Answer("0", "nothing is computed, so it reads zero")


def _content(answer: str, size: int, of: int | None) -> bytes:
    """
    Return *size* bytes that say *answer*: true, false, an integer, a number with a point, or a share of the *of* elements asked about.

    Integers fill elements of 8 bytes where *size* allows it, else of 4; a number with a point those of 4 (fp32), or 8 (fp64).
    """
    if "/" in answer:
        value: int | float = round(Fraction(answer) * (of or 0))
    elif answer in ("true", "false"):
        value = int(answer == "true")
    else:
        value = float(answer) if "." in answer else int(answer)
    if isinstance(value, float):
        element = struct.pack("=f" if size % 4 == 0 and size != 8 else "=d", value)
    else:
        width = next(width for width in (8, 4, 2, 1) if size % width == 0)
        element = (value % 2 ** (8 * width)).to_bytes(width, sys.byteorder)
    return (element * (size // len(element) + 1))[:size]


def is_own(filename: str) -> bool:
    """Say whether a source file is PyTorch's or memplan's recorder, or none at all: not what a user looks for."""
    return filename.startswith((_TORCH + os.sep, _OWN + os.sep, "<"))


def _is_file(path: str, asked: str) -> bool:
    return path == asked or path.endswith(os.sep + asked.lstrip("./"))


def _line(frame: FrameType) -> str:
    """Return the line that *frame* is at, with a mark when what follows raises."""
    lines = [linecache.getline(frame.f_code.co_filename, frame.f_lineno + offset).rstrip("\n") for offset in (0, 1)]
    return lines[0].strip() + (" # RAISES" if lines[1].strip().startswith("raise") else "")


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return *frame* and its callers; in one of autograd's threads, where no program called, those of the main thread behind them."""
    found = list(_chain(frame))
    if all(is_own(frame.f_code.co_filename) for frame in found) and threading.current_thread() is not threading.main_thread():
        found += _chain(sys._current_frames().get(threading.main_thread().ident or 0))
    return [frame for frame in found if not frame.f_code.co_filename.startswith(_OWN + os.sep)]


def _chain(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_in(frame: FrameType) -> str | None:
    """Return the line of the program, FILE:LINE, that *frame* is in or was called from."""
    found = next((frame for frame in _frames(frame) if not is_own(frame.f_code.co_filename)), None)
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found else None
