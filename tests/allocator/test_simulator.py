"""The simulated allocator does what PyTorch's does, event for event."""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.allocator.config import AllocatorSettings, read_settings
from memplan.allocator.replay import replay_recorded, reproduces
from memplan.allocator.simulator import CachingAllocator, Card, OutOfMemoryError
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.traces.requests import breaks_ties_by_address
from memplan.traces.snapshot import Snapshot
from memplan.traces.trace import ACTIONS
from memplan.units import GIB, MIB
from tests.conftest import RehearserOf, SharedRehearser, shared_files, skip_without

CHURN = f"{Path(__file__).parents[1] / 'child' / 'allocator_steps.py'}:churn"
SEGMENT_ACTIONS = {letter: name for name, letter in ACTIONS.items() if name.startswith("segment") or name == "oom"}
RECORDINGS = shared_files("recordings/standin/*.json.gz")


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_recording_replays(path: Path) -> None:
    """The shared recordings: the same segments in the same order, the same peaks, retries and failures."""
    skip_without(path)
    record = json.loads(gzip.decompress(path.read_bytes()))
    rising = [number << 33 for number in range(1, 1 << 14)]  # they were made where each segment lay above the one before
    allocator = CachingAllocator(
        Card(record["total_memory"], record["total_memory"], places=rising),
        read_settings(record["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] or ""),
    )
    blocks = {}
    for kind, block, size, stream in record["events"]:
        if kind == "alloc":
            blocks[block] = allocator.malloc(size, stream)
        elif kind == "free":
            allocator.free(blocks.pop(block))
        elif kind == "oom":
            with pytest.raises(OutOfMemoryError):
                allocator.malloc(size, stream)

    seen = [(event.action, event.size_bytes, event.stream) for event in allocator.events]
    assert seen == [(kind, size, stream) for kind, _, size, stream in record["events"] if kind not in ("alloc", "free")]
    assert allocator.num_alloc_retries == record["retries"]
    if record["failure"] is None:
        last = record["steps"][-1]
        assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (last["peak_allocated"], last["peak_reserved"])


SETTINGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:20,max_non_split_rounding_mb:40",
    "max_split_size_mb:32,expandable_segments:True",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,4:8,16:1,>:4]",
    "large_segment_size_mb:21",
    "large_segment_size_mb:32,expandable_segments:True",
    "per_process_memory_fraction:0.5",
    "garbage_collection_threshold:0.3",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:1.0",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.3,max_split_size_mb:20,per_process_memory_fraction:0.8",
]


@pytest.fixture
def churning(rehearser_of: RehearserOf) -> SharedRehearser:
    return rehearser_of(CHURN)


@pytest.mark.parametrize("text", SETTINGS)
def test_random_requests_are_answered_as_pytorch_answers_them(churning: SharedRehearser, torch_build: TorchBuild, text: str) -> None:
    """
    The real allocator is asked for random blocks on GPUs of several sizes, some of which overflow; the simulated one gives the same
    addresses, segments, retries and failures.
    """
    if tuple(map(int, torch_build.version.split(".")[:2])) < (2, 12) and ("large_segment" in text or "fraction" in text):
        pytest.skip(f"PyTorch {torch_build.version} does not know these settings")
    if torch_build.version.startswith("2.12."):
        pytest.skip("PyTorch 2.12 orders blocks of a size by an age that is not simulated")
    for seed, most_mib, streams, total_bytes in [(1, 64, 1, 256 * MIB), (2, 300, 3, 512 * MIB), (3, 16, 3, GIB), (4, 300, 1, 4 * GIB)]:
        card = find_gpu("t4").model_copy(update={"total_memory_bytes": total_bytes})
        values = {"seed": seed, "requests": 1000, "most_mib": most_mib, "streams": streams, "empties": total_bytes == 4 * GIB}
        seen = churning.rehearse(gpu=card, values=values, steps=2, context_bytes=0, environment={"PYTORCH_CUDA_ALLOC_CONF": text})
        trace = seen.trace
        assert trace is not None
        allocator = CachingAllocator(Card(total_bytes, total_bytes), read_settings(text))
        if breaks_ties_by_address(torch_build.version):
            allocator.card.break_ties_by_address()

        replay_recorded(Snapshot((), {}, trace, text), allocator)

        events = [
            (SEGMENT_ACTIONS[action], size, stream)
            for action, size, stream in zip(trace.actions, trace.sizes, trace.streams, strict=True)
            if action in SEGMENT_ACTIONS
        ]
        assert [(event.action, event.size_bytes, event.stream) for event in allocator.events] == events
        assert allocator.num_alloc_retries == seen.num_alloc_retries
        if total_bytes == 4 * GIB and not re.search("garbage|fraction", text):  # a snapshot does not say how ties were broken
            assert reproduces(Snapshot((), {}, trace, text)) is not None
        assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (seen.peak_allocated_bytes, seen.peak_reserved_bytes)


