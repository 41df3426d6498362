"""
Values that a program reads from the device.

Nothing is computed on the simulated GPU. Where a value that is read decides what the program does next (how many elements of a mask are
set, whether a mask has padding, how many tokens an expert gets), the number that a rehearsal gives depends on it. So every read is counted
by the line of the source that made it, and answered by what is known: what the values pass found (`host_values.py`), what the user said,
what holds in an ordinary training; else with zero, and then the report says so.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch

from memplan.child.recorded_values import RecordedValues
from memplan.child.source_lines import is_made_whole, is_only_told, line_of, statement_of, statement_text

DECIDES = 65_536
"""Copies above this many bytes are data that goes to the host, not values that decide something, as long as nobody knows them."""

_TORCH = str(Path(torch.__file__).parent)
_LBFGS = str(Path(_TORCH) / "optim" / "lbfgs.py")
_DISTRIBUTIONS = str(Path(_TORCH) / "distributions")
_LOOKS_ONLY = {str(Path(_TORCH) / name) for name in ("_tensor_str.py", "serialization.py")}
"""Where a tensor is read to be printed or saved."""
_SAVES = "/safetensors/torch.py"
"""Where another package does that."""

_SCALES = str(Path(_TORCH) / "amp" / "grad_scaler.py")
_OWN = str(Path(__file__).parent)
_NOT_COMPILED = "<frozen importlib._memplan>"
"""Named as the file of a function that torch.compile leaves alone (SKIP_DIRS in its trace_rules.py): it would trace it, and warn."""

_PASSED_THROUGH = ("__torch_function__", "__torch_dispatch__")

_READER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)

Basis = Literal["data", "answer", "assumed", "rule", "padding", "rounded", "ordinary", "zero"]
"""What an answer stands on: the program's own data, the user, an assumption about what floats decide, what holds in an ordinary training,
the worse of two cases (a mask has padding), all of what a float may be a share of, a number that a program only looks at, or nothing."""

_RULES: tuple[tuple[str, bool, str], ...] = (
    (r"~\s*(\w+\.)*(isnan|isinf)\(", True, "an ordinary step has no NaN"),
    (r"~\s*(\w+\.)*isfinite\(", False, "an ordinary step's values are finite"),
    (r"isfinite|linalg\.eig(vals)?\(", True, "an ordinary step's values are finite"),
    (r"isnan|isinf|nonfinite|overflow|found_inf", False, "an ordinary step has no NaN and no overflow"),
    (r"^\s*assert\s+not\b", False, "an assertion holds"),
    (r"^\s*assert\b", True, "an assertion holds"),
    (r"^\s*(el)?if\s+not\b.*RAISES", True, "a check before a `raise` passes"),
    (r"^\s*(el)?if\b.*RAISES", False, "a check before a `raise` passes"),
    (r"repeat_interleave\(|\bnormal\(|\bmultinomial\(", True, "PyTorch's check of its own arguments passes"),  # multinomial's up to 2.3
)
"""Words in a line that reads a yes or no, the answer, and its reason. RAISES stands for a next line that raises."""

_MASK = re.compile(r"\ball\(.*mask|mask.*\.all\(")


class Answer(NamedTuple):
    """What a read gets, and why."""

    content: bytes
    text: str
    basis: Basis
    reason: str


class Said(NamedTuple):
    """What the user said for a line."""

    text: str
    reason: str
    """By which it is known again: the place as it was given."""


USERS = "your answer for "
ONE_CHOICE = "of one choice, an action or a token, the first"
"""Why a place is zero that a model chose, whichever the assumption about larger choices."""

MOST_NOTED = 20_000
"""Reads of which it is noted how many allocations came before."""

_DECIDES_NOTHING = ("rule", "ordinary")

MOST_SCOUTED = 256
"""How often one line gets the same yes or no in one step of a run that only shows what is asked: a loop may wait for the other."""

MOST_WAITED = 10_000
"""The same in a run with values, where nobody knows the answer: a loop that asks for so long is endless."""


class Reads:
    """Counts and answers the reads of this process."""

    def __init__(self, answers: dict[str, tuple[str, str | None]], recorded: RecordedValues | None = None) -> None:
        self.answers = answers
        """What the user said by FILE.py:LINE, and for which line of source (None: whichever it is)."""
        self.recorded = recorded
        """What a values pass found, to be read again by the same lines in the same order."""
        self.known: Callable[[int], tuple[bytes, str | None] | None] = lambda size: None  # noqa: ARG005
        """In a values pass: the bytes of what is being read, and the assumption that they stand on, where they are known."""
        self.known_dtype: Callable[[], torch.dtype | None] = lambda: None
        """In a values pass: the type of what is being read, where that is known."""
        self.on_answer: Callable[[str, int, bytes | None, str | None, str | None], None] | None = None
        """In a values pass: takes place, size, content (None: not known), assumption and type of each read."""
        self.num_allocs: Callable[[], int] = lambda: 0
        """How many allocations there have been."""
        self._num_noted = 0
        self.is_counting = True
        """Off, what is read is answered and not told of."""
        self._is_known = False
        self._unknown: Counter[str] = Counter()
        self._seen: dict[tuple[str, str], dict[str, Any]] = {}
        self._callback = _READER(self._read)

    def attach(self) -> None:
        """Be asked by the device from now on; on a real one, nothing is asked."""
        device = _device()
        if device is not None:
            _note_types()
            device(self._callback)

    def detach(self) -> None:
        """Be asked no more."""
        device = _device()
        if device is not None:
            device(_READER(0))

    def begin_step(self) -> None:
        """Count anew how often a line asks for what nobody knows."""
        self._unknown.clear()

    def seen(self) -> list[dict[str, Any]]:
        """Return the reads by place, the most frequent first."""
        return sorted(self._seen.values(), key=lambda read: -read["count"])

    def copied_back(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what was copied to *tensor* just now; None where the device does not know it any more."""
        self._is_known = True
        try:
            content = tensor.cpu()
            return content if self._is_known else None
        finally:
            self._is_known = False

    def _read(self, to: int, size: int) -> None:
        if self._is_known:  # the device would not ask for what it knows
            self._is_known = False
            return
        if size > DECIDES and self.recorded is None and self.on_answer is None and not _reads_integers():
            return
        frames = frames_from(sys._getframe())
        place = _of_program(frames)
        where = _named(place) if place else "PyTorch"  # by one name, however it comes there
        text = line_of(place) if place else ""
        known = self._from_data(where, size)  # asked in any case: its turns are counted
        dtype = known if isinstance(known, torch.dtype) else getattr(_reading, "dtype", None)
        answer = self.users(frames, size) or (known if isinstance(known, Answer) else None)
        if answer is None and size > DECIDES and not _reads_integers():
            return
        if answer is not None and answer.basis == "assumed":
            ordinary = _ordinary(frames, place, size, dtype)  # a check that passes, or a number that is logged, is no choice of the model
            answer = ordinary if ordinary is not None and ordinary.basis in ("rule", "ordinary") else answer
        elif answer is not None and answer.basis == "data" and _is_yes_or_no(size, dtype):
            rule = _rule(statement_text(place) if place else "", frames)  # a check that passes decides nothing, known or not
            answer = rule if rule is not None and rule.content == answer.content else answer
        answer = answer or _default(frames, place, size, dtype)
        if answer.basis == "zero" and _is_yes_or_no(size, dtype):
            answer = self._ending(where, answer)
        ctypes.memmove(to, answer.content, size)
        if not self.is_counting:
            return
        read = self._seen.setdefault(
            (where, answer.text),
            {
                "place": where,
                "text": text,
                "count": 0,
                "answer": answer.text,
                "reason": answer.reason,
                "basis": answer.basis,
                "positions": [],
            },
        )
        read["count"] += 1
        if answer.basis not in _DECIDES_NOTHING and self._num_noted < MOST_NOTED and not (place and is_only_told(place)):
            self._num_noted += 1
            read["positions"].append(self.num_allocs())

    def _from_data(self, where: str, size: int) -> Answer | torch.dtype | None:
        """Return what the program's data say, or else the type: in a values pass what is known now, behind one what it recorded."""
        known: tuple[bytes, str | None] | str | None
        if self.on_answer is not None:
            dtype = self.known_dtype()
            name = str(dtype).removeprefix("torch.") if dtype is not None else None
            found = self.known(size)
            content, assumption = found or (None, None)
            self.on_answer(where, size, content, assumption, name)
            known = found or name
        else:
            known = self.recorded.next(where, size) if self.recorded is not None else None
        if known is None or isinstance(known, str):
            return getattr(torch, known or "", None)
        content, assumption = known
        if assumption is not None and assumption.startswith(USERS):
            said = self.answers.get(assumption.removeprefix(USERS))
            return Answer(content, said[0] if said else _shown(content), "answer", assumption)
        shown = _shown(content, getattr(_reading, "dtype", None))
        if assumption is not None:
            return Answer(content, shown, "ordinary" if assumption == ONE_CHOICE else "assumed", assumption)
        return Answer(content, shown, "data", "computed on the host from the program's data")

    def _ending(self, where: str, answer: Answer) -> Answer:
        """Answer a line that asks for a yes or no again and again with the other one at last: texts are generated until all have ended."""
        self._unknown[where] += 1
        is_scout = self.on_answer is None and self.recorded is None
        if self._unknown[where] % (MOST_SCOUTED if is_scout else MOST_WAITED):
            return answer
        return Answer(b"\1", "true", "zero", "it was asked for again and again, and a loop may wait for it")

    def users(self, frames: Sequence[FrameType], size: int) -> Answer | None:
        """
        Return what the user said for a line that the program is in.

        A number is not for a yes or no: a line may ask for that first (are all counts positive?), and is answered as ever.
        """
        said = self.said(frames)
        if said is None or "/" in said.text or (size == 1 and said.text not in ("true", "false")):
            return None
        return Answer(_content(said.text, size), said.text, "answer", said.reason)

    def said(self, frames: Sequence[FrameType]) -> Said | None:
        """Return what the user said for a statement that one of *frames* is in."""
        for frame in frames if self.answers else ():
            for place, (answer, text) in self.answers.items():
                file, _, line = place.rpartition(":")
                if _is_file(frame.f_code.co_filename, file) and int(line) in statement_of(frame) and text in (None, line_of(frame)):
                    return Said(answer, USERS + place)
        return None


