"""
A process that is warm: it has imported what a program imports, and becomes the program in a fork of itself, as often as asked.

    python [the program's own options] -c "... from memplan.child.warm import serve; serve(SOCKET, FOLDER, IDLE)"

SOCKET is the descriptor of a listening socket. A connection begins with one byte that carries three descriptors, the program's standard
input, output and error; then comes a line of JSON: {"import": [modules]}, {"end": true}, or {"run": ...} with script or module, arguments,
command, environment, folder, umask and ignored (signals). Answers are lines too: {"pid": ...} when the program has begun, {"status": ...}
when it has ended. Where a file that it imported has changed since, or a fork cannot be had any more, the process ends without an answer.

Only installed packages are imported ahead, never a file of the user's project, so that a program that was edited runs as it is now.
Nothing of CUDA has begun when a fork is made: what packages ask of the GPU at their import, another fork answers. Programs on other kinds
of GPU are then for another process.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

import torch

from memplan.child.gpu_at_import import GpuAtImport
from memplan.child.held_back import hold_back
from memplan.child.installed_modules import installed_modules
from memplan.child.one_rank import take_rank
from memplan.child.script import begin, first_environment
from memplan.child.server import can_fork, fork, let_gpus_be_counted
from memplan.child.set_variables import note_setters, set_by_packages
from memplan.child.tracked_objects import objects_of_classes

NUM_STREAMS = 3
_PR_SET_PDEATHSIG = 1


class Warm:
    """What this process has imported, and the files that it came from."""

    def __init__(self) -> None:
        self._changed_at: dict[str, int] = {}
        self._given = first_environment()
        self.gpu = GpuAtImport(self._given)

    def import_all(self, names: Iterable[str]) -> None:
        """Import the modules that can be; some can only from the place where the program does."""
        with self.gpu.answered():
            for name in names:
                if name not in sys.modules:
                    with suppress(Exception, SystemExit):
                        importlib.import_module(name)
        own = [file for name, module in sys.modules.items() if name.startswith("memplan.") and (file := module.__file__)]
        for file in (*installed_modules().values(), *own):
            self._changed_at.setdefault(file, _changed_at(file))
        gc.collect()  # as good as always just after imports: how long garbage lives then hangs on what there was before

    def set_variables(self) -> dict[str, str]:
        """Return the variables of the environment that packages set when they are imported."""
        return {name: value for name, value in os.environ.items() if self._given.get(name) != value}

    def is_stale(self) -> bool:
        """Say whether a file that was imported is another one now: a package was installed, or removed."""
        return any(_changed_at(file) != when for file, when in self._changed_at.items())

    def can_serve(self, request: dict[str, Any] | None) -> bool:
        """
        Say whether a fork is as good as a process of its own.

        No thread would be lost, CUDA has not begun, and packages have not learned of another kind of GPU than that of the *request*.
        """
        if request is not None and "run" in request and not self.gpu.is_that_of(request["run"]["environment"]):
            return False
        return threading.active_count() == 1 and not torch.cuda.is_initialized() and can_fork()


def _changed_at(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return 0


def serve(listening: int, folder: str, idle_seconds: float) -> Callable[[], None]:
    """
    Serve programs; return, in a fork, what runs one.

    The process ends after *idle_seconds* without one, and removes *folder*; 0: it ends with whoever started it, who removes it.
    """
    count = torch._C._cuda_getDeviceCount
    let_gpus_be_counted()
    hold_back()
    note_setters()
    warm = Warm()
    asked = socket.socket(fileno=listening)
    if idle_seconds:
        asked.settimeout(idle_seconds)
    while True:
        try:
            connection, _ = asked.accept()
        except TimeoutError:
            if _num_programs():
                continue
            _remove(folder)
            os._exit(0)
        _num_programs()
        request, streams = _received(connection)
        if request is not None and "import" in request:
            warm.import_all(request["import"])
        is_over = request is not None and "end" in request
        if is_over or warm.is_stale() or not warm.can_serve(request):
            asked.close()
            connection.close()
            for stream in streams:
                os.close(stream)
            _wait_for_programs()  # they are others', who have still to read what these leave in the folder
            _remove(folder)
            os._exit(0)
        if request is not None and "run" in request and fork() == 0:
            asked.close()
            _end_with_parent()
            program = fork()
            if program:
                for stream in streams:
                    os.close(stream)
                _see_to(program, connection)
            torch._C._cuda_getDeviceCount = count
            _end_with_parent()
            connection.close()
            return become(request["run"], streams, warm.set_variables())
        connection.close()
        for stream in streams:
            os.close(stream)


def _remove(folder: str) -> None:
    """Remove this process's own folder: as it is, and not as a program sees what is in it (programs/csrc/index.c)."""
    end_of_overlay = getattr(ctypes.CDLL(None), "memplan_overlay_end", None)
    if end_of_overlay is not None:
        end_of_overlay()
    shutil.rmtree(folder, ignore_errors=True)


