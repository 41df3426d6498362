"""What is told of the exception that ended a program, and whether the program itself chose to end."""

from __future__ import annotations

import dis
import os
import re
import sysconfig
import traceback
from typing import Any

from memplan.child.program_frames import is_own
from memplan.errors import is_out_of_memory


class MistakeError(Exception):
    """What was asked for does not go with the program: the user's to put right, and nothing of the program's own."""


class OwnModelError(MistakeError):
    """A training that memplan's own model of a configuration cannot be; the user's program can, perhaps."""


NO_ENGINE = "was unable to find an engine to execute this computation"
"""What PyTorch says where none of cuDNN's engines runs, also for want of the memory that each asks for (Conv_v8.cpp)."""


_READS_ONE_SAMPLE = re.compile(r'[/\\]_utils[/\\]fetch\.py", line \d+, in [\w<>]+\n\s+data(?: = \[|\.append\()')
"""Of a stack: where a DataLoader asks its dataset for one sample after another (torch/utils/data/_utils/fetch.py)."""

_STANDARD, _PACKAGES = (f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib"))
"""Python's own library, and the packages that are installed in a folder of it."""


def failure_of(error: BaseException, *, has_run_out: bool = False) -> dict[str, Any]:
    """Return what is told of *error*: the fields of the parent's ``Failure``, but for the phase. *has_run_out*: the GPU was full before."""
    is_for_want = is_out_of_memory(error) or (has_run_out and NO_ENGINE in str(error))
    mistake = "own_model" if isinstance(error, OwnModelError) else "mistake" if isinstance(error, MistakeError) else None
    kind = mistake or ("out_of_memory" if is_for_want else "error")
    said = str(error).split("\nException raised from ")[0]  # and from where in PyTorch's own libraries
    message = f"{type(error).__name__}: {said or _line_of(error)}" if kind == "error" else said
    return {
        "kind": kind,
        "message": message,
        "place": place_of(error),
        "is_chosen": is_chosen(error),
        "is_of_one_sample": is_of_one_sample(error),
    }


def answered_by(error: BaseException) -> BaseException:
    """Return the out-of-memory error in answer to which *error* was raised, as of a program that logs it and leaves; or else *error*."""
    earlier: BaseException | None = error
    told: set[int] = set()
    while earlier is not None and id(earlier) not in told:
        if is_out_of_memory(earlier):
            return earlier
        told.add(id(earlier))
        earlier = earlier.__cause__ or earlier.__context__
    return error


def is_chosen(error: BaseException) -> bool:
    """Say whether the program ends by a `raise` or an `assert` outside of PyTorch, which answers to no other error."""
    trace = error.__traceback__
    if trace is None or error.__cause__ is not None or error.__context__ is not None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return not is_own(code.co_filename) and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def is_of_one_sample(error: BaseException) -> bool:
    """
    Say whether a dataset raised *error* when it was asked for one sample, in this process or in a worker, which sends its stack as text.

    Not for want of the host's memory, or of something else of which a larger batch takes more.
    """
    stack = "".join(traceback.format_tb(error.__traceback__)) + str(error)
    lacks = isinstance(error, (MemoryError, OSError)) or "allocate memory" in str(error)  # PyTorch's own on the host is a RuntimeError
    return not lacks and _READS_ONE_SAMPLE.search(stack) is not None


def place_of(error: BaseException) -> str | None:
    """
    Return the last line of the program's own files that *error* came through; None where it came through none (a wrong argument).

    Python's library raises for what it is given (`random.sample`): told is who called it.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_own(frame.filename)]
    place = next((frame for frame in reversed(found) if not _is_standard(frame.filename)), found[-1] if found else None)
    return f"{place.filename}:{place.lineno}" if place else None


def _line_of(error: BaseException) -> str:
    """Return the line that raised *error*, as what an `assert` without words says."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].line or "" if frames else ""


def _is_standard(filename: str) -> bool:
    return filename.startswith(_STANDARD) and not filename.startswith(_PACKAGES)
