"""
Running a program's step in a process of its own, as often as asked, on whatever device that process finds.

The process loads the program once and runs each request in a fork of itself (`child/server.py`), so that the second takes a fraction of
the first and finds everything as the first did. The user's code is never loaded here.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from typing_extensions import Self

from memplan.errors import DoesNotFitError, NotRehearsedError, UsageError
from memplan.execution.findings import MISSING_WEIGHTS
from memplan.execution.guessed_values import sizes_hint
from memplan.execution.process import Process, TookTooLongError
from memplan.execution.program_process import NotEndedError
from memplan.execution.run_record import RunRecord, read_record
from memplan.execution.step_source import StepSource, TypedText
from memplan.standin.launch import caches_in

DEFAULT_STEPS = 3
"""After three steps 69 of 73 programs had reached their peak of ten."""

MOST_STEPS = 10
"""Where a program that still grows after three steps is ended."""

DEFAULT_TIMEOUT_SECONDS = 600.0

REHEARSING = "MEMPLAN_REHEARSING"
"""Set in the process that runs a program for memplan: what runs there must not ask memplan for a run again."""

SKIP_WEIGHTS = "MEMPLAN_SKIP_WEIGHTS"
"""A folder for empty files of weights, where those of pretrained models are not to be read (child/skipped_weights.py)."""

_ROOT = str(Path(__file__).parents[2])
# Importing PyTorch makes a million objects that stay: looking through them for garbage takes a tenth of the time. The server turns it on.
_SERVER = f"""
import gc, sys
gc.disable()
sys.path.append({_ROOT!r})
from memplan.child.server import main
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

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._temporary = tempfile.TemporaryDirectory(prefix="memplan-rehearsal-")
        self.folder = Path(self._temporary.name)
        """For files of the runs; it goes when the runner is closed."""
        self._process: Process | None = None
        if source.pickled:
            path = self.folder / source.name
            path.write_bytes(source.pickled)
            self._source = source._replace(name=str(path))

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
        checks_tensor_types: bool,
        timeout_seconds: float,
        values_file: Mapping[str, str] = MappingProxyType({"values_file": "", "values_variant": "", "times": "", "numbers": ""}),
        until: Path | None = None,
    ) -> int:
        """
        Run the steps; return how that ended: 0, an exit code, or minus the signal that ended it. `record` then returns what was seen.

        *device* gives the environment of the process, for when it has to be started (one whose program begins CUDA when it is loaded serves
        once); *environment* are variables for this run alone. *values_file*: a file of values to read or to write
        (`values_pass.py`). *until*: a file that the run waits for at its end, while it holds its memory.

        Raises NotEndedError, with everything ended, after *timeout_seconds*.
        """
        self.result.unlink(missing_ok=True)
        request = {
            "source": self._source.name,
            "function": self._source.function,
            "values": {name: value for name, value in (values or {}).items() if not isinstance(value, TypedText)},
            "texts": {name: value for name, value in (values or {}).items() if isinstance(value, TypedText)},
            "steps": steps or DEFAULT_STEPS,
            "most_steps": steps or MOST_STEPS,
            "answers": dict(answers or {}),
            "checks_tensor_types": checks_tensor_types,
            "environment": dict(environment),
            **values_file,
            "result": str(self.result),
            "until": str(until or ""),
        }
        process = self._running(device, environment)
        try:
            return process.ask(request, timeout_seconds=timeout_seconds)
        except TookTooLongError as error:
            raise NotEndedError(
                f"the program did not end within {timeout_seconds:g} seconds; {said(process)}",
                hint="give it longer: `timeout_seconds=3600`",
            ) from error

    def record(self, status: int) -> RunRecord:
        """
        Return what was seen of the run that ended with *status*.

        Raises UsageError where nothing was.
        """
        assert self._process is not None
        if not self.result.exists():
            raise UsageError(f"the program {ended(status)}; {said(self._process)}")
        return read_record(self.result)

    def check(self, record: RunRecord) -> None:
        """
        Raise an error for a run, the last one, of which there is nothing to tell.

        UsageError for a program that failed for another reason than memory, or did not use the device; DoesNotFitError where memory ran out
        before anything could be seen.
        """
        assert self._process is not None
        failure = record.failure
        if failure is not None and failure.kind == "mistake":
            raise UsageError(failure.message, hint="name the function, and give it values that it takes")
        if failure is not None and failure.kind == "own_model":
            raise UsageError(failure.message, hint="plan the program itself: `-- python train.py`")
        if failure is not None and failure.kind == "error":
            where = f" at {failure.place}" if failure.place else ""
            problem = f"the program failed in its {failure.phase}{where}: {failure.message}; {said(self._process)}"
            raise UsageError(problem, hint=MISSING_WEIGHTS if record.lacks_weights else sizes_hint(record.reads))
        if record.gpu_name is None and failure is not None:
            raise DoesNotFitError(f"memory ran out before the first tensor: {failure.message}", hint="see who holds it: `memplan gpus`")
        if record.gpu_name is None:
            raise UsageError("the program never used the device", hint="it is the first argument: put the model and the batch there")

    def _running(self, device: Callable[[], Mapping[str, str]], environment: Mapping[str, str]) -> Process:
        """Return the process, started on *device* where it is not there or has ended."""
        if self._process is None or not self._process.is_running:
            if self._process is not None:
                self._process.end()
            paths = [str(Path.cwd()), *(path for path in sys.path if path and self._source.is_of_this_process)]
            whole = {**caches_in(self.folder), **device(), **environment, REHEARSING: "1"}
            whole["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [whole.get("PYTHONPATH", "")])])
            self._process = Process(["-c", _SERVER], whole)
        return self._process


def first_line(error: UsageError) -> str:
    """Return what *error* says, without the last words of the program."""
    return error.message.splitlines()[0].removesuffix("; its last output:")


def not_run(error: UsageError, *, instead: str) -> NotRehearsedError:
    """Return *error* as that of a workload whose step does not run; *instead* is what can be done."""
    return NotRehearsedError(f"the step of this workload does not run: {first_line(error)}", hint=instead)


def said(process: Process) -> str:
    """Return the last words of *process* as the end of a sentence."""
    words = process.last_words()
    return f"its last output:\n{words}" if words else "it said nothing"


def ended(status: int) -> str:
    """Return how a process with exit status *status* ended, in words."""
    if status >= 0:
        return f"ended with exit code {status}"
    name = signal.Signals(-status).name
    cause = " (did the host run out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{cause}"


KILLED = ended(-signal.SIGKILL)
"""What is said of a program that the system has ended, mostly for want of the host's memory."""
