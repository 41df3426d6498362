"""Searching for the largest value that fits."""

from __future__ import annotations

from collections.abc import Callable


def largest_fitting(fits: Callable[[int], bool], *, low: int, high: int) -> int | None:
    """
    Return the largest value in ``[low, high]`` that fits, or None.

    *fits* must be monotone: once a value does not fit, no larger one does. Asks about 2 log2 of the answer: cheap where small values
    decide, and never far above what fits.
    """
    if low > high or not fits(low):
        return None
    good, step = low, 1
    while good < high:
        tried = min(high, good + step)
        if not fits(tried):
            high = tried - 1
            break
        good, step = tried, step * 2
    while good < high:
        middle = (good + high + 1) // 2
        if fits(middle):
            good = middle
        else:
            high = middle - 1
    return good
