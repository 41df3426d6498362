"""Quick guesses: a peak at a size that nobody has run, from sizes that were."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeVar

from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.traces.requests import Requests

_Phase = TypeVar("_Phase")

LEAST_DISTANCE = 1 / 8
"""Share of a size by which another has to be apart for the line through both: peaks rise in steps of segments, and neighbours share one."""


class PeakLine:
    """
    Peaks by size, as if they were a straight line through the nearest sizes whose peaks are known.

    A guess, to order what is tried; it never decides.
    """

    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        self._known = dict(known or {})

    def learn(self, size: int, peak_bytes: int) -> None:
        """Take in the peak of a size that was run."""
        self._known[size] = peak_bytes

    @property
    def known(self) -> Mapping[int, int]:
        """Return the peaks that are known, by size."""
        return self._known

    def at(self, size: int) -> int | None:
        """
        Return the bytes of the peak at *size*; None where fewer than two sizes are known, or the larger one takes less.

        Between two such sizes lies a threshold of some kernel or library.
        """
        if size in self._known:
            return self._known[size]
        pair = line_through(self._known, size)
        return None if pair is None else pair.at(size, self._known[pair.low], self._known[pair.high])


class Line(NamedTuple):
    """The two sizes that a straight line goes through."""

    low: int
    high: int

    def at(self, size: int, low_bytes: int, high_bytes: int) -> int | None:
        """Return the bytes at *size*, *low_bytes* and *high_bytes* those of the two; None where the larger one takes less."""
        rise = high_bytes - low_bytes
        return None if rise < 0 else max(0, low_bytes + rise * (size - self.low) // (self.high - self.low))


def line_through(known: Collection[int], size: int) -> Line | None:
    """
    Return the two of the *known* sizes whose line says most of *size*; None where there are fewer.

    The two nearest that are apart; where these are further from *size* than from each other, and it is between others, the two around it.
    """
    by_distance = sorted(known, key=lambda other: (abs(other - size), other))
    if len(by_distance) < 2:
        return None
    nearest, *others = by_distance
    apart = [other for other in others if abs(other - nearest) >= LEAST_DISTANCE * nearest]
    other = apart[0] if apart else max(others, key=lambda known: abs(known - nearest))
    below, above = [each for each in known if each < size], [each for each in known if each > size]
    if below and above and abs(size - nearest) > abs(nearest - other):
        return Line(max(below), min(above))
    return Line(*sorted((nearest, other)))


def peak_of_phases(line: Line, low: Mapping[_Phase, int], high: Mapping[_Phase, int], *, size: int) -> int | None:
    """
    Return the bytes of the highest phase at *size*, each on its own *line* from what it has in *low* to what it has in *high*.

    The phase that is highest in small steps, as the optimizer's, is seldom that of a large one. None where no phase is in both.
    """
    peaks = (line.at(size, low[phase], high[phase]) for phase in low.keys() & high.keys())
    return max((peak for peak in peaks if peak is not None), default=None)


def extrapolated_peak(nearest: Requests, other: Requests, *, share: float, settings: str) -> int:
    """
    Return the bytes that are reserved at most where each allocation is on the straight line from *nearest* (share 0) to *other* (share 1).

    Both ask in the same sequence; *settings* are the allocator's. A guess, to order what is tried; it never decides.
    """
    from memplan.allocator.config import read_settings  # noqa: PLC0415  (only where something is rehearsed)
    from memplan.allocator.replay import replay  # noqa: PLC0415
    from memplan.allocator.simulator import CachingAllocator, Card  # noqa: PLC0415

    sizes = [max(0, round(size + share * (beyond - size))) for size, beyond in zip(nearest.sizes, other.sizes, strict=True)]
    allocator = CachingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES), read_settings(settings))
    return replay(nearest, allocator, sizes=sizes).peak_reserved_bytes
