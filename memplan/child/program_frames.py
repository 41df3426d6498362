"""Where the program is: which of the calls on the stack are its own, and at which line."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch

from memplan.child.cold_caches import INDUCTOR

TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_TENSOR = str(Path(torch._tensor.__file__))
_PASSED_THROUGH = ("__torch_function__", "__torch_dispatch__")


def is_own(filename: str) -> bool:
    """Say whether a source file is PyTorch's, or written by Inductor, or memplan's recorder, or none at all: not what a user looks for."""
    written = os.environ.get(INDUCTOR)
    return filename.startswith((TORCH + os.sep, _OWN + os.sep, "<")) or (bool(written) and filename.startswith(f"{written}{os.sep}"))


def frames_from(frame: FrameType | None) -> list[FrameType]:
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
    found = program_frame(frames_from(frame))
    return named(found) if found else None


def program_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost of *frames* that is the program's own, and no class of tensors through which every operation goes."""
    return next((frame for frame in frames if not is_own(frame.f_code.co_filename) and frame.f_code.co_name not in _PASSED_THROUGH), None)


def reads_itself(frames: Sequence[FrameType], place: FrameType) -> bool:
    """Say whether the program's line at *place* reads the tensor by a method of it, and calls no function of PyTorch's that does."""
    inner = itertools.takewhile(lambda frame: frame is not place, frames)
    return all(frame.f_code.co_filename.startswith("<") or frame.f_code.co_filename == _TENSOR for frame in inner)


def named(frame: FrameType) -> str:
    """Return FILE:LINE of *frame*."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_file(path: str, asked: str) -> bool:
    """Say whether *path* is the file that a user *asked* for, who may have left out the folders that it is in."""
    return path == asked or path.endswith(os.sep + asked.lstrip("./"))
