"""
The parametric trace: the requests of a program at every size of a range, from rehearsals at a few.

Where two sizes ask for memory in the same sequence, each allocation is a polynomial in what was varied: constant for a weight, linear
in the batch for an activation, quadratic where a batch meets itself in a similarity matrix. The coefficients are found exactly, in
fractions, from the sizes that were rehearsed. Libraries and kernels change the sequence at thresholds; so a parametric trace holds between
sizes that share one, and nothing is said beyond them.

Two kinds of size are no polynomials. Temporaries of reductions grow up to what fills the GPU's multiprocessors and no further: a line with
a limit, which is found too. And kernels round up: such sizes are taken from the straight line between two neighbours, and how far the
others are from that line is the doubt that remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement, islice
from math import ceil, prod
from typing import TypeAlias

from memplan.traces.requests import Requests

Point: TypeAlias = tuple[int, ...]
"""A value of each variable."""

Monomial: TypeAlias = tuple[int, ...]
"""The variables that are multiplied, by number: () is 1, (0, 0) is the first squared."""

MOST_DEGREE = 2
"""A batch meets itself at most."""

NUM_WITNESSES = 3
"""Points besides the two ends of a stretch that bear it out, where there are so many."""

MOST_DOUBT = 0.0005
"""Of the peak, what may remain in doubt where something is worked out."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of monomials with exact coefficients, up to a limit."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    limit: int | None = None
    """Where it ends to grow."""

    def __call__(self, point: Point) -> Fraction:
        """Return the value at *point*."""
        value = sum((factor * prod(point[number] for number in monomial) for monomial, factor in self.terms), Fraction(0))
        return value if self.limit is None else min(value, Fraction(self.limit))

    @property
    def num_coefficients(self) -> int:
        """What had to be found: more points than this bear it out."""
        return len(self.terms) + (self.limit is not None)


@dataclass(frozen=True)
class ParametricTrace:
    """Requests in one sequence, with sizes that depend on the point."""

    points: tuple[Point, ...]
    """Where it was rehearsed."""

    requests: Requests
    """Those of the first point: the sequence is that of all."""

    kinds: Sequence[int]
    """Of each allocation, the number of its kind: allocations that were equal at every point are of one."""

    sizes: tuple[tuple[int, ...], ...]
    """Of each kind, the bytes at each point."""

    polynomials: tuple[Polynomial | None, ...]
    """Of each kind; None where no polynomial goes through all points."""

    @property
    def is_exact(self) -> bool:
        """Say whether every size is a polynomial that more points bear out than it has coefficients."""
        return all(polynomial is not None for polynomial in self.polynomials)

    @property
    def doubt_bytes(self) -> int:
        """How far sizes that are no polynomials are from the line through their ends, at the points between; 0 with no point between."""
        total = Fraction(0)
        for sizes, polynomial in zip(self.sizes, self.polynomials, strict=True):
            if polynomial is None:
                total += max(abs(Fraction(size) - self._on_line(sizes, point)) for size, point in zip(sizes, self.points, strict=True))
        return ceil(total)

    def sizes_at(self, point: Point) -> list[int]:
        """Return the bytes of each allocation at *point*: those rehearsed where it was, and never less than none."""
        if point in self.points:
            index = self.points.index(point)
            by_kind = [sizes[index] for sizes in self.sizes]
        else:
            by_kind = [self._size_at(kind, point) for kind in range(len(self.sizes))]
        return [by_kind[kind] for kind in self.kinds]

    def _size_at(self, kind: int, point: Point) -> int:
        polynomial = self.polynomials[kind]
        if polynomial is not None:
            value = polynomial(point)
        else:
            below = max((known for known in self.points if known <= point), default=self.points[0])
            above = min((known for known in self.points if known >= point), default=self.points[-1])
            value = self._on_line(self.sizes[kind], point, below, above)
        return max(0, ceil(value))

    def _on_line(self, sizes: Sequence[int], point: Point, first: Point | None = None, last: Point | None = None) -> Fraction:
        """Return what the straight line through *first* and *last* (the ends, where they are not given) has at *point*."""
        first, last = first or self.points[0], last or self.points[-1]
        begin, end = (sizes[self.points.index(known)] for known in (first, last))
        length = sum(abs(b - a) for a, b in zip(first, last, strict=True))
        way = sum(abs(b - a) for a, b in zip(first, point, strict=True))
        return Fraction(begin) + (Fraction(way, length) * (end - begin) if length else 0)


def fit(rehearsed: Mapping[Point, Requests]) -> ParametricTrace | None:
    """
    Return the parametric trace through the *rehearsed* points; None where their sequences are not the same.

    Of the polynomials that go through all points, each kind of allocation gets the one of the lowest degree and fewest variables.
    """
    points = tuple(sorted(rehearsed))
    all_requests = [rehearsed[point] for point in points]
    if len({requests.sequence for requests in all_requests}) != 1:
        return None
    numbers: dict[tuple[int, ...], int] = {}
    kinds = [numbers.setdefault(sizes, len(numbers)) for sizes in zip(*(requests.sizes for requests in all_requests), strict=True)]
    polynomials = tuple(_borne_out(points, sizes) for sizes in numbers)
    return ParametricTrace(points, all_requests[0], kinds, tuple(numbers), polynomials)


