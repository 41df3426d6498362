"""`memplan replay`."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from memplan.traces.snapshot import write_snapshot
from tests.conftest import RehearserOf, Run

STEPS = Path(__file__).parents[1] / "child" / "steps.py"


@pytest.fixture(scope="module")
def rehearsal(rehearser_of: RehearserOf) -> Rehearsal:
    return rehearser_of(f"{STEPS}:mlp").rehearse(gpu=find_gpu("t4").endless())


@pytest.fixture
def snapshot(rehearsal: Rehearsal, tmp_path: Path) -> Path:
    assert rehearsal.trace is not None
    write_snapshot(tmp_path / "step.pickle", rehearsal.trace)
    return tmp_path / "step.pickle"


def test_a_snapshot_is_replayed_with_other_settings(
    run_memplan: Run, rehearser_of: RehearserOf, rehearsal: Rehearsal, snapshot: Path
) -> None:
    """As it was recorded it reserves what was reserved; with others what the real allocator would."""
    answer = json.loads(run_memplan("replay", snapshot, "--format", "json").stdout)

    assert answer["is_reproduced"]
    assert answer["begins_empty"]
    reserved = {row["settings"]: row["peak_reserved_bytes"] for row in answer["replays"]}
    assert reserved[""] == rehearsal.peak_reserved_bytes
    real = rehearser_of(f"{STEPS}:mlp").rehearse(gpu="t4", environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert reserved["expandable_segments:True"] == real.peak_reserved_bytes


def test_a_card_that_is_too_small_is_told(run_memplan: Run, snapshot: Path) -> None:
    """Exit code 1 where no settings help."""
    small, text = run_memplan("replay", snapshot, "--gpu-memory", "700MiB"), run_memplan("replay", snapshot, "--gpu", "t4")

    assert (small.returncode, text.returncode) == (1, 0)
    assert "out of memory at allocation" in small.stdout
    assert "runs" in text.stdout


def test_what_the_simulated_allocator_would_not_do_is_said(run_memplan: Run, tmp_path: Path) -> None:
    """A recording with a segment of 3 MiB, as no PyTorch makes it, and one that began in the middle."""
    entries = [
        {"action": "segment_alloc", "addr": 0, "size": 3 * 2**20, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 0, "size": 2 * 2**20, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 2**30, "size": 2**20, "stream": 0, "frames": []},
    ]
    segment = {"device": 0, "address": 2**30, "total_size": 2**21, "stream": 0, "segment_type": "small", "blocks": []}
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries], "allocator_settings": {}}))

    result = run_memplan("replay", path)

    assert result.returncode == 0, result.stderr
    assert "near, not exact" in result.stderr
    assert "started with allocated memory" in result.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("arguments", [["missing.pickle"], ["--settings", "foo:1"], ["--gpu", "nocard"], ["--device", "3"]])
def test_mistakes_are_told(run_memplan: Run, snapshot: Path, arguments: list[str]) -> None:
    first = [] if arguments[0] == "missing.pickle" else [snapshot]
    result = run_memplan("replay", *first, *arguments)

    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")


def test_what_is_not_simulated_is_refused(run_memplan: Run, snapshot: Path) -> None:
    """CUDA's own allocator is another one."""
    result = run_memplan("replay", snapshot, "--settings", "backend:cudaMallocAsync")

    assert result.returncode == 2
    assert "not simulated" in result.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda content: [entry.pop("addr") for entry in content["device_traces"][0]],
        lambda content: content["allocator_settings"].update(PYTORCH_CUDA_ALLOC_CONF=5),
        lambda content: [entry.update(action="unknown") for entry in content["device_traces"][0]],
    ],
    ids=["no addresses", "settings that are a number", "unknown events"],
)
def test_odd_snapshots_are_refused_without_a_traceback(run_memplan: Run, snapshot: Path, change: Callable[[Any], Any]) -> None:
    content = pickle.loads(snapshot.read_bytes())
    change(content)
    snapshot.write_bytes(pickle.dumps(content))

    result = run_memplan("replay", snapshot)

    assert result.returncode == 2
    assert "is not a memory snapshot" in result.stderr


def test_sizes_that_no_card_has_run_out_of_memory(run_memplan: Run, snapshot: Path) -> None:
    """No traceback either, with a GPU of hardly any memory, and with requests beyond all."""
    tiny = run_memplan("replay", snapshot, "--gpu-memory", "300MiB")
    content = pickle.loads(snapshot.read_bytes())
    for entry in content["device_traces"][0]:
        entry["size"] *= 2**30
    snapshot.write_bytes(pickle.dumps(content))
    huge = run_memplan("replay", snapshot)

    assert (tiny.returncode, huge.returncode) == (1, 1)
    assert "Traceback" not in tiny.stderr + huge.stderr
