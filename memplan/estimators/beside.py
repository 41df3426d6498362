"""
Steps that are run beside those that are asked for: in processes of their own, as many as processors and memory of the host allow.

What will probably be asked for next is begun early. A process takes one job after the other, and ends with this one or when it has had
none for a while. A job that fails tells nothing: two copies of a program may have been in each other's way. It is run again alone.
"""

from __future__ import annotations

import atexit
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from memplan.estimators.steps import is_answer
from memplan.execution.program_process import EndedTwiceError, wait_for
from memplan.execution.program_runs import OnProgress, ProgramProgress
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.host import available_bytes, num_processors
from memplan.standin.launch import command_for

MOST_PROCESSES = 3
"""A search seldom knows more that it will ask."""

LEAST_BYTES = 4 * 2**30
"""Memory of the host that has to be free for another run: PyTorch's CUDA build and a small model take 2 GiB."""

IDLE_SECONDS = 60.0
"""After so long without a job a process ends."""


class Job(NamedTuple):
    """What a process is to do: a function of a module, and its arguments."""

    function: Callable[..., Rehearsal]
    arguments: tuple[object, ...]
    tells_progress: bool = False
    """The function takes `on_progress`."""


class Begun(NamedTuple):
    """A job that is done."""

    rehearsal: Rehearsal
    begin_ns: int
    """When it began, by `time.time_ns`."""


class Beside:
    """The jobs that are to be done beside, each under a key; the last that was given is begun first: it will be asked for soonest."""

    def __init__(self) -> None:
        self._jobs = _Jobs()
        self._processes: list[_Process] = []

    def begin(self, key: Hashable, job: Job) -> None:
        """Begin *job* as soon as there is room for it, if nobody takes it before."""
        for process in [process for process in self._processes if not process.is_of_use]:
            process.end()
            self._processes.remove(process)
        self._jobs.add(key, job)
        if not any(process.is_idle for process in self._processes) and has_room(len(self._processes)):
            self._processes.append(_Process(self._jobs))

    @property
    def doing(self) -> list[Hashable]:
        """Return the keys of the jobs that are being done."""
        return self._jobs.doing()

    def meanwhile(self) -> Callable[[], list[Hashable]]:
        """Return what tells the keys of the jobs that have been in the way since: being done now, or begun until it is asked."""
        doing, num_begun = self._jobs.doing(), len(self._jobs.begun_ever())
        return lambda: [*doing, *self._jobs.begun_ever()[num_begun:]]

    def all_fail(self, keys: Sequence[Hashable]) -> bool:
        """Say whether the jobs of *keys*, which were begun, fail, when they are done. Raises KeyboardInterrupt as `take`."""
        for key in keys:
            self._wait_for(key)
        return all(map(self._jobs.has_failed, keys))

    def take(self, key: Hashable, *, on_progress: OnProgress | None = None) -> Begun | None:
        """
        Return what came of the job that was begun under *key*, when it is done; None where it was not begun, or failed.

        *on_progress* is called while it is waited for, with how far its program is. Raises KeyboardInterrupt where it is ended by a signal.
        """
        self._wait_for(key, on_progress)
        begun = self._jobs.take(key)
        if begun is not None and begun.rehearsal.was_interrupted:
            raise KeyboardInterrupt
        return begun

    def _wait_for(self, key: Hashable, on_progress: OnProgress | None = None) -> None:
        """Wait until the job of *key* is done, where it was begun. Raises KeyboardInterrupt where a signal ends it."""
        if self._jobs.is_begun(key):
            process = next((process for process in self._processes if process.key == key), self._processes[-1])  # that which has just begun

            def look() -> bool:
                if on_progress is not None and process.key == key and process.progress is not None:
                    on_progress(process.progress)
                return False

            try:
                signalled = wait_for(process.until_done(key), None, is_over=look)
            except EndedTwiceError as error:
                raise KeyboardInterrupt from error
            if signalled is not None:
                raise KeyboardInterrupt

    def end(self) -> None:
        """End all processes; what they were at comes to nothing."""
        for process in self._processes:
            process.end()
        self._processes.clear()
        self._jobs = _Jobs()


def has_room(num_beside: int) -> bool:
    """Say whether one more can run beside *num_beside* others and what this process runs: twice as large as the largest that it has run."""
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return num_beside < min(MOST_PROCESSES, num_processors() - 1) and available_bytes() >= max(LEAST_BYTES, 2 * largest)