def _borne_out(points: Sequence[Point], sizes: Sequence[int]) -> Polynomial | None:
    """Return the simplest polynomial through all points that has fewer coefficients than there are points."""
    found = _simplest(points, sizes) or _limited(points, sizes)
    return found if found is not None and found.num_coefficients < len(points) else None


def _simplest(points: Sequence[Point], sizes: Sequence[int]) -> Polynomial | None:
    for monomials in _bases(len(points[0])):
        if len(monomials) <= len(points):
            found = _through(points, sizes, monomials)
            if found is not None:
                return found
    return None


def _limited(points: Sequence[Point], sizes: Sequence[int]) -> Polynomial | None:
    """Return the polynomial through the points below the largest size that is no smaller at the others, with that size as its limit."""
    limit = max(sizes)
    below = [(point, size) for point, size in zip(points, sizes, strict=True) if size < limit]
    if not below:
        return None
    found = _simplest([point for point, _ in below], [size for _, size in below])
    if found is None or len(found.terms) > len(below) or any(found(point) < size for point, size in zip(points, sizes, strict=True)):
        return None
    return Polynomial(found.terms, limit)


def _bases(num_variables: int) -> Iterator[tuple[Monomial, ...]]:
    """Yield sets of monomials, the simplest first: constant; one variable; products; and so on with all that come before."""
    variables = range(num_variables)
    every = [monomial for degree in range(1, MOST_DEGREE + 1) for monomial in combinations_with_replacement(variables, degree)]
    yield ((),)
    for monomial in every:
        yield ((), monomial)
    for end in range(2, len(every) + 1):
        yield ((), *every[:end])


def _through(points: Sequence[Point], sizes: Sequence[int], monomials: Sequence[Monomial]) -> Polynomial | None:
    """Return the sum of *monomials* that has *sizes* at *points*, where there is one and only one."""
    rows = [
        [Fraction(prod(point[number] for number in monomial)) for monomial in monomials] + [Fraction(size)]
        for point, size in zip(points, sizes, strict=True)
    ]
    for column in range(len(monomials)):
        pivot = next((row for row in range(column, len(rows)) if rows[row][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for other in range(len(rows)):
            if other != column and rows[other][column]:
                factor = rows[other][column]
                rows[other] = [value - factor * own for value, own in zip(rows[other], rows[column], strict=True)]
    if any(row[-1] for row in rows[len(monomials) :]):
        return None
    return Polynomial(tuple((monomial, rows[index][-1]) for index, monomial in enumerate(monomials) if rows[index][-1]))


class Sweep:
    """
    Requests along one variable, rehearsed where they have to be.

    Between two rehearsed values with the same sequence everything is worked out; where the sequences differ the range is halved, down to
    neighbours if it has to be.
    """

    def __init__(self, rehearse: Callable[[int], Requests]) -> None:
        self._rehearse = rehearse
        self.rehearsed: dict[int, Requests] = {}
        """What was rehearsed, by value."""

    def at(self, value: int, *, low: int, high: int) -> tuple[Requests, Sequence[int]]:
        """Return the requests at *value*, which lies from *low* to *high*, and their sizes there."""
        while value not in self.rehearsed:
            below = max((known for known in self.rehearsed if low <= known < value), default=None)
            above = min((known for known in self.rehearsed if high >= known > value), default=None)
            if below is None or above is None:
                self.ask(low if below is None else high)
                continue
            trace = self._between(below, above)
            if trace is not None and trace.doubt_bytes <= MOST_DOUBT * self.rehearsed[below].peak_bytes and len(trace.points) > 2:
                return trace.requests, trace.sizes_at((value,))
            self.ask((below + above) // 2)
        found = self.rehearsed[value]
        return found, found.sizes

    def ask(self, value: int) -> Requests:
        """Return the requests at *value*, rehearsed if they have not been."""
        if value not in self.rehearsed:
            self.rehearsed[value] = self._rehearse(value)
        return self.rehearsed[value]

    def _between(self, below: int, above: int) -> ParametricTrace | None:
        """Return the trace through both and the nearest others with their sequence; None where the two differ."""
        sequence = self.rehearsed[below].sequence
        if self.rehearsed[above].sequence != sequence:
            return None
        others = (known for known in self._nearest((below + above) // 2) if known not in (below, above))
        witnesses = islice((known for known in others if self.rehearsed[known].sequence == sequence), NUM_WITNESSES)
        return fit({(known,): self.rehearsed[known] for known in (below, above, *witnesses)})

    def _nearest(self, value: int) -> list[int]:
        return sorted(self.rehearsed, key=lambda known: (abs(known - value), known))
