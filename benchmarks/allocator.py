"""
How fast the simulated allocator is: requests a second, beside the rehearsal that they come from.

    python benchmarks/allocator.py [ROUNDS]

GPT-2's step (batch 8, sequence 512, three times) is rehearsed once on a GPU without end; its requests are then put to the simulated
allocator with several settings, ROUNDS times each (5). The fastest and the median are shown.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from memplan.allocator.config import read_settings
from memplan.allocator.replay import replay
from memplan.allocator.simulator import CachingAllocator, Card
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.traces.requests import requests_of

STEPS = Path(__file__).with_name("rehearsal_steps.py")
SETTINGS = ["", "max_split_size_mb:128", "roundup_power2_divisions:4", "expandable_segments:True"]


def main(rounds: int = 5) -> None:
    """Print a table, and the same as one line of JSON."""
    card = find_gpu("a100-80").model_copy(update={"total_memory_bytes": UNLIMITED_BYTES})
    with Rehearser(step_source_from(f"{STEPS}:gpt2")) as rehearser:
        rehearser.rehearse(gpu=card)
        start = time.perf_counter()
        rehearsal = rehearser.rehearse(gpu=card)
        rehearsed = time.perf_counter() - start
    assert rehearsal.trace is not None
    requests = requests_of(rehearsal.trace)
    count = len(requests.order)
    print(f"{count} requests; the rehearsal (in a process that has everything imported) took {rehearsed:.2f} s")
    print(f"{'settings':32} {'fastest':>9} {'median':>9} {'requests/s':>12} {'of a rehearsal':>15}")
    found = {}
    for text in SETTINGS:
        seconds = []
        for _ in range(rounds):
            allocator = CachingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES), read_settings(text))
            start = time.perf_counter()
            replay(requests, allocator)
            seconds.append(time.perf_counter() - start)
        fastest, median = min(seconds), statistics.median(seconds)
        print(f"{text or 'default':32} {fastest * 1e3:6.1f} ms {median * 1e3:6.1f} ms {count / fastest:12,.0f} {fastest / rehearsed:14.1%}")
        found[text] = {"fastest_s": fastest, "median_s": median, "requests_per_s": count / fastest}
    print(json.dumps({"requests": count, "rehearsal_s": rehearsed, "replays": found}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
