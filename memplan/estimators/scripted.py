"""Rehearsing a whole script, unmodified: Python runs it as ever, on the stand-in device, with a recorder that waits for PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from memplan.errors import MissingError, UsageError
from memplan.estimators.context import CONTEXT_BYTES, around
from memplan.estimators.rehearsed import not_served_in, workspaces_in
from memplan.estimators.running import REHEARSING
from memplan.estimators.seen import Seen, rehearsal_of
from memplan.hardware.spec import GpuSpec
from memplan.memory.rehearsal import Rehearsal
from memplan.standin.build import build, find_torch
from memplan.standin.launch import command_for, environment_for

HOOK = Path(__file__).parents[1] / "programs" / "hook"
_GRACE_SECONDS = 5.0


def rehearse_script(
    arguments: Sequence[str],
    *,
    gpu: GpuSpec,
    steps: int | None = None,
    answers: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
    output_to_stderr: bool = False,
    context_bytes: int = CONTEXT_BYTES,
) -> tuple[Rehearsal | None, int]:
    """
    Run ``python *arguments*`` on *gpu*; return what its memory did and its exit code, minus the signal's number where one ended it.

    *arguments* begin with a script or ``-m``. The program's output goes where this process's does (*output_to_stderr*: all of it to
    standard error). *steps* ends it after that many optimizer steps. None is returned for a program that did not use CUDA, or ended too
    early to say what it did. Raises UsageError after *timeout_seconds*, MissingError when this machine cannot rehearse it.
    """
    libraries = build(find_torch())
    with tempfile.TemporaryDirectory(prefix="memplan-rehearsal-") as folder:
        log = Path(folder) / "log"
        environment = environment_for(gpu, libraries, context_bytes=context_bytes) | {
            "MEMPLAN_LOG": str(log),
            "MEMPLAN_WORKSPACES": "1",
            "MEMPLAN_RESULTS": folder,
            "MEMPLAN_STEPS": str(steps or 0),
            "MEMPLAN_ANSWERS": json.dumps(dict(answers or {})),
            REHEARSING: "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOK), environment.get("PYTHONPATH", "")]))
        process = subprocess.Popen(command_for(arguments), env=environment, stdout=sys.stderr.fileno() if output_to_stderr else None)
        with _ended(process, folder):
            try:
                _wait(process, timeout_seconds)
            except subprocess.TimeoutExpired as error:
                took = "after Ctrl-C" if timeout_seconds is None else f"within {timeout_seconds:g} seconds"
                raise UsageError(f"the program did not end {took}", hint="end it after some steps with `--steps 3`") from error
        missing = not_served_in(log)
        if missing:
            raise MissingError(f"the stand-in device does not serve {', '.join(missing)}", hint="without it no number would be true")
        answer = _result(Path(folder), process.pid)
        if answer is None:
            return None, process.returncode
        seen = Seen(answer, workspaces_in(log))
        return rehearsal_of(seen, without=None, context=around(context_bytes), exit_code=process.returncode), process.returncode


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float | None) -> None:
    """Wait for *process*. Ctrl-C reaches it too: it is left the time to end as it likes, and what it did until then is reported."""
    try:
        process.wait(timeout_seconds)
    except KeyboardInterrupt:
        process.wait(_GRACE_SECONDS)


@contextmanager
def _ended(process: subprocess.Popen[bytes], folder: str) -> Iterator[None]:
    """Leave no process behind: asked to end first, so that it can end its own, and then those that it left."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _end_all_of(folder)


def _end_all_of(folder: str) -> None:
    """End every process that inherited the environment of the rehearsal whose results go to *folder*, whoever started it."""
    mark = f"MEMPLAN_RESULTS={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is another's, or has ended
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


def _result(folder: Path, process_id: int) -> dict[str, Any] | None:
    """Return what the program's own process wrote; where it never used CUDA, what the one of its processes wrote that took most."""
    own = folder / f"{process_id}.json"
    results = [json.loads(path.read_text(encoding="utf-8")) for path in ([own] if own.exists() else sorted(folder.glob("*.json")))]
    return max(results, key=lambda result: int(result["peak_reserved_bytes"]), default=None)
