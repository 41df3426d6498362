"""
What a read of the device gets where nobody knows its value: what holds in an ordinary training, or zero.

A loss that is logged is some number, a check of it passes, a scaler finds no overflow. What may be a size or a choice, this module does not
know.
"""

from __future__ import annotations

import itertools
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from memplan.child.host_arithmetic import MOST_COMPUTED
from memplan.child.program_frames import TORCH, is_own, named, reads_itself
from memplan.child.source_lines import decides_branch, is_harmless_test, is_loop, is_made_whole, is_only_told, line_of, statement_text
from memplan.traces.read_basis import Basis

_LBFGS = "/lbfgs.py"
"""What the files of L-BFGS end with: PyTorch's, and the copies that packages make of it to change it."""
_JOIN = str(Path(TORCH) / "distributed" / "algorithms" / "join.py")
_DISTRIBUTIONS = str(Path(TORCH) / "distributions")
_SCALES = {str(Path(TORCH) / name) for name in ("amp/grad_scaler.py", "cuda/amp/grad_scaler.py")}
"""The second up to PyTorch 2.2."""
_BACKWARD = {str(Path(TORCH) / "autograd" / name) for name in ("graph.py", "__init__.py")}
"""Where Python calls autograd's engine: the second up to PyTorch 2.1."""
_CHECKPOINTS = ("_state_dict_utils.py", "checkpoint/_state_dict_stager.py", "checkpoint/filesystem.py")
_LOOKS_ONLY = {
    *(str(Path(TORCH) / name) for name in ("_tensor_str.py", "serialization.py", "package/package_exporter.py")),
    *(str(Path(TORCH) / "distributed" / name) for name in _CHECKPOINTS),
}
"""Where a tensor is read to be printed or saved."""
_TRACES = str(Path(TORCH) / "jit" / "_trace.py")
"""Where TorchScript compares what a trace computes with what the program did."""
_SAVES = "/safetensors/torch.py"
"""Where another package does that."""
_MONITORS = ("/pytorch/callbacks/early_stopping.py", "/pytorch_lightning/callbacks/early_stopping.py",
             "/pytorch/callbacks/model_checkpoint.py", "/pytorch_lightning/callbacks/model_checkpoint.py")  # fmt: skip
"""Where Lightning compares the number that it monitors with the best one so far, or with a threshold at which it stops."""

_RULES: tuple[tuple[str, bool, str], ...] = (
    (r"~\s*(\w+\.)*(isnan|isinf)\(", True, "an ordinary step has no NaN"),
    (r"~\s*(\w+\.)*isfinite\(", False, "an ordinary step's values are finite"),
    (r"isfinite|linalg\.eig(vals)?\(", True, "an ordinary step's values are finite"),
    (r"isnan|isinf|inf_or_nan|nonfinite|overflow|found_inf", False, "an ordinary step has no NaN and no overflow"),
    (r"^\s*assert\s+not\b", False, "an assertion holds"),
    (r"^\s*assert\b", True, "an assertion holds"),
    (r"^\s*(el)?if\s+not\b.*RAISES", True, "a check before a `raise` passes"),
    (r"^\s*(el)?if\b.*RAISES", False, "a check before a `raise` passes"),
    (r"repeat_interleave\(|\bnormal\(|\bmultinomial\(", True, "PyTorch's check of its own arguments passes"),  # multinomial's up to 2.3
)
"""Words in a line that reads a yes or no, the answer, and its reason. RAISES stands for a next line that raises."""

_FOR_PYTHON = ("item", "__float__", "tolist")
"""Methods that make Python's own numbers of a tensor, however many."""

MOST_COMPARED = 256
"""Bytes of other floats up to which a program may compare them, or what it makes of them: more are a picture, or a sound."""

_MASK = re.compile(r"\ball\(.*mask|mask.*\.all\(")


class Answer(NamedTuple):
    """What a read gets, and why."""

    content: bytes
    text: str
    basis: Basis
    reason: str


class Reading(NamedTuple):
    """A read that happens now."""

    frames: Sequence[FrameType]
    """The calls that it is in, the innermost first."""
    place: FrameType | None
    """The innermost of them that is the program's own."""
    size: int
    """In bytes."""
    dtype: torch.dtype | None
    """Of the tensor, where it is known."""
    method: str
    """The tensor's method that reads it, where it is one."""

    @property
    def files(self) -> list[str]:
        """Return the source files of the calls."""
        return [frame.f_code.co_filename for frame in self.frames]

    @property
    def text(self) -> str:
        """Return the statement of the program, on one line."""
        return statement_text(self.place) if self.place else ""

    @property
    def is_only_told(self) -> bool:
        """Say whether the program's own line reads it, and only shows it."""
        return self.place is not None and reads_itself(self.frames, self.place) and is_only_told(self.place)

    @property
    def is_yes_or_no(self) -> bool:
        """Say whether it can only be that."""
        return self.size == 1 and self.dtype in (None, torch.bool, torch.uint8)

    @property
    def has_several_floats(self) -> bool:
        """Say whether it is an action or the like, and no number that is logged."""
        return self.dtype is not None and self.dtype.is_floating_point and self.size > self.dtype.itemsize


