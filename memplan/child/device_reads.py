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
import struct
import sys
import threading
import time
from _thread import interrupt_main
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch

from memplan.child.copied_masks import is_all_set
from memplan.child.not_compiled import not_compiled, not_followed
from memplan.child.ordinary_answers import (
    FORMATS,
    MOST_COMPARED,
    Answer,
    Reading,
    branch_answer,
    check_that_passes,
    default_answer,
    is_computed_picture,
    ordinary_answer,
)
from memplan.child.program_frames import frames_from, is_file, named, program_frame
from memplan.child.recorded_values import RecordedValues
from memplan.child.source_lines import is_loop, line_at, line_of, statement_of
from memplan.traces.read_basis import DRAWN, USERS

DECIDES = 65_536
"""Copies above this many bytes are data that goes to the host, not values that decide something, as long as nobody knows them."""

_READER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)


class Said(NamedTuple):
    """What the user said for a line."""

    text: str
    reason: str
    """By which it is known again: the place as it was given."""


A_SEED = "the seed of a dropout, which decides nothing"
"""What attention returns beside its result, and saves for the backward: to the host, where what is saved goes there."""

MOST_NOTED = 20_000
"""Reads of which it is noted how many allocations came before."""

_DECIDES_NOTHING = ("rule", "ordinary")

MOST_SCOUTED = 256
"""How often one line gets the same yes or no in one step of a run that only shows what is asked: a loop may wait for the other."""

MOST_WAITED = 10_000
"""The same in a run with values, where nobody knows the answer: a loop that asks for so long is endless."""

_WAITED_FOR = "it was asked for again and again, and a loop may wait for it"

_LARGEST = 2**31 - 1
"""A number with which a loop ends that waits for a large one."""

