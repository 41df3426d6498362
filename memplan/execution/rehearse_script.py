"""Rehearsing a whole program, unmodified: it is started as ever, on the simulated GPU, with a recorder that waits for PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from memplan.errors import MissingError, NothingSeenError, UsageError
from memplan.execution.command import Command, command_from
from memplan.execution.device_log import read_device_log
from memplan.execution.held_back import Writes
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.run_record import RunRecord, read_record
from memplan.execution.runner import REHEARSING, ended
from memplan.execution.summary import Run, rehearsal_of
from memplan.execution.values_pass import NO_VALUES, EndlessError, ValuesFile, most_seconds, settle, with_ample_memory
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild, find_torch
from memplan.memory.cuda_context import CONTEXT_BYTES, assumed_range
from memplan.standin.build import build
from memplan.standin.compiled_libraries import path_for_variables
from memplan.standin.launch import command_for, environment_for, own_caches

HOOK = Path(__file__).parents[1] / "child" / "hook"
_ROOT = str(Path(__file__).parents[2])

_GRACE_SECONDS = 10.0
"""What a program gets to end in, when it was asked to."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SI_KERNEL = 0x80  # siginfo's si_code of Ctrl-C (sigaction(2)): the terminal sends it to the program as well

# What the device runs in a Python that did not load the hook (csrc/python.c): with as few names of its own as can be.
_RECORDER = f"""
import sys
torch = sys.modules.get("torch")
if hasattr(torch, "compile"):  # one of the last names that `import torch` makes
    sys.path.append({_ROOT!r})
    try:
        from memplan.child.script import begin
    finally:
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index({_ROOT!r})]
    begin()
"""


def rehearse_script(
    words: Sequence[str],
    *,
    gpu: GpuSpec,
    steps: int | None = None,
    answers: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
    output_to_stderr: bool = False,
    context_bytes: int = CONTEXT_BYTES,
    allow_writes: bool = False,
    most_walked_batches: int = 0,
) -> Rehearsal:
    """
    Run the program that *words* say on *gpu*; return what its memory did. Its exit code is minus the signal's number where one ended it.

    *words* begin with a script, ``-m`` or a program. The program's output goes where this process's does (*output_to_stderr*: all of it to
    standard error). *steps* ends it after that many steps. What it writes is held back, unless *allow_writes*. Of several processes, the
    one that trains is reported. *most_walked_batches*: look at so many batches of each DataLoader, and begin with the largest;
    0: as they come.

    Raises NothingSeenError for a program that did not use the GPU, or ended before it could report; UsageError for one that is not there or
    takes longer; MissingError when this machine cannot rehearse it.
    """
    command = command_from(words)
    torch = _torch_of(command)
    libraries = build(torch)
    with tempfile.TemporaryDirectory(prefix="memplan-rehearsal-") as name:
        whole = Path(name)
        process_of: dict[int, Ended] = {}
        durations: list[float] = []
        script = next((Path(word) for word in command.words[1:] if word.endswith(".py")), None)

        def run(values_file: ValuesFile | None) -> Run:
            folder = Path(tempfile.mkdtemp(dir=whole))
            is_followed = values_file is not None and values_file.variant is not None
            inherited = os.environ | command.environment
            card = with_ample_memory(gpu) if is_followed and not any(ended_.has_run_out for ended_ in process_of.values()) else gpu
            writes = Writes(folder, script=script, are_allowed=allow_writes)
            file = values_file._replace(path=folder / "values") if is_followed and values_file is not None else values_file or NO_VALUES
            environment = {
                **environment_for(card, libraries, context_bytes=context_bytes, inherited=inherited),
                **_for_recorder(torch, folder, steps, answers, inherited),
                "MEMPLAN_WORST_BATCH": str(most_walked_batches),
                **{f"MEMPLAN_{key.upper()}": value for key, value in file.request().items()},
            }
            environment = writes.held_in(environment)
            begin = time.monotonic()
            process = _start(command, environment, is_first=values_file is None, output_to_stderr=output_to_stderr)
            with _ended(process, str(folder)):
                if values_file is None:
                    _wait(process, timeout_seconds)
                else:
                    _wait_again(process, timeout_seconds, most_seconds(durations[0]))
            durations.append(time.monotonic() - begin)
            if values_file is not None and values_file.path is not None and file.path is not None and file.path.exists():
                file.path.replace(values_file.path)  # what a program writes stays in the folder of its own run
            log, record = read_device_log(folder / "log"), _record(folder)
            if record is None or record.failure is not None or process.returncode:
                log.check()
            if record is None or _used_no_memory(record):
                raise _nothing_seen(process.returncode)
            if record.failure is not None and record.failure.kind == "mistake":
                raise UsageError(record.failure.message, hint="name the Python that runs it: `-- /path/to/python train.py`")
            process_of[id(record)] = Ended(process.returncode, record.pid == process.pid, record.out_of_memory is not None, writes)
            return Run(record, log)

        found = settle(run, folder=whole, answers=answers)
        record, how = found.run.record, process_of[id(found.run.record)]
        rehearsal = rehearsal_of(
            found.run,
            other=found.other,
            context=assumed_range(context_bytes),
            exit_code=how.exit_code,
            process=None if how.is_first else " ".join(record.command),
        )
        return how.writes.told_in(rehearsal)