FORMATS: Mapping[torch.dtype | None, str] = {torch.float16: "=e", torch.float32: "=f", torch.float64: "=d"}


def default_answer(read: Reading) -> Answer:
    """Return the answer that holds for ordinary training, where there is one; else zero."""
    if any(file in _LOOKS_ONLY or file.endswith(_SAVES) for file in read.files):
        return Answer(bytes(read.size), "0", "ordinary", "a tensor is printed or saved")
    shown = "false" if read.is_yes_or_no else "0"
    return ordinary_answer(read) or Answer(bytes(read.size), shown, "zero", "nothing is computed, so it reads zero")


def is_computed_picture(read: Reading) -> bool:
    """
    Say whether many bytes are copied to the host of which a run with values does not know one: what a model computes, as shades of colour.

    Masks that are made by a comparison, and what is chosen of classes, are known there up to as many bytes.
    """
    return MOST_COMPARED < read.size <= MOST_COMPUTED and read.dtype is torch.uint8 and read.method not in _FOR_PYTHON


def ordinary_answer(read: Reading) -> Answer | None:
    """Return what the value that is read is in an ordinary training; None where it may be a size, or a choice."""
    if read.is_yes_or_no:
        return _yes_or_no(read)
    if _is_backward_of("ProdBackward"):  # it counts zeros by `nonzero` (prod_backward in torch/csrc/autograd/FunctionsManual.cpp)
        return Answer(bytes(read.size), "0", "ordinary", "no factor of a product is zero")
    if read.size in (4, 8) and any(map(_is_of_lbfgs, read.frames)):
        return _falling("=f" if read.size == 4 else "=d")
    if read.dtype is not None and (read.dtype.is_floating_point or read.dtype.is_complex):
        return _ordinary_float(read)
    if not _SCALES.isdisjoint(read.files):  # its state_dict, in a checkpoint
        return Answer(bytes(read.size), "0", "ordinary", "the loss was scaled anew just now")
    if read.dtype is not None and read.method in ("item", "__int__") and read.is_only_told:
        return Answer((1).to_bytes(read.size, sys.byteorder), "1", "ordinary", "a number that is only shown")
    return None


def _is_backward_of(name: str) -> bool:
    """Say whether autograd runs the backward of an operation of that name in this thread now."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith(name)


def _ordinary_float(read: Reading) -> Answer | None:
    is_scale = not _SCALES.isdisjoint(read.files) or re.search(r"found_inf|overflow", read.text)
    format_ = FORMATS.get(read.dtype)
    if _JOIN in read.files:  # how many ranks still train: it waits until none does
        return Answer(bytes(read.size), "0", "rule", "the ranks that are not there end when this one does")
    if is_scale or format_ is None or read.size % struct.calcsize(format_):
        return Answer(bytes(read.size), "0", "ordinary", "no overflow was found" if is_scale else "a number that nothing computed")
    if read.method in ("__int__", "__index__") or (read.place is not None and is_made_whole(read.place, at_once=True)):
        return None
    number = _numbers.next(read)
    numbers = struct.pack(format_, number) * (read.size // struct.calcsize(format_))
    ones = struct.pack(format_, 1.0) * (read.size // struct.calcsize(format_))
    program = [frame for frame in read.frames if not is_own(frame.f_code.co_filename)]
    if read.place is not None and _ZERO in read.place.f_code.co_filename:
        return Answer(ones, "1.0", "ordinary", "DeepSpeed looks whether a norm is infinite: nothing is computed")
    if (read.method in _FOR_PYTHON or read.size <= MOST_COMPARED) and decides_branch(program):
        content, text = (bytes(read.size), "0.0") if _numbers.are_zero else (numbers, _numbers.text)
        return Answer(content, text, "compared", "nothing is computed, and the program compares it")
    if read.method in ("item", "__float__") and read.place is not None and is_made_whole(read.place):
        return Answer(ones, "1.0", "rounded", "nothing is computed: a share that becomes a size is all of it")
    return Answer(numbers, _numbers.text, "ordinary", "an ordinary number: nothing is computed")


_ZERO = "/deepspeed/runtime/zero/"


class _Numbers:
    """What a program gets of numbers that nothing computes: always one, or one that falls; where it branches by them, zero and yes."""

    def __init__(self) -> None:
        self.are_zero = self._fall = False
        self._num_read: Counter[str] = Counter()

    def set(self, kind: str) -> None:
        """Have numbers be of *kind* from here on: "zero", "falling", or nothing of that."""
        self.are_zero, self._fall = kind == "zero", kind == "falling"

    @property
    def text(self) -> str:
        """What is told of such a number."""
        return "less each time" if self._fall else "1.0"

    def next(self, read: Reading) -> float:
        """Return the number that the line gets now: of several a tenth less each time, as a loss that is checked at the end."""
        if not self._fall or read.place is None:
            return 1.0
        place = named(read.place)
        self._num_read[place] += 1
        return 0.9 ** min(self._num_read[place] - 1, _MOST_FALLS)


_MOST_FALLS = 80
"""Tenths less than which a number is not, so that half precision has it still."""

_numbers = _Numbers()


def answer_with_numbers(kind: str) -> None:
    """
    Answer such reads with numbers of *kind* from here on: "zero" (and yes), where the program branches by them; one (and no) before.

    "falling": of each line with less each time, wherever they are read.
    """
    _numbers.set(kind)


def branch_answer(read: Reading) -> Answer | None:
    """Return what a yes or no gets that nobody computes: one end, of which both are run, where something hangs on it. None for a loop's."""
    if read.place is None or is_loop(read.place):
        return None
    if read.is_only_told or is_harmless_test(read.place):
        return Answer(b"\0", "false", "ordinary", "a yes or no by which something is only told, or saved")
    shown = "true" if _numbers.are_zero else "false"
    return Answer(bytes([_numbers.are_zero]), shown, "compared", "nothing is computed, and the program goes one way or the other by it")


