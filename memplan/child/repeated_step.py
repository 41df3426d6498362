"""
A step that is not run again: what it asked the allocator for is asked for again.

The models of memplan itself ask for the same in each step from the second on. What the allocator does about it can differ, since it finds
other free blocks than in the step before; it is PyTorch's own here too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch


class SteadyStep:
    """A step that asks for the same each time, from its second on."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self) -> None:
        """Run the step."""
        self._run()


Event = Mapping[str, Any]
"""As PyTorch has it in its history."""

_REQUESTS = ("alloc", "free_requested", "free_completed")
_OF_NO_STEP = ("segment_free", "segment_unmap", "oom")


class RepeatedStep:
    """The requests of a step, to be made again as often as it is called; and what is told of a program then."""

    def __init__(self, events: Sequence[Event], first: int, requests: Sequence[int]) -> None:
        self.events = events
        """Those of the step, from *first* on, and of what was before it."""
        self._first, self._requests = first, requests
        self._num_allocs = sum(request > 0 for request in requests)
        self.num_times = 0

    def __call__(self) -> None:
        """Ask for all that the step asked for, and give it back, in its order."""
        allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
        addresses: list[int] = []
        for request in self._requests:
            if request > 0:
                addresses.append(allocate(request, 0))
            else:
                free(addresses[-request - 1])
        self.num_times += 1

    @property
    def request_events(self) -> list[Event]:
        """Return those of the step that come again each time, at the same addresses where no time needs another segment."""
        return [event for event in self.events[self._first :] if event["action"] in _REQUESTS]

    def end(self, end: tuple[int, int]) -> tuple[int, int]:
        """Return by how many allocations and frees the last time had ended, where the step itself had by those of *end*."""
        num_again = self.num_times * self._num_allocs
        return end[0] + num_again, end[1] + num_again

    def marks(self, marks: Sequence[tuple[int, int, int, str]]) -> list[tuple[int, int, int, str]]:
        """Return *marks*, of which the last are the step's, with those of each time."""
        last = [mark for mark in marks if mark[2] == marks[-1][2]]
        again = [
            (allocs + time * self._num_allocs, frees + time * self._num_allocs, step + time, phase)
            for time in range(1, self.num_times + 1)
            for allocs, frees, step, phase in last
        ]
        return [*marks, *again]

    def notes(self, notes: Mapping[str, Iterable[tuple[int, int]]], places: Sequence[int]) -> dict[str, list[tuple[int, int]]]:
        """Return *notes*, and what those of the step's allocations say of the same ones each time; *places* are the addresses of all."""
        num_before = sum(event["action"] == "alloc" for event in self.events[: self._first])
        numbers: dict[int, list[int]] = defaultdict(list)
        for number, address in enumerate(places[: num_before + self._num_allocs], start=1):
            numbers[address].append(number)
        found: dict[str, list[tuple[int, int]]] = {}
        for name, noted in notes.items():
            found[name] = list(noted)
            for address, num_allocs in noted:
                of_address = numbers[address]
                place = bisect_right(of_address, num_allocs)
                if place and of_address[place - 1] > num_before:
                    again = (of_address[place - 1] + time * self._num_allocs for time in range(1, self.num_times + 1))
                    found[name] += ((places[number - 1], number) for number in again)
        return found


def repeated_step(events: Sequence[Event], begin: tuple[int, int]) -> RepeatedStep | None:
    """
    Return what makes the requests of a step again: those of *events* behind the first *begin* allocations and frees.

    None where that is not all that a step does: it keeps what it made, frees what it found, empties the cache, or uses another stream.
    """
    first = _position(events, begin)
    requests: list[int] = []  # bytes to allocate; minus a number: to free the allocation with that number, 1 for the step's first
    live: dict[int, int] = {}
    num_allocs = 0
    for event in events[first:]:
        action, address = event["action"], event.get("addr", 0)
        if action in _OF_NO_STEP or event.get("stream", 0) or (action == "free_completed" and address not in live):
            return None
        if action == "alloc":
            num_allocs += 1
            live[address] = num_allocs
            requests.append(event["size"])
        elif action == "free_completed":
            requests.append(-live.pop(address))
    return RepeatedStep(events, first, requests) if requests and not live else None


def _position(events: Sequence[Event], begin: tuple[int, int]) -> int:
    """Return the event behind the first *begin* allocations and frees."""
    left = {"alloc": begin[0], "free_completed": begin[1]}
    for position, event in enumerate(events):
        if not any(left.values()):
            return position
        if event["action"] in left:
            left[event["action"]] -= 1
    return len(events)
