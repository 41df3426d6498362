"""
Stretches of what a program asks of the allocator that are the same again and again: the batches of an evaluation, steps that are alike.

What comes of one, an allocator need be asked only until a round has left it as an earlier one had (`allocator/replay.py`). A request is
known here by what makes it the same in another round: an allocation by its bytes and stream, a free by how many allocations ago its block
was made.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

LEAST_ROUNDS = 4
"""Of fewer, hardly any are left when an allocator has come back to the same state."""

LEAST_SHARE = 1 / 16
"""Of all requests, what a stretch has at least: the layers of a model are alike as well, but inside of a round, which is what is wanted."""

_WORD = 64
"""Requests by which a place is known again."""

_ANCHORS = 1 / 32
"""Of all requests, those at which it is looked: the ones whose kind is seldom, as there are a few of in each round."""


class Stretch(NamedTuple):
    """Rounds of requests that are the same."""

    begin: int
    """Where it begins in the order of the requests."""
    length: int
    """Requests of one round."""
    num_rounds: int
    first_allocation: int
    """Allocations before it."""
    num_allocations: int
    """Of one round."""

    @property
    def end(self) -> int:
        """Where what comes behind it begins."""
        return self.begin + self.length * self.num_rounds

    def repeats(self, sizes: Sequence[int]) -> bool:
        """Say whether its allocations are the same in every round where they have *sizes*, those of all allocations of the program."""
        first, count = self.first_allocation, self.num_allocations
        last = first + count * self.num_rounds
        return bool(sizes[first : last - count] == sizes[first + count : last])


def stretches_in(order: Sequence[int], sizes: Sequence[int], streams: Sequence[int]) -> tuple[Stretch, ...]:
    """
    Return the stretches of *order* that are repeated, one behind the other; *sizes* and *streams* are those of its allocations.

    In *order* n stands for the n-th allocation, -n for its free, 0 for anything else. Frees that follow each other have to be in an order
    that does not hang on the round, as that of their numbers.
    """
    kinds = _kinds(order, sizes, streams)
    least = max(1, int(len(kinds) * LEAST_SHARE))
    text, width = kinds.tobytes(), kinds.itemsize
    found: list[Stretch] = []
    seen: dict[bytes, int] = {}
    behind = 0
    for place in _anchors(kinds):
        if place < behind:
            continue
        word = text[place * width : (place + _WORD) * width]
        before = seen.get(word)
        seen[word] = place
        if before is None or before < behind:
            continue
        length = place - before
        num_rounds = (length + _num_alike(text, before * width, place * width) // width) // length
        if num_rounds >= LEAST_ROUNDS and length * num_rounds >= least:
            allocations = (sum(map((0).__lt__, islice(order, *part))) for part in ((before,), (before, place)))
            found.append(Stretch(before, length, num_rounds, *allocations))
            behind = found[-1].end
    return tuple(found)


def _kinds(order: Sequence[int], sizes: Sequence[int], streams: Sequence[int]) -> array[int]:
    """Return what each request is, by which it is known in another round: of frees the number of allocations since, below zero."""
    numbers: dict[tuple[int, int], int] = {}
    of_allocations = [numbers.setdefault(each, len(numbers) + 1) for each in zip(sizes, streams, strict=True)]
    kinds, count = array("q"), 0
    add = kinds.append
    for request in order:
        if request > 0:
            count = request
            add(of_allocations[request - 1])
        else:
            add(-request - count - 1 if request else 0)
    return kinds


def _anchors(kinds: Sequence[int]) -> Iterator[int]:
    """Yield the places of the most seldom kinds that are there often enough to be in every round of a stretch."""
    seldom, total = set[int](), 0
    for kind, times in sorted(Counter(kinds).items(), key=lambda item: item[1]):
        if times < LEAST_ROUNDS:
            continue
        total += times
        if seldom and total > len(kinds) * _ANCHORS:
            break
        seldom.add(kind)
    return (place for place, kind in enumerate(kinds) if kind in seldom)


def _num_alike(text: bytes, first: int, second: int) -> int:
    """Return how many bytes from *first* on are those from *second* on, which lies behind it."""
    alike, step = 0, 1 << 12
    while text[first + alike : first + alike + step] == (other := text[second + alike : second + alike + step]) and other:
        alike += len(other)
        step *= 2
    while step:
        other = text[second + alike : second + alike + step]
        if other and text[first + alike : first + alike + len(other)] == other:
            alike += len(other)
        step //= 2
    return alike
