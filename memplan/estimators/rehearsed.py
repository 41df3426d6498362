"""
The rehearsal: the real PyTorch and the user's real step, on a card that is not there.

A process of its own runs the steps with the stand-in device in front of CUDA (`standin/`); this one builds the device where it is missing,
starts the process, and reads what it wrote. The user's code is never loaded here. The process loads the program once and runs each
rehearsal in a fork of itself (`programs/server.py`), so that the second takes a fraction of the first.
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

from memplan.errors import MissingError, UsageError
from memplan.estimators.analytic import CONTEXT_BYTES
from memplan.estimators.findings import sizes_hint
from memplan.estimators.seen import Seen, rehearsal_of
from memplan.estimators.target import Target, target_from, target_of
from memplan.hardware.catalog import find_card
from memplan.hardware.spec import GpuSpec
from memplan.memory.rehearsal import Rehearsal
from memplan.standin.build import build, find_torch
from memplan.standin.launch import card_description, environment_for
from memplan.standin.process import Process, TookTooLongError

DEFAULT_STEPS = 3
"""After three steps 69 of 73 programs had reached their peak of ten."""

MOST_STEPS = 10
"""Where a program that still grows after three steps is ended."""

DEFAULT_TIMEOUT_SECONDS = 600.0

REHEARSING = "MEMPLAN_REHEARSING"
"""Set in the process of a rehearsal: what runs there must not rehearse again."""

_ROOT = str(Path(__file__).parents[2])
# Importing PyTorch makes a million objects that stay: looking through them for garbage takes a tenth of the time. The server turns it on.
_SERVER = f"""
import gc, sys
gc.disable()
sys.path.append({_ROOT!r})
from memplan.programs.server import main
main(*map(int, sys.argv[1:]))
"""


class Rehearser:
    """Rehearses one program, as often as asked. To be closed, or used in a `with`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._folder = tempfile.TemporaryDirectory(prefix="memplan-rehearsal-")
        self._process: Process | None = None
        if target.pickled:
            path = Path(self._folder.name) / target.name
            path.write_bytes(target.pickled)
            self._target = target._replace(name=str(path))

    def __enter__(self) -> Rehearser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process and leave no file."""
        if self._process is not None:
            self._process.end()
        self._folder.cleanup()

    def rehearse(
        self,
        *,
        gpu: GpuSpec,
        values: Mapping[str, Any] | None = None,
        steps: int | None = None,
        answers: Mapping[str, Any] | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        context_bytes: int = CONTEXT_BYTES,
        library_workspaces: bool = True,
        looks: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Rehearsal:
        """
        Return what the program does to the memory of *gpu*.

        *steps*: how many; None runs three, and ten where the third still takes more than the second. *answers*: what reads of device values
        get, by FILE.py:LINE: an answer, and the line that it was given for (None: any). *library_workspaces*: count an allowance for what
        cuDNN and cuFFT decide at run time; the range's low end is without it. *looks*: run one step more, which counts for nothing, to find
        large tensors of wide types. *environment*: variables for this rehearsal, as PYTORCH_ALLOC_CONF.

        Raises UsageError when the program fails for another reason than memory, MissingError when this machine cannot rehearse it.
        """
        request = {
            "target": self._target.name,
            "function": self._target.function,
            "values": dict(values or {}),
            "steps": steps or DEFAULT_STEPS,
            "most_steps": steps or MOST_STEPS,
            "answers": dict(answers or {}),
            "looks": looks,
            "environment": dict(environment or {}),
        }
        seen = self._ask(request, gpu, context_bytes, timeout_seconds, with_workspaces=library_workspaces)
        without = None
        if library_workspaces and any(line.startswith("workspace ") for line in seen.workspaces):
            without = self._ask(request | {"looks": False}, gpu, context_bytes, timeout_seconds, with_workspaces=False)
        return rehearsal_of(seen, without=without, context_bytes=context_bytes)

    def _ask(self, request: dict[str, Any], gpu: GpuSpec, context_bytes: int, timeout_seconds: float, *, with_workspaces: bool) -> Seen:
        folder = Path(self._folder.name)
        result, log = folder / "result.json", folder / "log"
        for path in (result, log):
            path.unlink(missing_ok=True)
        environment = request["environment"] | {
            "MEMPLAN_CARD": card_description(gpu, context_bytes),
            "MEMPLAN_LOG": str(log),
            "MEMPLAN_WORKSPACES": str(int(with_workspaces)),
        }
        process = self._running(gpu, context_bytes, environment)
        try:
            status = process.ask(request | {"environment": environment, "result": str(result)}, timeout_seconds=timeout_seconds)
        except TookTooLongError as error:
            raise UsageError(
                f"the program did not end within {timeout_seconds:g} seconds; {said(process)}",
                hint="give it longer with `--timeout`",
            ) from error
        missing = not_served_in(log)
        if missing:
            raise MissingError(f"the stand-in device does not serve {', '.join(missing)}", hint="without it no number would be true")
        if not result.exists():
            raise UsageError(f"the program {ended(status)}; {said(process)}")
        answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        failure = answer["failure"]
        if failure is not None and failure["kind"] == "mistake":
            raise UsageError(failure["message"], hint="the function and its values: `memplan rehearse FILE.py:build --set batch=8`")
        if failure is not None and failure["kind"] == "error":
            where = f" at {failure['place']}" if failure["place"] else ""
            problem = f"the program failed in its {failure['phase']}{where}: {failure['message']}; {said(process)}"
            raise UsageError(problem, hint=sizes_hint(answer.get("reads", ())))
        if answer["card"] is None:
            raise UsageError("the program never used the device", hint="it is the first argument: put the model and the batch there")
        return Seen(answer, workspaces_in(log))

    def _running(self, gpu: GpuSpec, context_bytes: int, environment: Mapping[str, str]) -> Process:
        """Return the process, started anew where it has ended (one whose program begins CUDA when it is loaded serves once)."""
        if self._process is None or not self._process.is_running:
            if self._process is not None:
                self._process.end()
            paths = [str(Path.cwd()), *(path for path in sys.path if path and self._target.is_of_this_process)]
            whole = environment_for(gpu, build(find_torch()), context_bytes=context_bytes) | dict(environment) | {REHEARSING: "1"}
            whole["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [whole.get("PYTHONPATH", "")])])
            self._process = Process(["-c", _SERVER], whole)
        return self._process


def not_served_in(log: Path) -> list[str]:
    """Return the calls that the device's *log* says it does not serve."""
    return sorted({line.removeprefix("not served ") for line in _lines(log) if line.startswith("not served ")})


