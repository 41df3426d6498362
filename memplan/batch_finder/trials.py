"""
The largest batch by real trial: each size in a process that has used the GPU for nothing before.

The search begins where a plan or a rehearsal thinks that the end is, so that two trials mostly do: that size runs, and the next does not.
What it returns has run; a size that failed is never returned, and neither is one that nobody tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from memplan.description import Description
from memplan.planner.search import Fits, Outcome, largest_accepted
from memplan.workload.training import MOST_STEPS

MOST_BATCH = MOST_STEPS
DEFAULT_TRIES = 16
DEFAULT_SECONDS = 900.0


Ended = Literal["found", "refused", "tries", "time"]


class Trial(Description):
    """One size that was tried."""

    size: PositiveInt
    """The batch."""

    device_used_bytes: NonNegativeInt | None = None
    """What the process took of the GPU; None where it did not come so far."""

    problem: str | None = None
    """Why the size does not fit; None where it does."""

    is_refused: bool = False
    """The program fails with that size for another reason than memory."""

    seconds: NonNegativeFloat = 0.0
    """How long it took."""

    @property
    def fits(self) -> bool:
        """Say whether it ran within the budget."""
        return self.problem is None

    @property
    def outcome(self) -> Outcome:
        """Return what came of it, for the search."""
        return Outcome.REFUSED if self.is_refused else Outcome.FITS if self.fits else Outcome.TOO_LARGE


class FoundBatch(Description):
    """What the trials found."""

    schema_version: int = 1
    """Of this format."""

    name: str
    """The value that was varied, as the program calls it."""

    size: PositiveInt | None
    """The largest that ran within the budget; None where none did."""

    start: PositiveInt
    """Where the search began."""

    start_is_from: str
    """Who said so."""

    ended: Ended
    """Why the search ended: the next larger size does not fit; or the program does not take it, or it was out of tries or of time, and a
    larger one may fit."""

    budget_bytes: NonNegativeInt
    """What the process may take of the GPU: what is free, less the margin."""

    gpu_name: str
    """The GPU."""

    trials: tuple[Trial, ...]
    """In their order."""


class _OutOfError(Exception):
    """No trial may begin any more."""

    def __init__(self, what: Literal["tries", "time"]) -> None:
        super().__init__(what)
        self.what: Literal["tries", "time"] = what


def largest_by_trial(
    run: Callable[[int], Trial],
    guess: Fits,
    *,
    leaps: bool = False,
    unit: int = 1,
    refused: Collection[int] = (),
    most_tries: int = DEFAULT_TRIES,
    most_seconds: float = DEFAULT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Trial], Ended]:
    """
    Run trials until one size fits and the next does not; return them, and why they ended.

    *guess* says whether a size fits, and may learn from the trials: the first is where it puts the end; with *leaps* the others as well,
    however far that is. *unit*: sizes are multiples of it. *refused*: sizes that the program is known to refuse. No trial begins after
    *most_seconds*. A size is tried once.
    """
    trials: list[Trial] = []
    begin = clock()

    def ask(size: int) -> Outcome:
        if len(trials) == most_tries:
            raise _OutOfError("tries")
        if clock() - begin >= most_seconds:
            raise _OutOfError("time")
        trials.append(run(size))
        return trials[-1].outcome

    try:
        found = largest_accepted(ask, high=MOST_BATCH, guess=guess, leaps=leaps, unit=unit, known=dict.fromkeys(refused, Outcome.REFUSED))
    except _OutOfError as end:
        return trials, end.what
    return trials, "refused" if found.is_refused_beyond else "found"


def largest_that_ran(trials: list[Trial]) -> int | None:
    """Return the largest size of *trials* that fits, below every one that was too large: a larger that runs by luck is none to rely on."""
    failed = min((trial.size for trial in trials if trial.outcome is Outcome.TOO_LARGE), default=MOST_BATCH + 1)
    return max((trial.size for trial in trials if trial.fits and trial.size < failed), default=None)
