"""Rehearsing a whole script, unmodified: Python runs it as ever, on the simulated GPU, with a recorder that waits for PyTorch."""

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

from memplan.errors import NothingSeenError, UsageError
from memplan.execution.device_log import read_device_log
from memplan.execution.held_back import Writes
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.run_record import RunRecord, read_record
from memplan.execution.runner import REHEARSING, ended
from memplan.execution.summary import Run, rehearsal_of
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import find_torch
from memplan.memory.cuda_context import CONTEXT_BYTES, assumed_range
from memplan.standin.build import build
from memplan.standin.compiled_libraries import path_for_variables
from memplan.standin.launch import caches_in, command_for, environment_for

HOOK = Path(__file__).parents[1] / "child" / "hook"
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
    allow_writes: bool = False,
) -> Rehearsal:
    """
    Run ``python *arguments*`` on *gpu*; return what its memory did. Its exit code is minus the signal's number where one ended it.

    *arguments* begin with a script or ``-m``. The program's output goes where this process's does (*output_to_stderr*: all of it to
    standard error). *steps* ends it after that many optimizer steps. What it writes is held back, unless *allow_writes*. Raises
    NothingSeenError for a program that did not use the GPU, or ended before it could report; UsageError after *timeout_seconds*,
    MissingError when this machine cannot rehearse it.
    """
    libraries = build(find_torch())
    with tempfile.TemporaryDirectory(prefix="memplan-rehearsal-") as folder:
        log = Path(folder) / "log"
        writes = Writes(Path(folder), script=None if arguments[0] == "-m" else Path(arguments[0]), are_allowed=allow_writes)
        environment = environment_for(gpu, libraries, context_bytes=context_bytes) | {
            **caches_in(Path(folder)),
            "MEMPLAN_LOG": str(log),
            "MEMPLAN_WORKSPACES": "1",
            "MEMPLAN_RESULTS": folder,
            "MEMPLAN_STEPS": str(steps or 0),
            "MEMPLAN_ANSWERS": json.dumps(dict(answers or {})),
            REHEARSING: "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path_for_variables(HOOK)), environment.get("PYTHONPATH", "")]))
        environment = writes.held_in(environment)
        process = subprocess.Popen(command_for(arguments), env=environment, stdout=sys.stderr.fileno() if output_to_stderr else None)
        with _ended(process, folder):
            try:
                _wait(process, timeout_seconds)
            except subprocess.TimeoutExpired as error:
                took = "after Ctrl-C" if timeout_seconds is None else f"within {timeout_seconds:g} seconds"
                raise UsageError(f"the program did not end {took}", hint="end it after some steps: `steps=3`") from error
        device_log = read_device_log(log)
        device_log.check()
        record = _record(Path(folder), process.pid)
        if record is None:
            raise _nothing_seen(process.returncode)
        return writes.told_in(rehearsal_of(Run(record, device_log), context=assumed_range(context_bytes), exit_code=process.returncode))


def _nothing_seen(exit_code: int) -> NothingSeenError:
    """Return why a program left no report: it never used the GPU, or a signal ended it before it could write one."""
    if exit_code < 0:
        message = f"the program {ended(exit_code)} before it reported its memory"
        return NothingSeenError(message, program_exit_code=exit_code, hint="end it before whatever ended it: `steps=3`")
    message = f"the program {ended(exit_code)} and never used the GPU: there is nothing to report"
    return NothingSeenError(message, program_exit_code=exit_code, hint='its model and its batches have to be on the device "cuda"')


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


def _record(folder: Path, process_id: int) -> RunRecord | None:
    """Return what the program's own process wrote; where it never used CUDA, what the one of its processes wrote that took most."""
    own = folder / f"{process_id}.json"
    records = map(read_record, [own] if own.exists() else sorted(folder.glob("*.json")))
    return max(records, key=lambda record: record.peak_reserved_bytes, default=None)