def _torch_of(command: Command) -> TorchBuild:
    """Return the PyTorch that *command* will run; where it does not say its Python and that has none, this one's."""
    if command.is_of_this_python:
        return find_torch()
    try:
        return find_torch(command.python)
    except MissingError:
        if command.is_guess:
            return find_torch()
        raise


class Ended(NamedTuple):
    """How a run of a program ended."""

    exit_code: int
    is_first: bool
    """What is told of is the process that was started, not one that it started."""
    has_run_out: bool
    writes: Writes


def _start(command: Command, environment: Mapping[str, str], *, is_first: bool, output_to_stderr: bool) -> subprocess.Popen[bytes]:
    """Start the program; only its first run says anything and is said anything, the others are memplan's own affair."""
    if not is_first:
        silent = subprocess.DEVNULL
        return subprocess.Popen(command_for(command.words), env=environment, stdin=silent, stdout=silent, stderr=silent)
    return subprocess.Popen(command_for(command.words), env=environment, stdout=sys.stderr.fileno() if output_to_stderr else None)


def _for_recorder(
    torch: TorchBuild, folder: Path, steps: int | None, answers: Mapping[str, Any] | None, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that child/script.py and the device read, and those by which Python finds the hook."""
    return {
        **own_caches(folder),
        "MEMPLAN_LOG": str(folder / "log"),
        "MEMPLAN_WORKSPACES": "1",
        "MEMPLAN_RESULTS": str(folder),
        "MEMPLAN_STEPS": str(steps or 0),
        "MEMPLAN_ANSWERS": json.dumps(dict(answers or {})),
        "MEMPLAN_TORCH": torch.version,
        "MEMPLAN_RECORDER": _RECORDER,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path_for_variables(HOOK)), inherited.get("PYTHONPATH", "")])),
        REHEARSING: "1",
    }


def _used_no_memory(record: RunRecord) -> bool:
    """Say whether the program only began to use the GPU, as by a seed, and ran on the host."""
    return not record.peak_reserved_bytes and record.failure is None and record.out_of_memory is None


def _nothing_seen(exit_code: int) -> NothingSeenError:
    """Return why a program left no report: it never used the GPU, or a signal ended it before it could write one."""
    if exit_code < 0:
        message = f"the program {ended(exit_code)} before it reported its memory"
        return NothingSeenError(message, program_exit_code=exit_code, hint="end it before whatever ended it: `steps=3`")
    message = f"the program {ended(exit_code)} and never used the GPU: there is nothing to report"
    return NothingSeenError(message, program_exit_code=exit_code, hint='its model and its batches have to be on the device "cuda"')


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float | None) -> None:
    """
    Wait for *process*, and pass on to it the signals that end programs.

    It is left the time to end as it likes, and what it did until then is reported; a second signal ends it at once. Raises UsageError for
    one that does not end.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    asked: signal.Signals | None = None
    heard = {number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}  # as `nohup` has it for SIGHUP
    awaited = {*heard, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        while process.poll() is None:
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if left <= 0:
                after = f"after {asked.name}" if asked else f"within {timeout_seconds:g} seconds"
                raise UsageError(f"the program did not end {after}", hint="end it after some steps: `steps=3`")
            found = signal.sigtimedwait(awaited, left)
            if found is None or found.si_signo == signal.SIGCHLD:
                continue
            if asked is not None:
                raise UsageError(f"the program was ended by a second {signal.Signals(found.si_signo).name}: there is nothing to report")
            asked = signal.Signals(found.si_signo)
            if found.si_code != _SI_KERNEL:
                process.send_signal(asked)
            deadline = time.monotonic() + _GRACE_SECONDS
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_again(process: subprocess.Popen[bytes], timeout_seconds: float | None, most: float) -> None:
    """Wait as `_wait` does for a run with values. Raises EndlessError after *most* seconds, where the user's limit is no shorter."""
    begin = time.monotonic()
    try:
        _wait(process, most if timeout_seconds is None else min(most, timeout_seconds))
    except UsageError as error:
        if time.monotonic() - begin < most or (timeout_seconds is not None and timeout_seconds <= most):
            raise
        raise EndlessError from error


@contextmanager
def _ended(process: subprocess.Popen[bytes], folder: str) -> Iterator[None]:
    """Leave no process behind: asked to end first, so that each can end its own and write what it saw, and then ended."""
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
    deadline = time.monotonic() + _GRACE_SECONDS
    left = _all_of(folder)
    for number in left:
        with suppress(OSError):
            os.kill(number, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = _all_of(folder)
    for number in left:
        with suppress(OSError):
            os.kill(number, signal.SIGKILL)


def _all_of(folder: str) -> list[int]:
    """Return the processes of the rehearsal whose results go to *folder*."""
    mark = f"MEMPLAN_RESULTS={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is another's, or has ended
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def _record(folder: Path) -> RunRecord | None:
    """Return what the process wrote that trained: the most steps, else backwards, else memory."""
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    return max(records, key=lambda record: (len(record.steps), record.num_backwards, record.peak_reserved_bytes), default=None)