def workspaces_in(log: Path) -> tuple[str, ...]:
    """Return what the device's *log* says of workspaces that a library would have decided on."""
    return tuple(line for line in _lines(log) if line.startswith(("workspace ", "unknown ")))


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


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


def rehearse(
    program: str | Callable[..., Callable[[], object]],
    *,
    gpu: GpuSpec | str,
    values: Mapping[str, Any] | None = None,
    steps: int | None = None,
    **options: Any,
) -> Rehearsal:
    """
    Return what *program* does to the memory of *gpu*: a MemoryEstimate, exact, with its trace.

    *program* is "FILE.py:function", "module:function", or the function itself; it is called as ``program("cuda", **values)`` in a process
    of its own, and returns a function that runs one whole training step. *gpu* is a GpuSpec or a name of the catalogue ("a100-80").
    *options* are those of `Rehearser.rehearse`, which also says what is raised.
    """
    if REHEARSING in os.environ:
        raise UsageError(
            "a program that is being rehearsed asked for a rehearsal",
            hint='call memplan.rehearse under `if __name__ == "__main__":`, so that loading the file does not call it',
        )
    card = find_card(gpu) if isinstance(gpu, str) else gpu
    with Rehearser(target_from(program) if isinstance(program, str) else target_of(program)) as rehearser:
        return rehearser.rehearse(gpu=card, values=values, steps=steps, **options)