def _texts(read: Reading) -> Iterator[str]:
    """Yield the statement of the program that reads, and those that it returns what it reads to, as it is."""
    program = [frame for frame in read.frames if not is_own(frame.f_code.co_filename)]
    for frame in program[program.index(read.place) :] if read.place in program else ():
        text = statement_text(frame)
        yield text
        if not re.match(r"\s*return\b(?!\s+not\b)", text):
            break


def _is_of_lbfgs(frame: FrameType) -> bool:
    return frame.f_code.co_filename.lower().endswith(_LBFGS)


def _falling(format_: str) -> Answer:
    return Answer(struct.pack(format_, 1 / next(_losses)), "less each time", "rule", "the loss falls, so that L-BFGS goes on")


_losses = itertools.count(1)
"""How often L-BFGS asked for a number; one that stays would end its iterations."""


def _yes_or_no(read: Reading) -> Answer | None:
    """Return what a yes or no is in ordinary training; None where nobody can say it."""
    rule = check_that_passes(read)
    if rule is None and _is_check_of_trace(read):
        return Answer(b"\1", "true", "ordinary", "a trace computes what the program does")
    if rule is None and _MASK.search(read.text):
        return Answer(b"\0", "false", "padding", "a mask with padding, with which attention takes more memory than without a mask")
    return rule


def _is_check_of_trace(read: Reading) -> bool:
    """Say whether TorchScript itself reads it, and not the program that is traced."""
    inner = itertools.takewhile(lambda frame: frame is not read.place, read.frames)
    return any(frame.f_code.co_filename == _TRACES for frame in inner)


def check_that_passes(read: Reading) -> Answer | None:
    """Return the answer to a check that an ordinary training passes; None where it is no check."""
    if torch.is_anomaly_enabled() and next((file for file in read.files if not file.startswith("<")), "") in _BACKWARD:
        return Answer(b"\0", "false", "rule", "a backward finds no NaN, which anomaly detection looks for")
    called = itertools.takewhile(is_own, read.files)  # by the program, and below it
    of_lbfgs = next(map(line_of, filter(_is_of_lbfgs, read.frames)), None)
    if of_lbfgs is not None:
        goes_on = "ys >" in of_lbfgs or "abs(gtd_new) <=" in of_lbfgs
        return Answer(bytes([goes_on]), str(goes_on).lower(), "rule", "the first step of a line search is taken, and L-BFGS goes on")
    if any(file.startswith(_DISTRIBUTIONS) for file in called):
        return Answer(b"\1", "true", "rule", "a distribution's check of its arguments passes")
    for text in _texts(read):
        for pattern, value, reason in _RULES:
            if re.search(pattern, text):
                return Answer(bytes([value]), str(value).lower(), "rule", reason)
    if read.place is not None and read.place.f_code.co_filename.endswith(_MONITORS):
        improves = "threshold" not in read.text
        return Answer(bytes([improves]), str(improves).lower(), "rule", "what is monitored improves, and reaches no threshold")
    return None
