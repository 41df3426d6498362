"""What a rehearsal runs: a function of a file, of a module, or one that only the caller's process has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memplan.errors import MissingError, UsageError
from memplan.workload.step_function import BATCH_NAMES


class TypedText(str):
    """
    A value of a function's parameter as somebody typed it: what it means, the parameter's default or annotation decides.

    "none" is a text where the default is one, and None where the default is None.
    """

    __slots__ = ()


class StepSource(NamedTuple):
    """Where the function is found whose result runs one training step."""

    name: str
    """A file (.py), a module, or the pickle of a function."""
    function: str
    pickled: bytes = b""
    """The content of that pickle."""
    is_of_this_process: bool = False
    """It was found in this process, whose module paths it needs."""


def step_source_from(text: str) -> StepSource:
    """Return the target that *text*, "FILE.py:function" or "module:function", names. Raises UsageError when it makes no sense."""
    name, _, function = text.rpartition(":")
    if not name or not function:
        raise UsageError(
            f"{text!r} does not say FILE.py:build", hint="name the file and the function: `memplan rehearse train_step.py:build`"
        )
    if name.endswith(".py") and not Path(name).is_file():
        raise UsageError(f"{name} does not exist", hint="check the path of the file")
    return StepSource(name, function)


def step_source_of(build: Callable[..., Any]) -> StepSource:
    """
    Return the target that is the function *build* of this process.

    A function at the top of a file or module is found by its name; any other (one of a notebook, a closure, a lambda) is pickled by value.
    Raises MissingError when that needs cloudpickle and it is not installed, UsageError for what nobody can call.
    """
    if not callable(build):
        raise UsageError(f"{build!r} is not a function", hint='give the function itself, or "FILE.py:function"')
    module, name = getattr(build, "__module__", None), getattr(build, "__qualname__", "")
    if module and name.isidentifier():
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if module == "__main__" and main and Path(main).is_file() and main.endswith(".py"):
            return StepSource(str(Path(main).resolve()), name, is_of_this_process=True)
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is build:
            return StepSource(module, name, is_of_this_process=True)
    try:
        import cloudpickle  # noqa: PLC0415  (only functions without a name of their own need it)
    except ImportError as error:
        raise MissingError(
            f"{name or build!r} is defined where no other process can import it (in a function, a notebook, `python -c` or standard input)",
            hint="put it at the top of a file, or `pip install cloudpickle`",
        ) from error
    return StepSource("build.pickle", name or "build", cloudpickle.dumps(build), is_of_this_process=True)


def batch_name(values: Mapping[str, Any]) -> str | None:
    """Return which of *values* is the batch, by its name; None where none is."""
    return next((name for name in BATCH_NAMES if count_of(values.get(name)) is not None), None)


def count_of(value: object) -> int | None:
    """Return *value* as a number of samples, typed or given; None for any other."""
    if isinstance(value, TypedText):
        return int(value) if value.isascii() and value.isdigit() else None
    return value if type(value) is int else None  # True is no number of samples