def is_simulated() -> bool:
    """Say whether the device of this process is the simulated one."""
    return _device() is not None


def _device() -> Any:
    """Return the function of the simulated GPU that takes a reader; None on a real device."""
    try:
        function = ctypes.CDLL(None).memplan_on_read
    except AttributeError:
        return None
    function.argtypes, function.restype = [_READER], None
    return function


# which type is read

_reading = threading.local()
"""The type of the tensor that a method of it reads at the moment, in this thread, and the method's name."""

_READING = ("item", "tolist", "cpu", "to", "__bool__", "__float__", "__int__", "__index__")


def _note_types() -> None:
    """Have the methods that read a tensor say its type: four bytes may be a loss that is printed, or a number of tokens."""
    for name in _READING:
        method = getattr(torch.Tensor, name)
        if not hasattr(method, "is_noted"):
            setattr(torch.Tensor, name, _noting_type(name, method))


def _reads_integers() -> bool:
    """Say whether a tensor of integers or of yes and no is being read: however large, it may say how large others are."""
    dtype = getattr(_reading, "dtype", None)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _noting_type(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        outer = getattr(_reading, "dtype", None), getattr(_reading, "name", "")
        _reading.dtype, _reading.name = self.dtype, name
        try:
            return method(self, *arguments, **keywords)
        finally:
            _reading.dtype, _reading.name = outer

    noting: Any = call
    noting.__code__ = noting.__code__.replace(co_filename=_NOT_COMPILED)
    noting.is_noted = True
    return noting


# what is answered where nobody knows

_FORMATS = {torch.float16: "=e", torch.float32: "=f", torch.float64: "=d"}


def _default(frames: list[FrameType], place: FrameType | None, size: int, dtype: torch.dtype | None) -> Answer:
    """Return the answer that holds for ordinary training, where there is one; else zero."""
    if any(frame.f_code.co_filename in _LOOKS_ONLY or frame.f_code.co_filename.endswith(_SAVES) for frame in frames):
        return Answer(bytes(size), "0", "ordinary", "a tensor is printed or saved")
    ordinary = _ordinary(frames, place, size, dtype)
    if ordinary is not None:
        return ordinary
    return Answer(bytes(size), "false" if _is_yes_or_no(size, dtype) else "0", "zero", "nothing is computed, so it reads zero")


def _ordinary(frames: list[FrameType], place: FrameType | None, size: int, dtype: torch.dtype | None) -> Answer | None:
    """Return what the value that is read is in an ordinary training; None where it may be a size, or a choice."""
    text = statement_text(place) if place else ""
    if _is_yes_or_no(size, dtype):
        return _yes_or_no(text, frames)
    if size in (4, 8) and any(frame.f_code.co_filename == _LBFGS for frame in frames):
        return _falling("=f" if size == 4 else "=d")
    if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
        return _ordinary_float(dtype, text, frames, place, size)
    if place is not None and dtype is not None and getattr(_reading, "name", "") in ("item", "__int__") and is_only_told(place):
        return Answer((1).to_bytes(size, sys.byteorder), "1", "ordinary", "a number that is only shown")
    return None


def _ordinary_float(dtype: torch.dtype, text: str, frames: list[FrameType], place: FrameType | None, size: int) -> Answer | None:
    is_scale = any(frame.f_code.co_filename == _SCALES for frame in frames) or re.search(r"found_inf|overflow", text)
    format_ = _FORMATS.get(dtype)
    if is_scale or format_ is None or size % struct.calcsize(format_):
        return Answer(bytes(size), "0", "ordinary", "no overflow was found" if is_scale else "a number that nothing computed")
    if getattr(_reading, "name", "") in ("__int__", "__index__") or (place is not None and is_made_whole(place, at_once=True)):
        return None
    one = struct.pack(format_, 1.0)
    if getattr(_reading, "name", "") in ("item", "__float__") and place is not None and is_made_whole(place):
        return Answer(one * (size // len(one)), "1.0", "rounded", "nothing is computed: a share that becomes a size is all of it")
    return Answer(one * (size // len(one)), "1.0", "ordinary", "an ordinary number: nothing is computed")


def _falling(format_: str) -> Answer:
    return Answer(struct.pack(format_, 1 / next(_losses)), "less each time", "rule", "the loss falls, so that L-BFGS goes on")


_losses = itertools.count(1)
"""How often L-BFGS asked for a number; one that stays would end its iterations."""


def _is_yes_or_no(size: int, dtype: torch.dtype | None) -> bool:
    return size == 1 and dtype in (None, torch.bool, torch.uint8)


def _yes_or_no(text: str, frames: list[FrameType]) -> Answer | None:
    """Return what a yes or no is in ordinary training; None where nobody can say it."""
    rule = _rule(text, frames)
    if rule is None and _MASK.search(text):
        return Answer(b"\0", "false", "padding", "a mask with padding, with which attention takes more memory than without a mask")
    return rule


def _rule(text: str, frames: list[FrameType]) -> Answer | None:
    """Return the answer to a check that an ordinary training passes; None where it is no check."""
    called = itertools.takewhile(is_own, (frame.f_code.co_filename for frame in frames))  # by the program, and below it
    of_lbfgs = next((line_of(frame) for frame in frames if frame.f_code.co_filename == _LBFGS), None)
    if of_lbfgs is not None:
        goes_on = "ys >" in of_lbfgs or "abs(gtd_new) <=" in of_lbfgs
        return Answer(bytes([goes_on]), str(goes_on).lower(), "rule", "the first step of a line search is taken, and L-BFGS goes on")
    if any(file.startswith(_DISTRIBUTIONS) for file in called):
        return Answer(b"\1", "true", "rule", "a distribution's check of its arguments passes")
    for pattern, value, reason in _RULES:
        if re.search(pattern, text):
            return Answer(bytes([value]), str(value).lower(), "rule", reason)
    return None


def _content(answer: str, size: int) -> bytes:
    """
    Return *size* bytes that say *answer*: true, false, an integer, or a number with a point.

    Integers fill elements of 8 bytes where *size* allows it, else of 4; a number with a point those of 4 (fp32), or 8 (fp64).
    """
    if answer in ("true", "false"):
        value: int | float = int(answer == "true")
    else:
        value = float(answer) if "." in answer else int(answer)
    if isinstance(value, float):
        dtype = getattr(_reading, "dtype", None)
        usual = "=f" if size % 4 == 0 and size != 8 else "=d"
        element = struct.pack(usual if dtype is None else _FORMATS.get(dtype, usual), value)
    else:
        width = next(width for width in (8, 4, 2, 1) if size % width == 0)
        element = (value % 2 ** (8 * width)).to_bytes(width, sys.byteorder)
    return (element * (size // len(element) + 1))[:size]


def _shown(content: bytes, dtype: torch.dtype | None = None) -> str:
    """Return *content*, of the type *dtype* where that is known, as a report names it."""
    format_ = _FORMATS.get(dtype) if dtype is not None else None
    if len(content) == 1:
        return "true" if content[0] else "false"
    if format_ is not None and len(content) == struct.calcsize(format_):
        return f"{struct.unpack(format_, content)[0]:.6g}"
    if len(content) in (2, 4, 8):
        return str(int.from_bytes(content, sys.byteorder, signed=True))
    return f"{len(content)} bytes"


# where the program is


def is_own(filename: str) -> bool:
    """Say whether a source file is PyTorch's or memplan's recorder, or none at all: not what a user looks for."""
    return filename.startswith((_TORCH + os.sep, _OWN + os.sep, "<"))


def _is_file(path: str, asked: str) -> bool:
    return path == asked or path.endswith(os.sep + asked.lstrip("./"))


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
    found = _of_program(frames_from(frame))
    return _named(found) if found else None


def _of_program(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost of *frames* that is the program's own, and no class of tensors through which every operation goes."""
    return next((frame for frame in frames if not is_own(frame.f_code.co_filename) and frame.f_code.co_name not in _PASSED_THROUGH), None)


def _named(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
