"""Requests put to the simulated allocator: what a program would have reserved with other settings, or on another GPU."""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from memplan.allocator.blocks import Block
from memplan.allocator.config import read_settings
from memplan.allocator.simulator import CachingAllocator, Card, DivergedError, OutOfMemoryError
from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.traces.repeats import Stretch
from memplan.traces.requests import EMPTY_CACHE, Replayed, Requests, requests_of
from memplan.traces.snapshot import Snapshot
from memplan.traces.trace import ACTIONS, SEGMENT_ALLOC


def replay(requests: Requests, allocator: CachingAllocator, *, sizes: Sequence[int] | None = None) -> Replayed:
    """
    Put *requests*, with other *sizes* where they are given, to *allocator*, until they end or memory runs out.

    They are those of a GPU that was never full: where one asks to empty the cache, the program did. Where they repeat themselves, they are
    put until a round has left the allocator as an earlier one had: all that follow would do the same.
    """
    if requests.by_address:
        allocator.card.break_ties_by_address()
    run = _Replay(requests, allocator, requests.sizes if sizes is None else sizes)
    with _without_collector():
        run.to_end()
    given_back = sum(event.action in ("segment_free", "segment_unmap") for event in allocator.events)
    return Replayed(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_alloc_retries=allocator.num_alloc_retries,
        gave_back=given_back > run.num_emptied,
        out_of_memory_at=run.failed or None,
    )


def replay_by_default(requests: Requests, *, capacity_bytes: int = UNLIMITED_BYTES, sizes: Sequence[int] | None = None) -> Replayed:
    """Put *requests*, with other *sizes* where they are given, to an allocator with PyTorch's defaults that can have *capacity_bytes*."""
    return replay(requests, CachingAllocator(Card(capacity_bytes, capacity_bytes)), sizes=sizes)


CAPACITY_EXACTNESS = 1 / 64
"""Of what is known to be enough, how exactly the least is found."""


def least_capacity(requests: Requests, *, at_least: int, enough: int) -> int:
    """
    Return about the fewest bytes, from *at_least* to what is known to be *enough*, with which *requests* go through.

    With PyTorch's defaults, by which cached memory is released as often as need be.
    """
    if replay_by_default(requests, capacity_bytes=at_least).fits:
        return at_least
    too_few, exactness = at_least, enough * CAPACITY_EXACTNESS
    while enough - too_few > exactness:
        middle = (too_few + enough) // 2
        if replay_by_default(requests, capacity_bytes=middle).fits:
            enough = middle
        else:
            too_few = middle
    return enough


MOST_COMPARED_ROUNDS = 16
"""Rounds of a stretch after which an allocator that is never as it was is not compared any more."""