class _Jobs:
    """Jobs that wait, that are done, and that were done; for the threads of several processes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, Job] = {}
        self._begun: set[Hashable] = set()
        self._order: list[Hashable] = []
        self._done: dict[Hashable, Begun | None] = {}

    def add(self, key: Hashable, job: Job) -> None:
        """Let *job* wait, where it is not begun already; before the others."""
        with self._changed:
            if key not in self._begun and key not in self._done:
                self._waiting.pop(key, None)
                self._waiting[key] = job
                self._changed.notify()

    def next(self, is_over: Callable[[], bool]) -> tuple[Hashable, Job] | None:
        """Return the job that is to be begun now, when there is one; None when *is_over* says so, which it is asked after `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or is_over())
            if is_over():
                return None
            key, job = self._waiting.popitem()
            self._begun.add(key)
            self._order.append(key)
            return key, job

    def wake(self) -> None:
        """Have those that wait for a job see whether all is over."""
        with self._changed:
            self._changed.notify_all()

    def doing(self) -> list[Hashable]:
        """Return the keys of the jobs that are being done."""
        with self._changed:
            return [*self._begun]

    def begun_ever(self) -> list[Hashable]:
        """Return the keys of all jobs that were begun, in that order."""
        with self._changed:
            return [*self._order]

    def is_begun(self, key: Hashable) -> bool:
        """Say whether the job of *key* is being done."""
        with self._changed:
            return key in self._begun

    def has_failed(self, key: Hashable) -> bool:
        """Say whether the job of *key* is done, and nothing came of it."""
        with self._changed:
            return key in self._done and self._done[key] is None

    def done(self, key: Hashable, begun: Begun | None) -> None:
        """Keep what came of the job of *key*."""
        with self._changed:
            self._begun.discard(key)
            self._done[key] = begun

    def take(self, key: Hashable) -> Begun | None:
        """Return what came of the job of *key*, once; one that still waits is not begun any more."""
        with self._changed:
            self._waiting.pop(key, None)
            return self._done.pop(key, None)


class _Process:
    """A process that does one job after the other, and a thread that gives it those."""

    def __init__(self, jobs: _Jobs) -> None:
        self._surroundings = _surroundings()
        ours = "from memplan.estimators.beside import work; work()"  # Ctrl-C while it imports is for who started it, which ends it
        boot = f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {sys.path!r}; {ours}"
        self._process = subprocess.Popen(command_for([sys.executable, "-c", boot]), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self.end)
        self.key: Hashable | None = None
        """Of the job that it does."""
        self.progress: ProgramProgress | None = None
        """How far the program of that job is, as far as it was told."""
        self._jobs = jobs
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Say whether it has nothing to do."""
        return self.key is None

    @property
    def is_of_use(self) -> bool:
        """Say whether it can do another job: it still answers, and has the working folder and the environment that there are now."""
        return not self._is_over and self._process.poll() is None and (not self.is_idle or self._surroundings == _surroundings())

    def _serve(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        while (begun := self._jobs.next(lambda: self._is_over)) is not None:
            self.progress = None
            self.key, job = begun
            begin_ns = time.time_ns()
            try:
                _send(self._process.stdin, job)
                rehearsal = self._answer()
            except (OSError, ValueError, EOFError):
                self._is_over, rehearsal = True, None  # it has ended, or is about to: its streams are closed before it is gone
            self._jobs.done(self.key, None if rehearsal is None else Begun(rehearsal, begin_ns))
            self.key = None

    def _answer(self) -> Rehearsal | None:
        """Return what came of the job that it does. Raises EOFError where it has ended."""
        assert self._process.stdout is not None
        while isinstance(answer := _received(self._process.stdout), ProgramProgress):
            self.progress = answer
        rehearsal: Rehearsal | None = answer
        return rehearsal

    def until_done(self, key: Hashable) -> _Doing:
        """Return the job of *key* as a process that can be waited for."""
        return _Doing(self._process, lambda: not self._jobs.is_begun(key))

    def end(self) -> None:
        """End it, and what it runs."""
        atexit.unregister(self.end)
        self._is_over = True
        self._jobs.wake()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # of what was not sent
            self._process.stdin.close()  # a signal that came while a job was done has ended that alone
        self._process.wait()
        self._thread.join()
        self._process.stdout.close()


class _Doing:
    """A job as a process that is waited for; signals go to the process that does it, which passes them on to what it runs."""

    def __init__(self, process: subprocess.Popen[bytes], is_done: Callable[[], bool]) -> None:
        self.pid = process.pid
        self._process, self._is_done = process, is_done

    def poll(self) -> int | None:
        """Return 0 when the job is done."""
        return 0 if self._is_done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the job. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._is_done():
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a job", timeout or 0)
            time.sleep(0.01)
        return 0

    def send_signal(self, number: int, /) -> None:
        """Send it to the process."""
        self._process.send_signal(number)


def _surroundings() -> tuple[str, dict[str, str]]:
    return os.getcwd(), dict(os.environ)  # noqa: PTH109  (Path.cwd is the same)


# in the process


def work() -> None:
    """Do what comes by standard input, one job after the other, and answer by standard output."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what a job prints is nobody's, and nobody answers it
        os.dup2(nowhere, stream)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves no file behind
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt, BrokenPipeError, EOFError):
        while select.select([jobs], [], [], IDLE_SECONDS)[0]:
            _send(answers, _done(_received(jobs), lambda progress: _send(answers, progress)))


def _done(job: Job, on_progress: OnProgress) -> Rehearsal | None:
    """Return what came of *job*; None where it failed, which whoever asked for it finds out alone."""
    try:
        found = job.function(*job.arguments, **({"on_progress": on_progress} if job.tells_progress else {}))
    except Exception:
        return None
    return found if is_answer(found) or found.was_interrupted else None


def _send(stream: IO[bytes], told: object) -> None:
    stream.write(pickle.dumps(told))
    stream.flush()


def _received(stream: IO[bytes]) -> Any:
    """Return what was sent. Raises EOFError at the end."""
    try:
        return pickle.load(stream)
    except pickle.UnpicklingError as error:  # it ended while it wrote
        raise EOFError from error
