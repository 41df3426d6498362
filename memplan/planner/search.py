"""Searching for the largest value that fits."""

from __future__ import annotations

from collections.abc import Callable

Fits = Callable[[int], bool]


def largest_fitting(fits: Fits, *, low: int, high: int, rough: Fits | None = None) -> int | None:
    """
    Return the largest value in ``[low, high]`` that fits, or None.

    *fits* should be monotone: once a value does not fit, no larger one does; where it is not, the answer is a value that fits, below one
    that does not. Asks about 2 log2 of the answer: cheap where small values decide, and never far above what fits.

    *rough* asks something cheap that mostly says the same, and may learn from what *fits* has said: each next value is where it thinks that
    the end is, but no more than twice as far from *low* as what is known to fit.
    """
    if low > high:
        return None
    if rough is None:
        return _doubled(fits, low, high)
    good, bad = low - 1, high + 1
    above = below = 0  # how often in a row a value next to the end was not the end: then the way is doubled
    while bad - good > 1:
        furthest = bad - 1 if good < low else min(bad - 1, good + (good - low) + 1)
        tried = _end_of(rough, good + 1, furthest)
        is_next, is_last = tried == good + 1 > low, tried == bad - 1 < high
        if is_next:
            tried = min(bad - 1, good + 2**above)
        elif is_last:
            tried = max(good + 1, bad - 2**below)
        if fits(tried):
            good, above, below = tried, above + is_next, 0
        else:
            bad, above, below = tried, 0, below + is_last
    return good if good >= low else None


def _end_of(rough: Fits, low: int, high: int) -> int:
    """Return where *rough* thinks that the end is in ``[low, high]``: the largest value that fits, or the smallest where none does."""
    if rough(high):
        return high
    found = _doubled(rough, low, high)
    return low if found is None else found


def _doubled(fits: Fits, low: int, high: int) -> int | None:
    """Return the largest value that fits, with steps that double."""
    if not fits(low):
        return None
    good, step = low, 1
    while good < high:
        tried = min(high, good + step)
        if not fits(tried):
            return _between(fits, good, tried)
        good, step = tried, step * 2
    return good


def _between(fits: Fits, good: int, bad: int) -> int:
    """Return the largest value that fits between one that does and one that does not."""
    while good + 1 < bad:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
