"""
Searching for the largest size that fits: one search, whoever asks.

A question may cost a rehearsal or a run on a GPU, so a guess that costs nothing orders them; it never decides. A program may also refuse a
size for another reason than memory (a data set of 64, batches of eights, batch normalisation with a single sample). That is knowledge
too: a refused size is not asked about again, and tells which sizes the program takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

Fits = Callable[[int], bool]

MOST_POWER = 5
"""The largest power of two that is tried for the smallest size that a program takes."""


class Outcome(Enum):
    """What came of one size."""

    FITS = "fits"
    TOO_LARGE = "too large"
    """It ran out of memory, or took more than it may."""
    REFUSED = "refused"
    """The program does not take it, for another reason than memory."""


class Largest(NamedTuple):
    """What a search found."""

    size: int | None
    """The largest that fits; None where none does."""
    unit: int = 1
    """The program takes multiples of it."""
    smallest: int = 1
    """The smallest that the program takes, as far as was seen; whether it fits or not."""
    is_refused_beyond: bool = False
    """The next larger size was refused, and not too large: a larger one that the program takes may fit."""


def largest_accepted(
    ask: Callable[[int], Outcome],
    *,
    low: int = 1,
    high: int,
    guess: Fits | None = None,
    leaps: bool = False,
    unit: int = 1,
    known: Mapping[int, Outcome] = MappingProxyType({}),
) -> Largest:
    """
    Return the largest size in ``[low, high]`` that fits, of those that the program takes.

    *ask* is called at most once for a size, and not for those in *known*. *guess* and *leaps* are those of `largest_fitting`. *unit*: the
    program takes multiples of it, as far as is known before; where it refuses a size, the smallest that it takes says more.
    """
    search = _AcceptedSizes(ask, low, high, unit, dict(known), leaps=leaps)
    found = search.within(low, high, guess)
    while found is not None and search.is_refused(found + search.unit):
        # Some programs take powers of two, or what divides a number: the double of what fits is worth one question.
        if not search.takes_double(found):
            return Largest(found, search.unit, search.smallest, is_refused_beyond=True)
        found = search.within(2 * found, high, guess)
    return Largest(found, search.unit, search.smallest)


class _RefusedError(Exception):
    """A *size* was refused, and nobody knows yet which ones are not."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class _AcceptedSizes:
    """Asks about sizes, and learns which ones a program takes."""

    def __init__(self, ask: Callable[[int], Outcome], low: int, high: int, unit: int, known: dict[int, Outcome], *, leaps: bool) -> None:
        self._ask, self._low, self._high, self._known, self._leaps = ask, low, high, known, leaps
        self.unit = unit
        self.smallest = low
        self._is_settled = Outcome.REFUSED in known.values()
        """Which sizes the program takes has been looked into."""
        self._power: int | None = None
        """The power of two that was asked about before that."""

    def outcome(self, size: int) -> Outcome:
        if size not in self._known:
            self._known[size] = self._ask(size)
        return self._known[size]

    def is_refused(self, size: int) -> bool:
        """Say whether *size* is known to be refused."""
        return self._known.get(size) is Outcome.REFUSED

    def within(self, low: int, high: int, guess: Fits | None) -> int | None:
        """Return the largest size from *low* to *high* that fits; what is refused counts as too large."""
        try:
            return self._within_units(low, high, guess)
        except _RefusedError as refused:
            least = self._power_of_what_is_taken(refused.size)
            if least is None:
                unit, least = self.unit, self._settle()
                if self.unit == unit:
                    least = self._largest_double(least, refused.size)
            return self._within_units(max(low, least), high, guess)

    def _within_units(self, low: int, high: int, guess: Fits | None) -> int | None:
        unit = self.unit
        found = largest_fitting(
            lambda count: self._fits(count * unit),
            low=-(-low // unit),
            high=high // unit,
            guess=None if guess is None else lambda count: guess(count * unit),
            leaps=self._leaps,
        )
        return None if found is None else found * unit

    def _fits(self, size: int) -> bool:
        if self.outcome(size) is Outcome.REFUSED and not self._is_settled:
            raise _RefusedError(size)
        return self.outcome(size) is Outcome.FITS

    def _power_of_what_is_taken(self, refused: int) -> int | None:
        """
        Return the power of two below the size that was *refused*, where the program took another one and this one fits, and no larger one
        is known to.

        None where half as much again is taken too: what the program takes is told by the smallest that it takes. Else that one is not asked
        about: a program that cuts a batch into parts runs very many of them then. The answer is that of `_largest_double`.
        """
        size = 1 << ((refused - 1).bit_length() - 1) if refused > 1 else 0
        more = size + size // 2
        is_likely = any(known > 1 and known & (known - 1) == 0 and how is not Outcome.REFUSED for known, how in self._known.items())
        is_new = size >= max(2, self._low) and more <= self._high and size > self._largest_known_fit()
        if not is_likely or not is_new or self.outcome(size) is not Outcome.FITS:
            return None
        self._power = size
        self._is_settled = True
        if not self._refuses(more) or not self._refuses(size + 1):
            return None
        self.unit = size
        return size

    def _settle(self) -> int:
        """Find the smallest size that the program takes, and whether it is what all sizes are multiples of; return it."""
        self._is_settled = True
        start = -(-self._low // self.unit) * self.unit
        powers = (start * 2**power for power in range(MOST_POWER + 1) if start * 2**power <= self._high)
        least = next((size for size in powers if not self._refuses(size)), None)
        if least is None:
            least = self._half_of_what_is_taken() or start
        if least > start and least < self._high and self._refuses(least + self.unit):
            self.unit = least
        self.smallest = least
        return least

    def _largest_double(self, least: int, refused: int) -> int:
        """
        Return *least*, doubled as often as it is below the size that was *refused*, where that fits and is more than any that is known to.

        Programs that take powers of two, or what divides a number, take it. Where they do not take the next size, they take its multiples,
        or those of its half.
        """
        size = least
        while 2 * size < refused:
            size *= 2
        if size <= self._largest_known_fit() or self.outcome(size) is not Outcome.FITS:
            return least
        if size < self._high and self._refuses(size + 1):
            self.unit = size
            more = size + size // 2
            if size % 2 == 0 and more < refused and self.outcome(more) is Outcome.FITS:
                self.unit, size = size // 2, more
        return size

    def _largest_known_fit(self) -> int:
        fitting = (known for known, how in self._known.items() if how is Outcome.FITS and known != self._power)
        return max(fitting, default=0)

    def _refuses(self, size: int) -> bool:
        return self.outcome(size) is Outcome.REFUSED

    def _half_of_what_is_taken(self) -> int | None:
        """Return the smallest size that halving one leads to which the program took: multiples of 6 have no power of two among them."""
        taken = [size for size, how in self._known.items() if how is not Outcome.REFUSED]
        least = min(taken, default=None)
        while least is not None and least % 2 == 0 and not self._refuses(least // 2):
            least //= 2
        return least

    def takes_double(self, size: int) -> bool:
        """Say whether the double of *size* fits; from there on sizes are multiples of *size*."""
        if 2 * size > self._high or any(known <= 2 * size and how is Outcome.TOO_LARGE for known, how in self._known.items()):
            return False
        if self.outcome(2 * size) is not Outcome.FITS:
            return False
        self.unit = size
        return True


def largest_fitting(fits: Fits, *, low: int, high: int, guess: Fits | None = None, leaps: bool = False) -> int | None:
    """
    Return the largest value in ``[low, high]`` that fits, or None.

    *fits* should be monotone: once a value does not fit, no larger one does; where it is not, the answer is a value that fits, below one
    that does not. Asks about 2 log2 of the answer: cheap where small values decide, and never far above what fits.

    *guess* says without cost what *fits* would mostly say, and may learn from what it has said: each next value is where it puts the end,
    but no more than twice as far from *low* as what is known to fit; with *leaps*, which is for a guess that is nearly sure, at once.
    """
    if low > high:
        return None
    if guess is None:
        return _doubled(fits, low, high)
    good, bad = low - 1, high + 1
    ends: list[tuple[int, int]] = []  # what good and bad were, from question to question
    above = below = 0  # how often in a row a value next to the end was not the end, as the guess may say once: then the way is doubled
    was_next = False
    patience, stride, fall = 2, 0, 0  # how many questions in a row a guess may creep; how far up and down was gone then
    while bad - good > 1:
        furthest = bad - 1 if good < low or leaps else min(bad - 1, good + (good - low) + 1)
        tried = _end_of(guess, good + 1, furthest)
        is_next, is_last = tried == good + 1 > low, tried == bad - 1 < high
        if is_next:
            tried = min(bad - 1, good + 2**above)
        elif is_last:
            tried = max(good + 1, bad - 2**below)
        if leaps and len(ends) > 2 and good >= low and guess(good + 1):  # where the guess creeps: half of the way, or strides that double
            good_before, bad_before = ends[-patience]
            if bad <= high and 2 * (bad - good) > bad_before - good_before:
                middle = (good + bad) // 2
                if good == good_before:  # it creeps down: the end is probably near
                    fall = 2 * max(fall, bad_before - bad)
                    middle = max(middle, min(tried, bad - fall))
                tried, patience = middle, 1
            elif bad > high and good - low + 1 < 2 * (good_before - low + 1):
                stride = 2 * max(stride, good - ends[-1][0])
                tried, patience = max(tried, min(high, good + stride)), 1
        ends.append((good, bad))
        surprises = is_next and (was_next or not guess(tried))  # what it says before it may learn from the answer
        if fits(tried):
            good, above, below = tried, above + surprises if is_next else 0, 0
        else:
            bad, above, below = tried, 0, below + is_last
        was_next = is_next
    return good if good >= low else None


def _end_of(guess: Fits, low: int, high: int) -> int:
    """Return where *guess* puts the end in ``[low, high]``: the largest value that fits, or the smallest where none does."""
    if guess(high):
        return high
    found = _doubled(guess, low, high)
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