_LARGEST_HALF = 2**15
"""The same of floats, which those of 16 bits have too."""


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
        self._sure: Callable[[int], bytes] | None = None
        self._is_known = False
        self._unknown: Counter[str] = Counter()
        self._seen: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._given_for: dict[str, str] = {}
        """The line that each of the user's answers is for, which the read itself need not be on: that of a backward is elsewhere."""
        self._callback = _READER(_called_by_c(not_compiled(self._read)))

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

    def keep_last_copy(self) -> None:
        """Have the device keep what is copied to it last, up to data of 128 MiB, for `copied_back`."""
        if _device() is not None:
            ctypes.CDLL(None).memplan_keep_last_copy()

    @property
    def _is_scout(self) -> bool:
        """Say whether this run has no values and finds none: it shows what is read."""
        return self.on_answer is None and self.recorded is None

    def begin_step(self) -> None:
        """Count anew how often a line asks for what nobody knows."""
        self._unknown.clear()

    def seen(self) -> list[dict[str, Any]]:
        """Return the reads by place, the most frequent first."""
        return sorted(self._seen.values(), key=lambda read: -read["count"])

    def copied_back(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what was copied to *tensor* just now; None where the device does not know it any more."""
        if tensor.nbytes > DECIDES and tensor.is_contiguous() and _device() is not None:
            last = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            place, to = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(last.data_ptr())
            return last if ctypes.CDLL(None).memplan_last_copy(place, to, ctypes.c_size_t(tensor.nbytes)) else None
        self._is_known = True
        try:
            content = tensor.cpu()
            return content if self._is_known else None
        finally:
            self._is_known = False

    @contextmanager
    def answering(self, answer: Callable[[int], bytes]) -> Iterator[None]:
        """Answer what is read with what *answer* gives for so many bytes: that is sure, and nobody need be told."""
        before, self._sure = self._sure, answer
        try:
            yield
        finally:
            self._sure = before

    def _read(self, to: int, size: int) -> None:
        if self._is_known:  # the device would not ask for what it knows
            self._is_known = False
            return
        if self._sure is not None:
            ctypes.memmove(to, self._sure(size), size)
            return
        if size > DECIDES and self.recorded is None and self.on_answer is None and not _reads_integers():
            return
        frames = frames_from(sys._getframe())
        place = program_frame(frames)
        where = named(place) if place else "PyTorch"  # by one name, however it comes there
        text = line_of(place) if place else ""
        known = self._from_data(where, size)  # asked in any case: its turns are counted
        dtype = known if isinstance(known, torch.dtype) else getattr(_reading, "dtype", None)
        reading = Reading(frames, place, size, dtype, getattr(_reading, "name", ""))
        answer = self.users(frames, size) or (known if isinstance(known, Answer) else self._of_mask(reading))
        if answer is None and size > DECIDES and not _reads_integers():
            return
        if answer is not None and answer.basis == "assumed" and reading.has_several_floats:
            answer = answer._replace(basis="ordinary")  # an action is one of those that there are
        elif answer is not None and answer.basis == "assumed":
            ordinary = ordinary_answer(reading)  # a check that passes, or a number that is logged, is no choice of the model
            answer = ordinary if ordinary is not None and ordinary.basis in ("rule", "ordinary") else answer
        elif answer is not None and answer.basis in ("data", "copied", "drawn") and reading.is_yes_or_no:
            check = check_that_passes(reading)  # decides nothing, known or not
            answer = check if check is not None and check.content == answer.content else answer
        if answer is not None and answer.basis == "drawn" and reading.is_only_told:
            answer = answer._replace(basis="ordinary")
        answer = answer or default_answer(reading)
        if answer.basis == "zero" and reading.is_yes_or_no:
            branch = branch_answer(reading)
            if branch is not None and (branch.basis == "ordinary" or not self._is_scout):  # the values may be known in another run
                answer = branch
            answer = self._ending(where, answer)
        elif answer.basis in ("zero", "compared", "ordinary") and not reading.is_yes_or_no:
            if answer.basis == "zero" and not self._is_scout and is_computed_picture(reading):
                answer = answer._replace(basis="ordinary", reason="a picture that the model computes")
            answer = self._ending_number(reading, where, answer)
        ctypes.memmove(to, answer.content, size)
        if not self.is_counting:
            return
        read = self._seen.setdefault(
            (where, answer.text, answer.basis),  # a guess is not one of the harmless numbers that the line reads too
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
        if answer.basis == "answer":
            read["given_for"] = self._given_for.get(answer.reason.removeprefix(USERS))
        if answer.basis not in _DECIDES_NOTHING and self._num_noted < MOST_NOTED and not (reading.is_only_told or _is_picture(reading)):
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
        if assumption is not None and assumption.startswith(DRAWN):
            return Answer(content, shown, "drawn", assumption)
        if assumption is not None:
            return Answer(content, shown, "ordinary" if assumption == A_SEED else "assumed", assumption)
        return Answer(content, shown, "data", "computed on the host from the program's data")

    def _of_mask(self, reading: Reading) -> Answer | None:
        """Return what is read of a mask that was copied from the host, where it is that."""
        if self.on_answer is not None or reading.place is None or not reading.is_yes_or_no:
            return None
        is_set = is_all_set(reading.place)
        if is_set is None:
            return None
        return Answer(bytes([is_set]), str(is_set).lower(), "copied", "known of the mask as it was copied to the GPU")

    def _ending(self, where: str, answer: Answer) -> Answer:
        """Answer a line that asks for a yes or no again and again with the other one at last: texts are generated until all have ended."""
        self._unknown[where] += 1
        if self._unknown[where] % (MOST_SCOUTED if self._is_scout else MOST_WAITED):
            return answer
        other = answer.text != "true"
        return Answer(bytes([other]), str(other).lower(), answer.basis, _WAITED_FOR)

    def _ending_number(self, reading: Reading, where: str, answer: Answer) -> Answer:
        """
        Answer the condition of a `while` that asks for a number again and again with one that ends it: none, or as many as there can be.

        A length that is kept on the device and grows until it is enough would never be seen to grow.
        """
        if reading.place is None or reading.size not in (1, 2, 4, 8):
            return answer
        self._unknown[where] += 1
        rounds, rest = divmod(self._unknown[where], MOST_SCOUTED if self._is_scout else MOST_WAITED)
        if rest or not is_loop(reading.place):
            return answer
        is_low = answer.text in ("0", "0.0")
        number = _LARGEST if is_low == (rounds % 2 == 1) else 0  # the other end first, and then by turns
        format_ = FORMATS.get(reading.dtype)
        if format_ is not None:
            content = struct.pack(format_, float(min(number, _LARGEST_HALF)))
        else:
            content = min(number, 2 ** (8 * reading.size - 1) - 1).to_bytes(reading.size, sys.byteorder)
        return Answer(content, str(number), answer.basis, _WAITED_FOR)

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
                if not is_file(frame.f_code.co_filename, file) or int(line) not in statement_of(frame):
                    continue
                now = line_at(frame.f_code.co_filename, int(line))  # the frame may be at another line of the statement
                if text in (None, now):
                    self._given_for[place] = now
                    return Said(answer, USERS + place)
        return None


def _is_picture(reading: Reading) -> bool:
    """Say whether many floats are copied to the host, as a picture or a sound is to be written: no size hangs on them."""
    return reading.size > MOST_COMPARED and reading.dtype is not None and reading.dtype.is_floating_point


def _called_by_c(read: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """
    Return *read* for C to call, out of which no exception comes: a Ctrl-C in the midst of it comes again, in the program.

    It may come before the first line of what C calls, where nothing can catch it: Python hands that one to `sys.unraisablehook`.
    """

    def call(to: int, size: int) -> None:
        try:
            read(to, size)
        except KeyboardInterrupt:
            interrupt_again()

    def interrupt_again() -> None:
        threading.Thread(target=interrupt_soon, daemon=True).start()

    def interrupt_soon() -> None:
        time.sleep(0.005)
        interrupt_main()

    def not_raised(unraisable: Any) -> None:
        traceback = unraisable.exc_traceback
        if unraisable.exc_type is KeyboardInterrupt and traceback is not None and traceback.tb_frame.f_code is call.__code__:
            interrupt_again()
        else:
            hook_before(unraisable)

    hook_before, sys.unraisablehook = sys.unraisablehook, not_raised
    return not_followed(call)


def is_simulated() -> bool:
    """Say whether the device of this process is the simulated one."""
    return _device() is not None


def counted_bytes(name: str) -> int:
    """Return the bytes that the simulated GPU has counted under *name*, one of its functions; 0 on a real device."""
    if not is_simulated():
        return 0
    count = getattr(ctypes.CDLL(None), name)
    count.restype = ctypes.c_size_t
    return int(count())


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

_READING = ("item", "tolist", "cpu", "to", "copy_", "__bool__", "__float__", "__int__", "__index__")


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

    noting: Any = not_followed(call)
    noting.is_noted = True
    return noting


def _content(answer: str, size: int) -> bytes:
    """
    Return *size* bytes that say *answer*: true, false, an integer, or a number with a point.

    Integers fill elements of 8 bytes where *size* allows it, else of 4; a number with a point, or one for a tensor of floats, those of 4
    (fp32), or 8 (fp64).
    """
    dtype = getattr(_reading, "dtype", None)
    is_float = "." in answer or (dtype is not None and dtype.is_floating_point)
    if answer not in ("true", "false") and is_float:
        usual = "=f" if size % 4 == 0 and size != 8 else "=d"
        element = struct.pack(usual if dtype is None else FORMATS.get(dtype, usual), float(answer))
    else:
        value = int(answer == "true") if answer in ("true", "false") else int(answer)
        width = next(width for width in (8, 4, 2, 1) if size % width == 0)
        element = (value % 2 ** (8 * width)).to_bytes(width, sys.byteorder)
    return (element * (size // len(element) + 1))[:size]


def _shown(content: bytes, dtype: torch.dtype | None = None) -> str:
    """Return *content*, of the type *dtype* where that is known, as a report names it."""
    format_ = FORMATS.get(dtype) if dtype is not None else None
    if len(content) == 1:
        return "true" if content[0] else "false"
    if format_ is not None and len(content) == struct.calcsize(format_):
        return f"{struct.unpack(format_, content)[0]:.6g}"
    if len(content) in (2, 4, 8):
        return str(int.from_bytes(content, sys.byteorder, signed=True))
    return f"{len(content)} bytes"
