"""
Independent jobs, handed to somebody else's machines: what a job is, what runs one there, and what waits for all of them.

A job is a function of a module of memplan's and a text for it; its answer is a text too. Where it goes, an `Executor` knows: Ray, Dask or
Slurm (`on_ray.py`, `on_dask.py`, `on_slurm.py`). There it is run in a process of its own (`run_job`), since a worker may run several at
once, has variables of its own in its environment, and must not keep what a rehearsal leaves. That process ends when its worker does.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from memplan.description import Description
from memplan.errors import DoesNotFitError, MemplanError, MissingError, NotRehearsedError, UsageError

MOST_TRIES = 3
"""Of a job whose worker was lost."""

LOOKS_EVERY_SECONDS = 0.2

BYTES_OF_A_JOB = 3 * 2**30
"""What a job that rehearses takes of the host, generously: PyTorch for CUDA, and the trace of a long step."""

_LAST_LINES = 20
"""Of a job that ended without an answer."""

_ROOT = str(Path(__file__).parents[3])
_SERVE = f"import sys; sys.path.append({_ROOT!r}); from memplan.execution.executors.jobs import serve; serve(sys.argv[1])"

_ERRORS: tuple[type[MemplanError], ...] = (NotRehearsedError, UsageError, MissingError, DoesNotFitError)
"""What a job may raise, the special before the general."""


class Job(Description):
    """Something to be worked out elsewhere."""

    name: str
    """What progress and errors call it."""

    function: str
    """What does it, as `memplan.package.module:function`: it takes the request and returns the answer, or raises a MemplanError."""

    request: str
    """The text that it is given."""

    folder: str
    """The working folder; another one where the worker has none of that path, and it is not needed."""

    needs_folder: bool = False
    """It reads files of that folder."""

    environment: dict[str, str]
    """The variables that it runs with."""

    without: tuple[str, ...] = ()
    """How the names of variables begin that it runs without, where the worker has them."""


class Problem(Description):
    """An error that is the user's to solve, on its way back."""

    kind: str
    message: str
    hint: str | None = None

    def error(self) -> MemplanError:
        """Return it as the error that it was."""
        kind = next(each for each in _ERRORS if each.__name__ == self.kind)
        return kind(self.message, hint=self.hint)


class JobAnswer(Description):
    """How a job ended: with a text, with a problem, or before it had either."""

    text: str | None = None
    problem: Problem | None = None
    last_words: str = ""
    """What it said last, where it has neither."""


class LostJobError(Exception):
    """A job whose worker ended before it did: another one can run it."""


class RunningJob(ABC):
    """A job that was handed over."""

    @abstractmethod
    def answer(self) -> JobAnswer | None:
        """Return how it ended; None while it runs. Raises LostJobError where its worker was lost, MissingError where none can run it."""


class Executor(ABC):
    """What runs jobs. To be used in a `with`."""

    @abstractmethod
    def start(self, job: Job) -> RunningJob:
        """Hand *job* over."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing running that was started here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


OnJob = Callable[[int, int], None]
"""Is told how many jobs have ended, and of how many."""


def run_jobs(executor: Executor, jobs: Sequence[Job], *, on_job: OnJob | None = None) -> list[str]:
    """
    Return the answers of *jobs*, in their order; one whose worker was lost is started again.

    Raises the MemplanError that a job raised, and MissingError for one whose worker was lost time after time.
    """
    running = {number: executor.start(job) for number, job in enumerate(jobs)}
    answers: dict[int, str] = {}
    tries: Counter[int] = Counter()
    while running:
        if on_job is not None:
            on_job(len(answers), len(jobs))
        for number, started in list(running.items()):
            try:
                answer = started.answer()
                if answer is None:
                    continue
                answers[number] = _text_of(answer)
                del running[number]
            except LostJobError as error:
                tries[number] += 1
                if tries[number] >= MOST_TRIES:
                    problem = f"{jobs[number].name}: its worker was lost {MOST_TRIES} times; the last time: {error}"
                    raise MissingError(problem, hint=f"a job needs one processor and {BYTES_OF_A_JOB >> 30} GiB of its host") from error
                running[number] = executor.start(jobs[number])
        if running:
            time.sleep(LOOKS_EVERY_SECONDS)
    return [answers[number] for number in range(len(jobs))]


def _text_of(answer: JobAnswer) -> str:
    if answer.problem is not None:
        raise answer.problem.error()
    if answer.text is None:
        raise LostJobError(answer.last_words)
    return answer.text


def run_job(job: Job) -> JobAnswer:
    """Return how *job* ends, run in a process of its own: what a worker does."""
    has_folder = Path(job.folder).is_dir()
    if job.needs_folder and not has_folder:
        problem = f"the worker {socket.gethostname()} has no folder {job.folder}"
        return JobAnswer(problem=Problem(kind=MissingError.__name__, message=problem, hint="start it in a folder that all workers see"))
    with tempfile.TemporaryDirectory(prefix="memplan-job-") as temporary:
        place = Path(temporary, "answer.json")
        own = {name: value for name, value in os.environ.items() if not name.startswith(job.without)}
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=job.folder if has_folder else temporary,
            env={**own, **job.environment},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(job.model_dump_json().encode() + b"\n")
            process.stdin.flush()  # and left open: its end says to the job that there is nobody who waits
            said = process.stdout.read().decode(errors="replace").splitlines()
        finally:
            process.stdin.close()
            process.stdout.close()
            status = process.wait()
        if place.exists():
            return JobAnswer.model_validate_json(place.read_bytes())
        return JobAnswer(last_words="\n".join([f"it ended with status {status} on {socket.gethostname()}", *said[-_LAST_LINES:]]))


def serve(place: str) -> None:
    """Do the job that standard input says, and leave how it ended in the file *place*; end with who asked for it."""
    job = Job.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_asker, daemon=True).start()
    try:
        answer = JobAnswer(text=_function_of(job)(job.request))
    except MemplanError as error:
        kind = next((each for each in _ERRORS if isinstance(error, each)), UsageError)
        answer = JobAnswer(problem=Problem(kind=kind.__name__, message=error.message, hint=error.hint))
    partial = Path(place).with_suffix(".partial")
    partial.write_text(answer.model_dump_json(), encoding="utf-8")
    partial.replace(place)


def _function_of(job: Job) -> Callable[[str], str]:
    module, _, name = job.function.partition(":")
    function: Callable[[str], str] = getattr(importlib.import_module(module), name)
    return function


def _end_with_asker() -> None:
    """Wait for the end of standard input, which nothing more is written to."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