class _Replay:
    """Requests that are put to an allocator."""

    def __init__(self, requests: Requests, allocator: CachingAllocator, sizes: Sequence[int]) -> None:
        self._requests = requests
        self._allocator = allocator
        self._sizes = sizes
        self._blocks: list[Block | None] = [None] * (len(sizes) + 1)
        self.num_emptied = 0
        """Segments that were given back because the program asked for it."""
        self.failed = 0
        """The allocation that could not be had."""

    def to_end(self) -> None:
        """Put all of them, or those up to the one for which there is no memory."""
        done = 0
        for stretch in self._requests.stretches:
            if self._put(done, stretch.begin) and stretch.repeats(self._sizes) and not self._allocator.goes_by_time:
                self._put_rounds(stretch)
                done = stretch.end
            else:
                done = stretch.begin
        self._put(done, len(self._requests.sorted_order))

    def _put(self, begin: int, end: int) -> bool:
        """Put the requests from *begin* to *end*; say whether memory has not run out."""
        if self.failed:
            return False
        allocator, blocks, sizes, streams = self._allocator, self._blocks, self._sizes, self._requests.streams
        malloc, free = allocator.malloc, allocator.free
        try:
            for request in self._requests.sorted_order[begin:end]:
                if request > 0:
                    blocks[request] = malloc(sizes[request - 1], streams[request - 1])
                elif request < 0:
                    block = blocks[-request]
                    assert block is not None
                    free(block)
                    blocks[-request] = None
                else:
                    before = len(allocator.events)
                    allocator.empty_cache()
                    self.num_emptied += len(allocator.events) - before
        except OutOfMemoryError:
            self.failed = request
        return not self.failed

    def _put_rounds(self, stretch: Stretch) -> None:
        """Put rounds of *stretch* until one leaves all as an earlier one did: from there on they go round in a circle."""
        states: list[tuple[object, ...]] = []
        number = passed = 0
        while number < min(stretch.num_rounds, MOST_COMPARED_ROUNDS) and not passed:
            begin = stretch.begin + number * stretch.length
            if not self._put(begin, begin + stretch.length):
                return
            number += 1
            last = stretch.first_allocation + number * stretch.num_allocations
            states.append((self._allocator.state(), self._alive(stretch.first_allocation, last)))
            circle = len(states) - 1 - states.index(states[-1])
            if circle:
                passed = (stretch.num_rounds - number) // circle * circle
                self._pass(stretch, last, more=passed * stretch.num_allocations)
        self._put(stretch.begin + (number + passed) * stretch.length, stretch.end)

    def _alive(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return which of the allocations behind *first* up to *last* are alive: how long ago each was made, and its block."""
        return [(last - number, block.address, block.size) for number, block in self._numbered(first, last)]

    def _pass(self, stretch: Stretch, last: int, *, more: int) -> None:
        """Take *more* allocations behind *last* for put: what is alive of *stretch* then is what its last rounds have made."""
        for number, block in reversed(self._numbered(stretch.first_allocation, last)):
            self._blocks[number], self._blocks[number + more] = None, block

    def _numbered(self, first: int, last: int) -> list[tuple[int, Block]]:
        numbers = range(first + 1, last + 1)
        return [(number, block) for number, block in zip(numbers, self._blocks[first + 1 : last + 1], strict=True) if block is not None]


def replay_recorded(recording: Snapshot, allocator: CachingAllocator) -> None:
    """
    Put what *recording* holds to *allocator*, from the state in which it began; failures happen again, and it goes on after them.

    A real GPU may have been full: segments that were given back just before an allocation for which there is no room are given back by
    that allocation, others by the program.
    """
    requests = requests_of(recording.trace, live_before=recording.live)
    order, blocks = requests.order, _restored(recording, allocator)
    for position, request in enumerate(order):
        if request == EMPTY_CACHE:
            following = order[position + 1] if position + 1 < len(order) else 0
            if following <= 0 or allocator.has_room(requests.sizes[following - 1], requests.streams[following - 1]):
                allocator.empty_cache()
        elif request < 0:
            freed = blocks.pop(-request, None)
            if freed is not None:  # None: it could not be had here
                allocator.free(freed)
        else:
            try:
                blocks[request] = allocator.malloc(requests.sizes[request - 1], requests.streams[request - 1])
            except OutOfMemoryError:
                continue


def reproduces(recording: Snapshot) -> CachingAllocator | None:
    """
    Return an allocator that did the same with its segments as the recorded one, on a GPU that was never full; None where it did not.

    A snapshot does not say which PyTorch made it, and so which of two blocks of a size was taken: both ways are tried.
    """
    segment_actions = {letter: name for name, letter in ACTIONS.items() if name.startswith("segment")}
    trace = recording.trace
    recorded = [
        (segment_actions[action], size, stream)
        for action, size, stream in zip(trace.actions, trace.sizes, trace.streams, strict=True)
        if action in segment_actions
    ]
    places = [address for action, address in zip(trace.actions, trace.addresses, strict=True) if action == SEGMENT_ALLOC]
    for where in (places, []):
        allocator = CachingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES, places=where), read_settings(recording.settings))
        with suppress(DivergedError):
            replay_recorded(recording, allocator)
        simulated = [(event.action, event.size_bytes, event.stream) for event in allocator.events[len(recording.segments) :]]
        if simulated == recorded:
            return allocator
    return None


def what_if(recording: Snapshot, allocator: CachingAllocator) -> Replayed:
    """
    Return how the recorded program goes with *allocator*, which has other settings, or another GPU.

    What was there when the recording began is allocated first, in the order of its addresses: where it would have come to lie nobody knows.
    """
    requests = requests_of(recording.trace, live_before=recording.live)
    begins = sorted((segment.address, segment.stream) for segment in recording.segments)
    for number, address in enumerate(sorted(recording.live)):
        requests.streams[number] = begins[bisect_right(begins, (address, 1 << 64)) - 1][1]  # type: ignore[index]  # an array, made just now
    order = [*range(1, len(recording.live) + 1), *requests.order]
    return replay(replace(requests, order=order), allocator)


def _restored(recording: Snapshot, allocator: CachingAllocator) -> dict[int, Block]:
    """Bring *allocator* into the state in which *recording* began; return its blocks by the numbers that they have as requests."""
    live = sorted(recording.live)
    numbers = {address: number for number, address in enumerate(live, start=1)}
    blocks = {}
    for segment in recording.segments:
        begin = bisect_left(live, segment.address)
        end = bisect_left(live, segment.address + segment.size_bytes)
        inside = [(address, recording.live[address]) for address in live[begin:end]]
        blocks.update({numbers[address]: block for address, block in allocator.adopt(segment, inside).items()})
    return blocks


@contextmanager
def _without_collector() -> Iterator[None]:
    """Blocks know their neighbours, but those that are dropped are known by none: looking for garbage takes time and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
