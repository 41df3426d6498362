"""
What a program needs that has released cached memory now and then.

What PyTorch has cached does not serve a step that asks for larger blocks than all before, or an evaluation with another batch. It stays
until the GPU is full, and all of it is released then: a retry, as where a step hardly fits. Which of both it was is told by the requests
themselves, put to the simulated allocator with less and less memory.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.allocator.replay import least_capacity, replay_by_default
from memplan.traces.requests import EMPTY_CACHE, Requests

MOST_REQUESTS = 200_000
"""Of a run that is looked at: each of the eight questions puts all of them."""


def least_reserved(requests: Requests, *, reserved_bytes: int, num_alloc_retries: int) -> int | None:
    """
    Return about the least with which *requests* go through, cached memory being released where all of it is taken.

    They reserved *reserved_bytes* at most, and released cached memory *num_alloc_retries* times. What the program released itself is not:
    where there is less, the allocator does so. None where they are too many to be looked at, or PyTorch's default allocator does not come
    to the same with that, as under other settings.
    """
    kept = replace(requests, order=[request for request in requests.order if request != EMPTY_CACHE])
    if len(kept.sizes) > MOST_REQUESTS:
        return None
    again = replay_by_default(kept, capacity_bytes=reserved_bytes)
    if not again.fits or (again.peak_reserved_bytes, again.num_alloc_retries) != (reserved_bytes, num_alloc_retries):
        return None
    return least_capacity(kept, at_least=min(kept.peak_bytes, reserved_bytes), enough=reserved_bytes)
