"""
Workspaces that may be other on the GPU than cuDNN says without one: what would be reserved.

A few MiB decide whether such a block finds room in a segment that is there, or has one of its own of some hundred MiB. So the requests of
the run are put to the simulated allocator again and again, with each of these workspaces larger by a share of what it may be, drawn at
random; under the allocator's default settings, whatever the run had. Of an R3D-18 on an H200 the rehearsal reserved 3.25 GiB, the trials up
to 3.86, the GPU 3.75.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

from memplan.allocator.replay import replay_by_default
from memplan.traces.block_sizes import reserved_bytes
from memplan.traces.requests import Requests

NUM_TRIALS = 64
MOST_REQUESTS = 400_000
"""Of all trials: half a second. A long run has fewer trials."""

LEAST_TRIALS = 4


class Spread(NamedTuple):
    """By how much what is reserved may differ."""

    less_bytes: int = 0
    more_bytes: int = 0


def reserved_spread(requests: Requests, unsure_sizes: Mapping[int, int]) -> Spread:
    """
    Return by how much what is reserved may differ, where workspaces of *unsure_sizes* may be larger by up to so many bytes each.

    One that is none, of size 0, needs a segment of its own then. The trials are the same each time.
    """
    if not any(unsure_sizes.values()):
        return Spread()
    own = reserved_bytes(unsure_sizes.get(0, 0))
    unsure = sorted(set(unsure_sizes).intersection(requests.sizes))
    if not unsure:
        return Spread(own, own)
    count = max(LEAST_TRIALS, min(NUM_TRIALS, MOST_REQUESTS // max(1, len(requests.sizes))))
    usual, chance = replay_by_default(requests).peak_reserved_bytes, random.Random(0)
    found = []
    for _ in range(count):
        larger = {size: size + int(chance.random() * unsure_sizes[size]) for size in unsure}
        sizes = [larger.get(size, size) for size in requests.sizes]
        found.append(replay_by_default(requests, sizes=sizes).peak_reserved_bytes)
    return Spread(own + max(0, usual - min(found)), own + max(0, max(found) - usual))
