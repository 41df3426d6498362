"""What a person sees while rehearsals run: each further run of a program; on a terminal a line that changes, or one from time to time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memplan.reports.breakdown_view import count
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.estimators.registry import OnRehearsal
    from memplan.estimators.steps import Step
    from memplan.execution.executors.jobs import OnJob
    from memplan.execution.program_runs import OnProgress, ProgramProgress

WIDTH = 100

LINE_EVERY_SECONDS = 10.0
"""How often a line says how far a program is that writes to the terminal itself."""

LOG_LINE_EVERY_SECONDS = 30.0
"""How often a line says how far a plan is where standard error is no terminal."""

_HOW_TO_END = "Ctrl-C ends the program and reports what was seen; `--steps 3` ends it by itself"

_HOW_TO_SHORTEN = " (an evaluation can be left out of rehearsals: by `--short 'KEY=VALUE'`, or by an argument in the command)"


@contextmanager
def program_progress() -> Iterator[OnProgress | None]:
    """Give what shows how far a program is, while the block lasts; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    begin, lines = time.monotonic(), 0

    def show(progress: ProgramProgress) -> None:
        nonlocal lines
        seconds = time.monotonic() - begin
        what = f"{count(progress.num_steps, 'step')}, {format_bytes(progress.peak_reserved_bytes)} reserved at the peak so far"
        what = progress.waiting or what
        if progress.num_run == 1:  # the program has the terminal: a whole line, and seldom
            if seconds >= (lines + 1) * LINE_EVERY_SECONDS:
                advice = "" if lines else f" ({_HOW_TO_END})"
                lines = int(seconds // LINE_EVERY_SECONDS)
                sys.stderr.write(f"memplan: {what}{advice}\n")
            return
        rewrite(f"run {progress.num_run}, for the values that decide sizes ({seconds:.0f} s): {what}")

    with _changing_line() as rewrite:
        yield show


def show_next_run(how: str) -> None:
    """Say with what a program is run again, wherever standard error goes: its own output has been that of the first run."""
    wiped = f"\r{'':{WIDTH}}\r" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{wiped}memplan: running the program again with {how}\n")
    sys.stderr.flush()


@contextmanager
def rehearsal_progress(clock: Callable[[], float] = time.monotonic, *, told_every_seconds: float = 1.0) -> Iterator[OnRehearsal]:
    """
    Give what shows which step is rehearsed, while the block lasts: on a terminal each, in a log one from time to time.

    A rehearsal of a program may take minutes, in which the seconds go on: the line is told again *told_every_seconds*.
    """
    begin, num_rehearsals, told_at, described, advice = clock(), 0, 0.0, "", ""
    is_terminal, is_advised = sys.stderr.isatty(), False
    telling = threading.Lock()

    def tell() -> None:
        nonlocal told_at, advice
        seconds = clock() - begin
        text = f"rehearsal {num_rehearsals} ({seconds:.0f} s): {described}"
        if is_terminal:
            rewrite(text)
        elif seconds >= told_at + LOG_LINE_EVERY_SECONDS:
            told_at = seconds
            sys.stderr.write(f"memplan: {text}{advice}\n")
            sys.stderr.flush()
            advice = ""

    def show(step: Step) -> None:
        nonlocal num_rehearsals, described, advice, is_advised
        with telling:
            num_rehearsals, described = num_rehearsals + (step.where is None), _described(step)
            if step.where and not is_advised:
                advice, is_advised = _HOW_TO_SHORTEN, True
            tell()

    def tell_again() -> None:
        while not is_over.wait(told_every_seconds):
            with telling:
                if described:
                    tell()

    is_over = threading.Event()
    teller = threading.Thread(target=tell_again, daemon=True)
    with _changing_line() as rewrite:
        teller.start()
        try:
            yield show
        finally:
            is_over.set()
            teller.join()


@contextmanager
def job_progress() -> Iterator[OnJob | None]:
    """Give what shows how many jobs have ended, while the block lasts; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    begin = time.monotonic()
    with _changing_line() as rewrite:
        yield lambda num_ended, num_jobs: rewrite(f"{num_ended} of {num_jobs} jobs have ended ({time.monotonic() - begin:.0f} s)")


@contextmanager
def _changing_line() -> Iterator[Callable[[str], None]]:
    """Give what writes a text over the one before it; at the end nothing of it is left."""
    is_written = False

    def rewrite(text: str) -> None:
        nonlocal is_written
        is_written = True
        sys.stderr.write(f"\r{text[:WIDTH]:{WIDTH}}")
        sys.stderr.flush()

    try:
        yield rewrite
    finally:
        if is_written:
            sys.stderr.write(f"\r{'':{WIDTH}}\r")
            sys.stderr.flush()


def _described(step: Step) -> str:
    stages = step.program.stages
    negatives = f", {stages[0].n_negatives} negatives" if stages and step.program.contrastive else ""
    name = f"{stages[0].name}, " if stages and not step.program.contrastive else ""
    if step.where:
        return f"{name}micro-batch {step.micro_batch_size}{negatives}, {step.where}"
    more = f", perhaps {step.num_likely} more" if step.num_likely else ""
    return f"{name}micro-batch {step.micro_batch_size}{negatives} on {step.gpu.name}{more}"
