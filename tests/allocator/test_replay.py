"""Requests and recordings put to the simulated allocator."""

from __future__ import annotations

import csv
import gzip
import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.allocator.blocks import Block
from memplan.allocator.config import AllocatorSettings, read_settings
from memplan.allocator.replay import replay, replay_recorded, reproduces
from memplan.allocator.simulator import CachingAllocator, Card
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.traces.requests import Requests, requests_of
from memplan.traces.snapshot import Segment, Snapshot
from memplan.traces.trace import ACTIONS, MemoryTrace
from memplan.units import GIB, MIB
from tests.conftest import SHARED, RehearserOf, SharedRehearser, shared_files, skip_without

STEPS = Path(__file__).parents[1] / "child" / "steps.py"
REAL = shared_files("recordings/real/*.csv.gz")


def recorded(path: Path) -> Snapshot:
    """A published snapshot of a real GPU, as the shared files hold it."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    events = [row for row in rows if row["action"] in ACTIONS]
    columns = (array("Q", [int(row[name] or 0) for row in events]) for name in ("addr", "size", "stream"))
    return Snapshot(
        tuple(
            Segment(int(row["addr"]), int(row["size"]), int(row["stream"]), row["frame"] == "small")
            for row in rows
            if row["action"] == "init_segment"
        ),
        {int(row["addr"]): int(row["size"]) for row in rows if row["action"] == "init_live"},
        MemoryTrace("".join(ACTIONS[row["action"]] for row in events), *columns, purposes=b"", marks=()),
        "",
    )


HIGH, LOW, SIZE = 1 << 40, 1 << 39, 20 * MIB

BY_AGE = [
    ("segment_alloc", HIGH, SIZE), ("alloc", HIGH, SIZE), ("segment_alloc", LOW, SIZE), ("alloc", LOW, SIZE),
    ("free_requested", HIGH, SIZE), ("free_completed", HIGH, SIZE), ("free_requested", LOW, SIZE), ("free_completed", LOW, SIZE),
    ("alloc", HIGH, SIZE),  # that of the older segment, though the other one is lower
    ("segment_free", LOW, SIZE), ("segment_alloc", LOW, SIZE), ("alloc", LOW, SIZE),
    ("free_requested", HIGH, SIZE), ("free_completed", HIGH, SIZE), ("free_requested", LOW, SIZE), ("free_completed", LOW, SIZE),
    ("alloc", HIGH, SIZE), ("alloc", LOW, SIZE),
]  # fmt: skip
BY_ADDRESS = [(action, LOW + HIGH - address if number >= 8 else address, size) for number, (action, address, size) in enumerate(BY_AGE)]


@pytest.mark.parametrize("events", [BY_AGE, BY_ADDRESS], ids=["by age", "by address"])
def test_a_snapshot_is_reproduced_however_ties_were_broken(events: list[tuple[str, int, int]]) -> None:
    """It does not say which PyTorch made it; the way that it was not leads to a segment where another one lies still."""
    columns = (array("Q", column) for column in ([row[1] for row in events], [row[2] for row in events], [0] * len(events)))
    trace = MemoryTrace("".join(ACTIONS[action] for action, _, _ in events), *columns, purposes=b"", marks=())

    allocator = reproduces(Snapshot((), {}, trace, ""))

    assert allocator is not None
    assert allocator.reserved_bytes == 2 * SIZE


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name.removesuffix(".csv.gz"))
def test_what_real_gpus_did_replays(path: Path) -> None:
    """Published snapshots: the same segments at the same addresses, in the same order: the same reserved bytes after every event."""
    skip_without(path)
    recording = recorded(path)
    trace = recording.trace
    events = [
        (name, trace.addresses[position], trace.sizes[position])
        for position, name in enumerate({letter: name for name, letter in ACTIONS.items()}[action] for action in trace.actions)
        if name.startswith("segment")
    ]
    places = [address for name, address, _ in events if name == "segment_alloc"]
    allocator = CachingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES, places=places))

    replay_recorded(recording, allocator)

    seen = [(event.action, event.address, event.size_bytes) for event in allocator.events[len(recording.segments) :]]
    assert seen == events


@pytest.mark.parametrize("name", ["niuhuang_fwdbwd_100", "niuhuang_fwdbwd_200"])
def test_published_peaks_come_out(name: str) -> None:
    """The README of the recordings: 750 and 1326 MiB reserved."""
    path = SHARED / "recordings" / "real" / f"{name}.csv.gz"
    skip_without(path)
    allocator = CachingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES))

    seen = replay(requests_of(recorded(path).trace), allocator)

    assert seen.peak_reserved_bytes == {"niuhuang_fwdbwd_100": 750, "niuhuang_fwdbwd_200": 1326}[name] * MIB


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    return rehearser_of(f"{STEPS}:mlp")


def mlp_requests(rehearser: SharedRehearser) -> Requests:
    endless = find_gpu("t4").model_copy(update={"total_memory_bytes": UNLIMITED_BYTES})
    trace = rehearser.rehearse(gpu=endless).trace
    assert trace is not None
    return requests_of(trace)


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "roundup_power2_divisions:2", "max_split_size_mb:20"])
def test_other_settings_and_cards_are_answered_without_another_rehearsal(rehearser: SharedRehearser, text: str) -> None:
    """One rehearsal on a GPU without end says what the same step does on any other: the real allocator says the same."""
    requests = mlp_requests(rehearser)
    for total_mib in (4096, 100, 84, 72, 60):
        card = find_gpu("t4").model_copy(update={"total_memory_bytes": total_mib * MIB})
        real = rehearser.rehearse(gpu=card, context_bytes=0, environment={"PYTORCH_CUDA_ALLOC_CONF": text})

        simulated = replay(requests, CachingAllocator(Card(total_mib * MIB, total_mib * MIB), read_settings(text)))

        assert simulated.fits == real.fits
        if real.fits:
            assert (simulated.peak_reserved_bytes, simulated.num_alloc_retries) == (real.peak_reserved_bytes, real.num_alloc_retries)


def test_a_replay_ends_where_memory_runs_out() -> None:
    requests = Requests(order=[1, 2, -1, -2], sizes=[60 * MIB, 60 * MIB], streams=[0, 0])

    seen = replay(requests, CachingAllocator(Card(100 * MIB, 100 * MIB)))

    assert (seen.fits, seen.out_of_memory_at, seen.peak_reserved_bytes) == (False, 2, 60 * MIB)


def test_giving_back_is_told_of_apart_from_emptying() -> None:
    """A program that empties the cache is not tight for that; one for which the allocator had to give something back is."""
    emptied = Requests(order=[1, -1, 0, 2], sizes=[60 * MIB, 80 * MIB], streams=[0, 0])
    tight = Requests(order=[1, -1, 2], sizes=[60 * MIB, 80 * MIB], streams=[0, 0])

    assert not replay(emptied, CachingAllocator(Card(100 * MIB, 100 * MIB))).gave_back
    assert replay(tight, CachingAllocator(Card(100 * MIB, 100 * MIB))).gave_back


def test_other_sizes_can_be_put_to_the_same_sequence() -> None:
    requests = Requests(order=[1, -1], sizes=[MIB], streams=[0])

    assert replay(requests, CachingAllocator(Card(GIB, GIB)), sizes=[64 * MIB]).peak_reserved_bytes == 64 * MIB


class CountingAllocator(CachingAllocator):
    """Counts what it is asked for."""

    num_mallocs = 0

    def malloc(self, requested_bytes: int, stream: int = 0) -> Block:
        self.num_mallocs += 1
        return super().malloc(requested_bytes, stream)


def evaluation(chance: random.Random, *, num_batches: int, keeps: int) -> Requests:
    """Batches that free at random what they made, the results of the last *keeps* batches, and what is beside them and behind them."""
    order: list[int] = []
    sizes: list[int] = []

    def make(size: int) -> int:
        sizes.append(size)
        order.append(len(sizes))
        return len(sizes)

    beside = [make(chance.randint(1, 30 * MIB)) for _ in range(20)]
    order.extend(-number for number in beside[::2])
    batch = [chance.choice((chance.randint(1, 2 * MIB), chance.randint(1, 40 * MIB))) for _ in range(chance.randint(2, 30))]
    lives = [chance.randint(0, len(batch) - at) for at in range(len(batch))]
    results: list[int] = []
    for _ in range(num_batches):
        made = []
        for at, size in enumerate(batch):
            made.append(make(size))
            order.extend(-made[other] for other in range(at + 1) if other and other + lives[other] == at)
        order.extend(-number for at, number in enumerate(made) if at and at + lives[at] >= len(batch))
        results.append(made[0])
        if len(results) > keeps:
            order.append(-results.pop(0))
    order.extend(-number for number in (*results, *beside[1::2]))
    for size in batch:
        make(2 * size)
    return Requests(order, sizes, [0] * len(sizes))


@pytest.mark.parametrize("seed", range(60))
def test_rounds_that_change_nothing_are_not_put_and_all_comes_out_the_same(seed: int) -> None:
    """Against the same requests put one by one: peaks, retries, failures, what is given back, and the segments in their order."""
    chance = random.Random(seed)
    requests = evaluation(chance, num_batches=chance.randint(4, 60), keeps=chance.choice((0, 1, 3, 1000)))
    one_by_one = replace(requests)
    one_by_one.__dict__["stretches"] = ()
    texts = ("", "", "expandable_segments:True", "max_split_size_mb:20", "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9")
    settings = read_settings(chance.choice(texts))
    needed = replay(one_by_one, CachingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES), settings)).peak_reserved_bytes
    for capacity in (UNLIMITED_BYTES, needed, needed * 9 // 10, needed * 7 // 10, needed // 2):
        one, other = (CachingAllocator(Card(capacity, capacity), settings) for _ in range(2))

        assert replay(requests, one) == replay(one_by_one, other)
        assert one.events == other.events
        assert one.state() == other.state()
        assert one.allocated_bytes == other.allocated_bytes


def test_of_a_long_evaluation_a_few_batches_are_put() -> None:
    requests = evaluation(random.Random(3), num_batches=1000, keeps=2)
    allocator = CountingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES))

    replay(requests, allocator)

    assert allocator.num_mallocs < len(requests.sizes) // 50


def test_an_evaluation_that_keeps_all_its_results_is_put_to_its_end() -> None:
    """No batch leaves the allocator as the one before it did."""
    requests = evaluation(random.Random(3), num_batches=200, keeps=1000)
    allocator = CountingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES))

    replay(requests, allocator)

    assert allocator.num_mallocs == len(requests.sizes)


def test_a_recording_with_a_full_card_goes_on_after_its_failures() -> None:
    """An allocation failed, was given up, and the program went on."""
    actions = "".join(ACTIONS[name] for name in ("segment_alloc", "alloc", "oom", "alloc"))
    trace = MemoryTrace(actions, [4096, 4096, 0, 8192], [60 * MIB, 60 * MIB, 80 * MIB, 512], [0] * 4, purposes=b"", marks=())
    allocator = CachingAllocator(Card(100 * MIB, 100 * MIB), AllocatorSettings())

    replay_recorded(Snapshot((), {}, trace, ""), allocator)

    assert [event.action for event in allocator.events] == ["segment_alloc", "oom", "segment_alloc"]