def _num_programs() -> int:
    """Return how many programs run; those that have ended are forgotten."""
    num = 0
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        num = 1  # there is a child, and it has not ended
    return num


def _wait_for_programs() -> None:
    """Wait until every program has ended."""
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _received(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return what is asked, None where nobody asks any more, and the descriptors that came with it."""
    connection.setblocking(True)
    with suppress(OSError):
        byte, streams, _, _ = socket.recv_fds(connection, 1, NUM_STREAMS)
        with connection.makefile("rb") as lines:
            line = lines.readline() if byte else b""
        return (json.loads(line) if line else None), list(streams)
    return None, []


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # nobody waits any more
        connection.sendall((json.dumps(answer) + "\n").encode())


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _see_to(program: int, connection: socket.socket) -> NoReturn:
    """Wait for *program*, and tell how it ended; end it where nobody waits for that any more. Every connection has a process for this."""
    with suppress(OSError):
        os.setpgid(program, program)  # as it does itself: whoever comes first
    _answer(connection, {"pid": program})
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([ended, connection.fileno()], [], [])
    if connection.fileno() in ready:  # memplan says nothing more: it has ended
        _end_group(program)
    _, status = os.waitpid(program, 0)
    _end_group(program)  # what it left behind
    _answer(connection, {"status": os.waitstatus_to_exitcode(status)})
    with suppress(OSError):
        connection.recv(1)  # nothing more comes: what the program left in this process's folder is read until then
    os._exit(0)


def _end_group(number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


# the program


def become(request: dict[str, Any], streams: list[int], of_packages: dict[str, str]) -> Callable[[], None]:
    """
    Make this process what Python would have made for the program that *request* says; return what runs it.

    *of_packages*: variables of the environment that would be set when the program has imported what is imported already.
    """
    os.setpgid(0, 0)
    sys.stdout.flush()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=output is sys.stderr or output.isatty())  # type: ignore[union-attr]
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"] | of_packages)
    set_by_packages().clear()
    set_by_packages().update(of_packages)
    tempfile.tempdir = None  # that of the process in which the program's imports were made
    ctypes.CDLL(None).memplan_begin_again()
    take_rank()
    os.chdir(request["folder"])
    overlay = getattr(ctypes.CDLL(None), "memplan_overlay_begin", None)
    if overlay is not None:
        overlay()
    script, module = request["script"], request["module"]
    sys.orig_argv[:] = request["command"]
    sys.argv[:] = [script or module, *request["arguments"]]
    sys.path.insert(0, str(Path(script).resolve().parent) if script else request["folder"])

    def run() -> None:
        begin(request["environment"])
        _exit_code[:] = [_EXIT_CODE_OF_ERROR]
        try:
            run_file(script) if script else runpy.run_module(module, run_name="__main__", alter_sys=True)
            _exit_code[:] = [0]
        except SystemExit as end:
            _exit_code[:] = [end.code if isinstance(end.code, int) else int(end.code is not None)]
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
        except BaseException as error:
            show(error)
            if isinstance(error, KeyboardInterrupt):
                _exit_code[:] = [-signal.SIGINT]

    return run


_WRITTEN = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_EXIT_CODE_OF_ERROR = 1
_exit_code: list[int] = []
"""Of the program that has run in this fork; minus the signal that it ends by."""


def leave() -> None:
    """
    End a fork at once when everything is done that programs have done at their end: to be the first function that `atexit` is given.

    To take a million objects to pieces would take a second more. What Python would do for the user then is to write what is left in files.
    """
    if not _exit_code:
        return
    for candidate in objects_of_classes(_WRITTEN):
        with suppress(OSError, ValueError):  # it is closed, or cannot be written
            candidate.flush()
    if _exit_code[0] < 0:
        signal.signal(-_exit_code[0], signal.SIG_DFL)
        os.kill(os.getpid(), -_exit_code[0])
    os._exit(_exit_code[0] & 0xFF)


def run_file(given: str) -> None:
    """Run the file *given* as Python does: as a module that stays ``__main__``, and is called by its whole path."""
    path = os.path.abspath(given)  # noqa: PTH100  (links are not followed)
    module: Any = types.ModuleType("__main__")
    module.__file__, module.__builtins__, module.__loader__ = path, builtins, SourceFileLoader("__main__", path)
    module.__cached__ = None
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))


def show(error: BaseException) -> None:
    """Show *error* as Python would, and leave it where it does; the calls of this file are no part of the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    told = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(told), told, trace
    sys.excepthook(type(told), told, trace)
