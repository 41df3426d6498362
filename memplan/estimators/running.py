"""
Running a program's step in a process of its own, as often as asked, on whatever device that process finds.

The process loads the program once and runs each request in a fork of itself (`programs/server.py`), so that the second takes a fraction of
the first and finds everything as the first did. The user's code is never loaded here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from memplan.errors import DoesNotFitError, NotRehearsedError, UsageError
from memplan.estimators.findings import sizes_hint
from memplan.estimators.target import Target
from memplan.standin.process import Process, TookTooLongError

DEFAULT_STEPS = 3
"""After three steps 69 of 73 programs had reached their peak of ten."""

MOST_STEPS = 10
"""Where a program that still grows after three steps is ended."""

DEFAULT_TIMEOUT_SECONDS = 600.0

REHEARSING = "MEMPLAN_REHEARSING"
"""Set in the process that runs a program for memplan: what runs there must not ask memplan for a run again."""

_ROOT = str(Path(__file__).parents[2])
# Importing PyTorch makes a million objects that stay: looking through them for garbage takes a tenth of the time. The server turns it on.
_SERVER = f"""
import gc, sys
gc.disable()
sys.path.append({_ROOT!r})
from memplan.programs.server import main
main(*map(int, sys.argv[1:]))
"""


class Closing:
    """Something to be closed, or used in a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what was started."""
        raise NotImplementedError


class Runner:
    """Runs one program. To be closed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._temporary = tempfile.TemporaryDirectory(prefix="memplan-rehearsal-")
        self.folder = Path(self._temporary.name)
        """For files of the runs; it goes when the runner is closed."""
        self._process: Process | None = None
        if target.pickled:
            path = self.folder / target.name
            path.write_bytes(target.pickled)
            self._target = target._replace(name=str(path))

    def close(self) -> None:
        """End the process and leave no file."""
        if self._process is not None:
            self._process.end()
        self._temporary.cleanup()

    @property
    def result(self) -> Path:
        """Return the file that a run writes when it has ended."""
        return self.folder / "result.json"

    def run(
        self,
        *,
        device: Callable[[], Mapping[str, str]],
        environment: Mapping[str, str],
        values: Mapping[str, Any] | None,
        steps: int | None,
        answers: Mapping[str, Any] | None,
        looks: bool,
        timeout_seconds: float,
        until: Path | None = None,
    ) -> int:
        """
        Run the steps; return how that ended: 0, an exit code, or minus the signal that ended it. What was seen is then in `answer`.

        *device* gives the environment of the process, for when it has to be started (one whose program begins CUDA when it is loaded serves
        once); *environment* are variables for this run alone. *until*: a file that the run waits for at its end, while it holds its memory.
        Raises UsageError, with everything ended, after *timeout_seconds*.
        """
        self.result.unlink(missing_ok=True)
        request = {
            "target": self._target.name,
            "function": self._target.function,
            "values": dict(values or {}),
            "steps": steps or DEFAULT_STEPS,
            "most_steps": steps or MOST_STEPS,
            "answers": dict(answers or {}),
            "looks": looks,
            "environment": dict(environment),
            "result": str(self.result),
            "until": str(until or ""),
        }
        process = self._running(device, environment)
        try:
            return process.ask(request, timeout_seconds=timeout_seconds)
        except TookTooLongError as error:
            raise UsageError(
                f"the program did not end within {timeout_seconds:g} seconds; {said(process)}",
                hint="give it longer with `--timeout`",
            ) from error

    def answer(self, status: int) -> dict[str, Any]:
        """
        Return what was seen of the run that ended with *status*.

        Raises UsageError for a program that failed for another reason than memory, or did not use the device; DoesNotFitError where memory
        ran out before anything could be seen.
        """
        assert self._process is not None
        if not self.result.exists():
            raise UsageError(f"the program {ended(status)}; {said(self._process)}")
        answer: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))
        failure = answer["failure"]
        if failure is not None and failure["kind"] == "mistake":
            raise UsageError(failure["message"], hint="the function and its values: `memplan rehearse FILE.py:build --set batch=8`")
        if failure is not None and failure["kind"] == "error":
            where = f" at {failure['place']}" if failure["place"] else ""
            problem = f"the program failed in its {failure['phase']}{where}: {failure['message']}; {said(self._process)}"
            raise UsageError(problem, hint=sizes_hint(answer.get("reads", ())))
        if answer["card"] is None and failure is not None:
            raise DoesNotFitError(f"memory ran out before the first tensor: {failure['message']}", hint="see who holds it: `memplan gpus`")
        if answer["card"] is None:
            raise UsageError("the program never used the device", hint="it is the first argument: put the model and the batch there")
        return answer

    def _running(self, device: Callable[[], Mapping[str, str]], environment: Mapping[str, str]) -> Process:
        """Return the process, started on *device* where it is not there or has ended."""
        if self._process is None or not self._process.is_running:
            if self._process is not None:
                self._process.end()
            paths = [str(Path.cwd()), *(path for path in sys.path if path and self._target.is_of_this_process)]
            whole = {**device(), **environment, REHEARSING: "1"}
            whole["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [whole.get("PYTHONPATH", "")])])
            self._process = Process(["-c", _SERVER], whole)
        return self._process


def first_line(error: UsageError) -> str:
    """Return what *error* says, without the last words of the program."""
    return error.message.splitlines()[0].removesuffix("; its last words:")


def not_run(error: UsageError) -> NotRehearsedError:
    """Return *error* as that of a workload whose step does not run."""
    return NotRehearsedError(f"the step of this workload does not run: {first_line(error)}", hint="use `--method analytic`")


def said(process: Process) -> str:
    """Return the last words of *process* as the end of a sentence."""
    words = process.last_words()
    return f"its last words:\n{words}" if words else "it said nothing"


def ended(status: int) -> str:
    """Return how a process with exit status *status* ended, in words."""
    if status >= 0:
        return f"ended with exit code {status}"
    name = signal.Signals(-status).name
    cause = " (did the host run out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{cause}"
