"""PyTorch's memory snapshots: read without running anything of them, and written for its visualizer."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import UsageError
from memplan.traces.snapshot import Segment, Snapshot, _entries, read_snapshot, snapshot_of, write_snapshot
from memplan.traces.trace import FREE, MemoryTrace
from memplan.units import MIB
from tests.conftest import RehearserOf

STEPS = Path(__file__).parents[1] / "child" / "steps.py"


def entry(action: str, address: int, size: int) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}


def segment(address: int, size: int, blocks: list[tuple[int, str]]) -> dict[str, object]:
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": "large",
        "blocks": [{"size": size, "requested_size": size, "state": state} for size, state in blocks],
    }


def test_the_state_at_the_beginning_is_worked_out() -> None:
    """At its end a snapshot has one segment and one block; before its events there was another segment, and another block."""
    entries = [
        entry("free_requested", 1000, 40 * MIB),
        entry("free_completed", 1000, 40 * MIB),
        entry("segment_free", 1000, 40 * MIB),
        entry("alloc", 5000, 8 * MIB),
    ]

    snapshot = snapshot_of(entries, [segment(5000, 20 * MIB, [(8 * MIB, "active_allocated"), (12 * MIB, "inactive")])])

    assert snapshot.segments == (Segment(1000, 40 * MIB, 0, False), Segment(5000, 20 * MIB, 0, False))
    assert snapshot.live == {1000: 40 * MIB}


def dumped(path: Path, content: object) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    """A pickle can name any function to be called when it is loaded."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "was run",))

    with pytest.raises(UsageError, match="it asks for pathlib"):
        read_snapshot(dumped(tmp_path / "evil.pickle", {"segments": [], "device_traces": [[Evil()]]}))
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("content", [[], {}, {"segments": 1, "device_traces": [[{}]]}, {"segments": [], "device_traces": [[{"a": 1}]]}])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(UsageError, match="not a memory snapshot"):
        read_snapshot(dumped(tmp_path / "other.pickle", content))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "any.pickle"
    path.write_bytes(content)

    with pytest.raises(UsageError):
        read_snapshot(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.pickle"):
        read_snapshot(tmp_path / "missing.pickle")


def test_without_events_nothing_can_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no events"):
        read_snapshot(dumped(tmp_path / "empty.pickle", {"segments": [], "device_traces": [[], []]}))


def test_of_several_gpus_one_is_chosen(tmp_path: Path) -> None:
    traces = [[], [entry("alloc", 0, 512)], [entry("alloc", 0, 1024)]]
    path = dumped(tmp_path / "two.pickle", {"segments": [], "device_traces": traces, "allocator_settings": {}})

    with pytest.raises(UsageError, match="GPUs 1, 2"):
        read_snapshot(path)
    assert list(read_snapshot(path, device=2).trace.sizes) == [1024]


def test_expandable_segments_that_were_there_before_cannot_be_known() -> None:
    mapped = segment(0, 20 * MIB, [(20 * MIB, "inactive")]) | {"is_expandable": True}

    with pytest.raises(UsageError, match="began with 20971520 bytes mapped"):
        snapshot_of([], [mapped])
    assert snapshot_of([entry("segment_map", 0, 20 * MIB)], [mapped]).segments == ()


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_rehearsal_is_written_as_pytorch_would_dump_it(rehearser_of: RehearserOf, tmp_path: Path, settings: str) -> None:
    """What is read back is what was written; the categories stand where PyTorch has the stack, innermost first."""
    rehearsal = rehearser_of(f"{STEPS}:mlp").rehearse(gpu="t4", environment={"PYTORCH_CUDA_ALLOC_CONF": settings})
    trace = rehearsal.trace
    assert trace is not None
    path = tmp_path / "step.pickle"

    write_snapshot(path, trace, settings=settings)

    again = read_snapshot(path)
    assert again == Snapshot((), {}, MemoryTrace(trace.actions, trace.addresses, trace.sizes, trace.streams, b"", ()), settings)
    content = pickle.loads(path.read_bytes())
    assert sum(segment["total_size"] for segment in content["segments"]) == rehearsal.steps[-1].reserved_bytes
    assert sum(segment["allocated_size"] for segment in content["segments"]) <= rehearsal.steps[-1].allocated_bytes
    named = {frame["name"] for entry in content["device_traces"][0] for frame in entry["frames"]}
    assert {"parameters", "gradients", "optimizer state", "activations", "forward", "backward", "optimizer"} <= named
    written = Counter(entry["action"] for entry in content["device_traces"][0])
    assert written["free_requested"] == written["free_completed"] == trace.actions.count(FREE) > 0


def test_a_free_that_waits_for_a_stream_is_requested_first() -> None:
    """It is an event of its own then; one that is done at once is not, and both are written as PyTorch tells of them."""
    waits = [entry("free_requested", 512, 512), entry("alloc", 2048, 512), entry("free_completed", 512, 512)]
    at_once = [entry("free_requested", 2048, 512), entry("free_completed", 2048, 512)]
    entries = [entry("segment_alloc", 0, 2 * MIB), entry("alloc", 512, 512), *waits, *at_once]

    trace = snapshot_of(entries, [segment(0, 2 * MIB, [(2 * MIB, "inactive")])]).trace

    assert trace.actions == "Saraff"
    assert [(each["action"], each["addr"]) for each in _entries(replace(trace, purposes=bytes(2)))] == [
        (each["action"], each["addr"]) for each in entries
    ]


def test_a_snapshot_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        write_snapshot(tmp_path / "no" / "folder.pickle", MemoryTrace("", [], [], [], b"", ()))
