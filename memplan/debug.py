"""
`memplan.debug.no_compile()`: torch.compile really off, for debugging: breakpoints hold, errors name your lines, and prints print each time.

    with memplan.debug.no_compile():
        train_step(batch)

Usual recipes look as if they did that. `torch._dynamo.config.disable` and TORCHDYNAMO_DISABLE are read when something is compiled: what
was compiled before goes on running as compiled. `suppress_errors` compiles what it can. `torch.compiler.disable` leaves the function alone
that it is given, not what that function has compiled itself.

An unmodified program runs without torch.compile by `python -m memplan.debug train.py …`, or `-m package.module …`. In a program that
imports this module, MEMPLAN_NO_COMPILE=1 does the same from there on.
"""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from memplan.child.not_compiled import not_followed
from memplan.errors import UsageError

__all__ = ["no_compile"]

P = ParamSpec("P")
Result = TypeVar("Result")

VARIABLE = "MEMPLAN_NO_COMPILE"


class no_compile:  # noqa: N801  (used as torch.no_grad is)
    """
    Turn torch.compile off, as a context manager or a decorator: ``with no_compile():`` or ``@no_compile()``.

    Inside, every function and module runs as it was written: those that were compiled before, those that are compiled inside, and what
    they call; also where it is used in a function that is compiled itself (not with ``fullgraph=True``, which allows no break). Afterwards
    everything is as before: what was compiled is not compiled again. It holds for all threads of the process, and may be nested. The
    backward of a forward that ran compiled stays compiled, and so does what was exported or scripted.

    Raises UsageError as a decorator of a generator or coroutine function, whose body runs later.

    >>> import torch
    >>> from memplan.debug import no_compile
    >>> double = torch.compile(lambda x: 2 * x, backend="eager")
    >>> with no_compile():
    ...     double(torch.ones(2))
    tensor([2., 2.])

    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    @not_followed
    def __enter__(self) -> None:
        """Turn it off."""
        # Of this thread: a function that is compiled and has come here is followed no further.
        before = torch._C._dynamo.eval_frame.set_eval_frame(None)
        restore = _ignore_compiled()

        def undo() -> None:
            restore()
            torch._C._dynamo.eval_frame.set_eval_frame(before)

        self._undo.append(undo)

    @not_followed
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let it be as it was."""
        self._undo.pop()()

    def __call__(self, function: Callable[P, Result]) -> Callable[P, Result]:
        """Return *function* as one that runs without torch.compile."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{function.__qualname__} is a generator or coroutine function, whose body runs after it has returned",
                hint="use `with no_compile():` inside of it",
            )

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            with self:
                return function(*args, **kwargs)

        called: Callable[P, Result] = not_followed(call)
        return called


def _ignore_compiled() -> Callable[[], None]:
    """Have compiled functions and modules run what they were made of; return what puts that back."""
    if hasattr(torch.compiler, "set_stance"):  # from 2.6 on
        stance = torch.compiler.set_stance("force_eager")
        return lambda: stance.__exit__(None, None, None)
    import torch._dynamo.eval_frame as dynamo  # noqa: PLC0415  (a second, which who compiles nothing does without)

    # Every compiled function asks for its callback by this name of that module, when it is called (2.1 and 2.3, 2.5).
    name = "_maybe_set_eval_frame" if hasattr(dynamo, "_maybe_set_eval_frame") else "set_eval_frame"
    ask = getattr(dynamo, name)
    setattr(dynamo, name, not_followed(lambda _callback: torch._C._dynamo.eval_frame.set_eval_frame(None)))
    return lambda: setattr(dynamo, name, ask)


def _run_program(words: list[str]) -> None:
    """Run the program that *words* name, as `python WORDS` would."""
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words:
        sys.exit("usage: python -m memplan.debug (FILE.py | -m MODULE) [ARGUMENT …]")
    if not is_module and not Path(words[0]).is_file():
        sys.exit(f"{words[0]} does not exist")
    sys.argv = words
    with no_compile():
        if is_module:
            sys.path[0] = str(Path.cwd())
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _run_program(sys.argv[1:])
elif os.environ.get(VARIABLE, "0") not in ("", "0"):
    print(f"memplan: torch.compile is off ({VARIABLE}={os.environ[VARIABLE]})", file=sys.stderr)
    no_compile().__enter__()
