"""
What a program needs that has released cached memory now and then.

What PyTorch has cached does not serve a step that asks for larger blocks than all before, or an evaluation with another batch. It stays
until the GPU is full, and all of it is released then: a retry, as where a step hardly fits. Which of both it was is told by the requests
themselves, put to the simulated allocator with less and less memory.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.allocator.replay import replay
from memplan.allocator.simulator import CachingAllocator, Card
from memplan.traces.requests import EMPTY_CACHE, Requests

EXACTNESS = 1 / 64
"""Of what there was, how exactly it is found."""

MOST_REQUESTS = 200_000
"""Of a run that is looked at: each of the eight questions puts all of them."""


def least_reserved(requests: Requests, *, reserved_bytes: int) -> int | None:
    """
    Return about the least with which *requests* go through, cached memory being released where all of it is taken.

    With *reserved_bytes* they did. What the program released itself is not: where there is less, the allocator does so. None where they are
    too many to be looked at, or the simulated allocator does not come through with that.
    """
    kept = replace(requests, order=[request for request in requests.order if request != EMPTY_CACHE])
    if len(kept.sizes) > MOST_REQUESTS or not _goes_through(kept, reserved_bytes):
        return None
    too_few, enough = min(kept.peak_bytes, reserved_bytes) - 1, reserved_bytes
    while enough - too_few > reserved_bytes * EXACTNESS:
        middle = (too_few + enough) // 2
        if _goes_through(kept, middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _goes_through(requests: Requests, capacity_bytes: int) -> bool:
    return replay(requests, CachingAllocator(Card(capacity_bytes, capacity_bytes))).fits
