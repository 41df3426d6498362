"""
The largest batch by real trial: each size in a process that has used the card for nothing before.

The search begins where a plan or a rehearsal thinks that the end is, so that two trials mostly do: that size runs, and the next does not.
What it returns has run; a size that failed is never returned, and neither is one that nobody tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from memplan.description import Description

MOST_BATCH = 2**20
DEFAULT_TRIES = 16
DEFAULT_SECONDS = 900.0


Ended = Literal["found", "tries", "time"]


class Trial(Description):
    """One size that was tried."""

    size: PositiveInt
    """The batch."""

    device_used_bytes: NonNegativeInt | None = None
    """What the process took of the card; None where it did not come so far."""

    problem: str | None = None
    """Why the size does not fit; None where it does."""

    seconds: NonNegativeFloat = 0.0
    """How long it took."""

    @property
    def fits(self) -> bool:
        """Say whether it ran within the budget."""
        return self.problem is None


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
    """Why the search ended: the next larger size does not fit, or it was out of tries or of time, and a larger one may fit."""

    budget_bytes: NonNegativeInt
    """What the process may take of the card: what is free, less the margin."""

    card: str
    """The card."""

    trials: tuple[Trial, ...]
    """In their order."""


def largest_by_trial(
    run: Callable[[int], Trial],
    *,
    start: int,
    most_tries: int = DEFAULT_TRIES,
    most_seconds: float = DEFAULT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Trial], Ended]:
    """
    Run trials around *start* until one size fits and the next does not; return them, and why they ended.

    No trial begins after *most_seconds*. A size is tried once.
    """
    trials: list[Trial] = []
    begin = clock()
    good, bad, step = 0, MOST_BATCH + 1, 0
    size = min(max(1, start), MOST_BATCH)
    while bad - good > 1:
        if len(trials) == most_tries:
            return trials, "tries"
        if clock() - begin >= most_seconds:
            return trials, "time"
        trial = run(size)
        trials.append(trial)
        good, bad = (size, bad) if trial.fits else (good, size)
        step = max(1, 2 * step)
        if bad > MOST_BATCH:  # nothing has failed yet: further up, in steps that double
            size = min(good + step, MOST_BATCH)
        elif good == 0:  # nothing has run yet: further down
            size = max(bad - step, 1)
        else:
            size = (good + bad) // 2
    return trials, "found"


def largest_that_ran(trials: list[Trial]) -> int | None:
    """Return the largest size of *trials* that fits, below every one that does not: a larger that runs by luck is none to rely on."""
    failed = min((trial.size for trial in trials if not trial.fits), default=MOST_BATCH + 1)
    return max((trial.size for trial in trials if trial.fits and trial.size < failed), default=None)


def sizes_to_begin_with() -> Iterator[int]:
    """Yield the smallest powers of two: batch normalisation refuses a single sample, others what is no multiple of 8."""
    return (2**power for power in range(5))
