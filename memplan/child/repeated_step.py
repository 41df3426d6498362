"""
A step that is not run again: what it asked the allocator for is asked for again.

The models of memplan itself ask for the same in each step from the second on. What the allocator does about it can differ, since it finds
other free blocks than in the step before; it is PyTorch's own here too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class SteadyStep:
    """A step that asks for the same each time, from its second on."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self) -> None:
        """Run the step."""
        self._run()


def repeated_step(events: Iterable[Mapping[str, Any]], begin: tuple[int, int]) -> Callable[[], None] | None:
    """
    Return what makes the requests of a step again: those of *events* behind the first *begin* allocations and frees.

    None where that is not all that a step does: it keeps what it made, frees what it found, empties the cache, or uses another stream.
    """
    num_allocs = num_frees = 0
    requests = array("q")  # bytes to allocate; minus a number: to free the allocation with that number, 1 for the step's first
    numbers: dict[int, int] = {}
    num_made = 0
    for event in events:
        is_before = num_allocs < begin[0] or num_frees < begin[1]
        action = event["action"]
        if action == "alloc":
            num_allocs += 1
            if not is_before:
                num_made += 1
                numbers[event["addr"]] = num_made
                requests.append(event["size"])
        elif action == "free_completed":
            num_frees += 1
            if not is_before:
                number = numbers.pop(event["addr"], None)
                if number is None:
                    return None
                requests.append(-number)
        if not is_before and (action in _OF_NO_STEP or event.get("stream", 0)):
            return None
    if numbers or not num_made:
        return None
    return lambda: _ask(requests)


_OF_NO_STEP = ("segment_free", "segment_unmap", "oom")


def _ask(requests: Iterable[int]) -> None:
    allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
    addresses: list[int] = []
    for request in requests:
        if request > 0:
            addresses.append(allocate(request, 0))
        else:
            free(addresses[-request - 1])