def allocator_of(free_bytes: int = GIB, settings: AllocatorSettings | None = None) -> CachingAllocator:
    return CachingAllocator(Card(free_bytes, free_bytes), settings)


@pytest.mark.parametrize(("asked", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (3 * MIB + 1, 3 * MIB + 512)])
def test_requests_are_rounded_up_to_512_bytes(asked: int, rounded: int) -> None:
    assert allocator_of().malloc(asked).size == rounded


@pytest.mark.parametrize(
    ("asked", "segment"), [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (11 * MIB, 12 * MIB)]
)
def test_a_segment_is_2_or_20_mebibytes_or_as_large_as_it_must_be(asked: int, segment: int) -> None:
    """kSmallBuffer, kLargeBuffer, and multiples of kRoundLarge from kMinLargeAlloc on."""
    allocator = allocator_of()
    allocator.malloc(asked)

    assert allocator.reserved_bytes == segment


def test_a_large_block_keeps_a_rest_of_up_to_one_mebibyte() -> None:
    """11.5 MiB of a segment of 12: what is left is too little to be split off, and counts as allocated."""
    assert allocator_of().malloc(11 * MIB + MIB // 2).size == 12 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = allocator_of()
    large, small = allocator.malloc(64 * MIB), allocator.malloc(32 * MIB)
    address = small.address
    allocator.free(large)
    allocator.free(small)

    assert allocator.malloc(30 * MIB).address == address


def test_neighbours_that_are_free_become_one() -> None:
    allocator = allocator_of()
    blocks = [allocator.malloc(4 * MIB) for _ in range(5)]
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)

    assert allocator.malloc(12 * MIB).address == blocks[0].address + 4 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_a_block_of_another_stream_is_not_taken() -> None:
    allocator = allocator_of()
    allocator.free(allocator.malloc(4 * MIB, stream=1))
    allocator.malloc(4 * MIB, stream=2)

    assert allocator.reserved_bytes == 40 * MIB


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    """One retry: 60 MiB are free in a segment that is too small for 80."""
    allocator = allocator_of(100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)

    assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (1, 80 * MIB)


def test_a_segment_with_something_in_it_cannot_be_given_back() -> None:
    allocator = allocator_of(100 * MIB)
    allocator.free(allocator.malloc(58 * MIB))
    allocator.malloc(2 * MIB)  # lies in the segment that is free

    with pytest.raises(OutOfMemoryError) as failed:
        allocator.malloc(80 * MIB)
    assert (failed.value.requested_bytes, failed.value.free_bytes) == (80 * MIB, 42 * MIB)


def test_expandable_segments_have_no_holes() -> None:
    """What did not fit for a hole fits: pages are mapped behind each other, and taken from where nothing is."""
    allocator = allocator_of(100 * MIB, AllocatorSettings(expandable_segments=True))
    first, second = allocator.malloc(40 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)

    assert allocator.malloc(80 * MIB).address > second.address
    assert allocator.reserved_bytes == 100 * MIB


requests = st.lists(st.one_of(st.integers(1, 64 * MIB), st.integers(1, 4096), st.just(-1)), max_size=120)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    choices=st.lists(st.integers(0, 10**6), min_size=120, max_size=120),
    text=st.sampled_from([text for text in SETTINGS if "fraction" not in text]),
    card_mib=st.sampled_from([64, 256, 4096]),
)
def test_blocks_never_overlap_and_bytes_add_up(requests: list[int], choices: list[int], text: str, card_mib: int) -> None:
    """Whatever is asked for: what is held lies apart, is large enough, and reserved is what the GPU has given."""
    allocator = CachingAllocator(Card(card_mib * MIB, card_mib * MIB), read_settings(text))
    held = []
    for request, choice in zip(requests, choices, strict=False):
        if request > 0:
            try:
                held.append((allocator.malloc(request), request))
            except OutOfMemoryError:
                continue
        elif held:
            allocator.free(held.pop(choice % len(held))[0])

        spans = sorted((block.address, block.size) for block, _ in held)
        assert all(address + size <= following for (address, size), (following, _) in pairwise(spans))
        assert all(block.size >= asked for block, asked in held)
        assert allocator.allocated_bytes == sum(block.size for block, _ in held) <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= card_mib * MIB - allocator.card.free_bytes
    for block, _ in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.card.free_bytes) == (0, 0, card_mib * MIB)
