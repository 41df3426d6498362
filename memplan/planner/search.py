"""Searching for the largest value that fits."""

from __future__ import annotations

from collections.abc import Callable

Fits = Callable[[int], bool]


def largest_fitting(fits: Fits, *, low: int, high: int, rough: Fits | None = None) -> int | None:
    """
    Return the largest value in ``[low, high]`` that fits, or None.

    *fits* must be monotone: once a value does not fit, no larger one does. Asks about 2 log2 of the answer: cheap where small values
    decide, and never far above what fits. *rough* asks something cheap that mostly says the same: the search begins at its answer, and asks
    *fits* about 2 log2 of how far that was off.
    """
    if low > high:
        return None
    begin = low if rough is None else largest_fitting(rough, low=low, high=high) or low
    if not fits(begin):
        return None if begin == low else _below(fits, low, begin)
    good, step = begin, 1
    while good < high:
        tried = min(high, good + step)
        if not fits(tried):
            return _between(fits, good, tried)
        good, step = tried, step * 2
    return good


def _below(fits: Fits, low: int, bad: int) -> int | None:
    """Return the largest value from *low* on, below *bad*, that fits."""
    step = 1
    while bad > low:
        tried = max(low, bad - step)
        if fits(tried):
            return _between(fits, tried, bad)
        bad, step = tried, step * 2
    return None


def _between(fits: Fits, good: int, bad: int) -> int:
    """Return the largest value that fits between one that does and one that does not."""
    while good + 1 < bad:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
