"""
What a program asked of the caching allocator, without what the allocator did about it.

The same requests can be put to another allocator: one with other settings, on a smaller GPU. They are also what two sizes of a program may
have in common (`parametric.py`).
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from memplan.traces.repeats import Stretch, stretches_in
from memplan.traces.trace import ALLOC, FREE, FREE_REQUESTED, OOM, SEGMENT_FREE, SEGMENT_UNMAP, MemoryTrace

EMPTY_CACHE = 0

_FIRST_BY_AGE = (2, 12)
"""The first PyTorch whose allocator orders blocks of a size by their age, and not by their addresses: seen by what it does."""


@dataclass(frozen=True)
class Requests:
    """Allocations and frees in their order."""

    order: Sequence[int]
    """n: the n-th allocation, from 1; -n: its block is free again; EMPTY_CACHE: cached segments are given back."""

    sizes: Sequence[int]
    """Bytes that each allocation asks for."""

    streams: Sequence[int]
    """The stream of each."""

    by_address: bool = False
    """The PyTorch that asked takes of two free blocks of a size the lower one, not that of the older segment."""

    @cached_property
    def sequence(self) -> str:
        """
        A digest that is equal where two programs ask in the same sequence, whatever the sizes.

        Frees that follow each other have no order: what is free afterwards is the same, and theirs varies from run to run (autocast's cache
        is hashed by address).
        """
        return hashlib.blake2b(self.sorted_order.tobytes() + array("q", self.streams).tobytes()).hexdigest()

    @cached_property
    def sorted_order(self) -> array[int]:
        """The order, with frees that follow each other sorted: for an allocator it is the same."""
        order, frees = array("q"), list[int]()
        for request in self.order:
            if request < 0:
                frees.append(request)
                continue
            if frees:
                order.extend(sorted(frees))
                frees.clear()
            order.append(request)
        order.extend(sorted(frees))
        return order

    def begins_with(self, other: Requests) -> bool:
        """Say whether *other*, up to its last allocation, is how these begin: the same sequence with the same sizes."""
        count = len(other.sizes)
        if list(self.sizes[:count]) != list(other.sizes) or list(self.streams[:count]) != list(other.streams):
            return False
        theirs = other.sorted_order[:]
        while theirs and theirs[-1] < 0:  # what is freed at its end may go on being freed here
            theirs.pop()
        return self.sorted_order[: len(theirs)] == theirs

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """Those of the sorted order that are repeated."""
        return stretches_in(self.sorted_order, self.sizes, self.streams)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that were asked for and not freed."""
        current = most = 0
        for request in self.order:
            if request > 0:
                current += self.sizes[request - 1]
                most = max(most, current)
            elif request < 0:
                current -= self.sizes[-request - 1]
        return most


@dataclass(frozen=True)
class Replayed:
    """How it went when requests were put to an allocator."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int
    gave_back: bool
    """Whether cached segments had to be given back before the program could go on: it is tight."""
    out_of_memory_at: int | None
    """The allocation (from 1) that could not be had, where the replay ended; None: it went through."""

    @property
    def fits(self) -> bool:
        """Say whether memory never ran out."""
        return self.out_of_memory_at is None


def requests_of(trace: MemoryTrace, *, live_before: Mapping[int, int] = MappingProxyType({}), torch: str | None = None) -> Requests:
    """
    Return what was asked for in *trace*, of the PyTorch with the version *torch*.

    Segments given back count as a request to empty the cache; so they are on a GPU that was never full (`replay_recorded` knows of full
    ones). *live_before* is what had been allocated when the trace began, by address: it has the first numbers, in the order of addresses.
    An allocation that failed is one that is never freed.
    """
    order, sizes, streams = array("q"), array("Q", [live_before[address] for address in sorted(live_before)]), array("Q")
    streams.extend(0 for _ in sizes)
    live = {address: number for number, address in enumerate(sorted(live_before), start=1)}
    is_giving_back = False
    for action, address, size, stream in zip(trace.actions, trace.addresses, trace.sizes, trace.streams, strict=True):
        if action in (SEGMENT_FREE, SEGMENT_UNMAP):
            if not is_giving_back:
                order.append(EMPTY_CACHE)
            is_giving_back = True
        elif action in (ALLOC, OOM):
            sizes.append(size)
            streams.append(stream)
            order.append(len(sizes))
            if action == ALLOC:
                live[address] = len(sizes)
        elif action == FREE:
            order.append(-live.pop(address))
        if action in (ALLOC, FREE, FREE_REQUESTED, OOM):
            is_giving_back = False
    return Requests(order, sizes, streams, by_address=torch is not None and breaks_ties_by_address(torch))


def breaks_ties_by_address(torch: str) -> bool:
    """Say whether that version of PyTorch takes the lower of two free blocks of a size; later ones take that of the older segment."""
    return tuple(map(int, re.findall(r"\d+", torch)[:2])) < _FIRST_BY_AGE
