"""
Rehearsals against memory snapshots of a real GPU that somebody published: a small language model, three steps under PyTorch 2.6.

`published_rehearsals.jsonl` holds what rehearsals of `small_language_model.py` saw under each PyTorch (recorded 2026-11-21, an RTX 4090).
The published figures are from `shared/recordings/README.md` (niuhuang_fwdbwd_100 and _200). Of their 3,853 allocations ours makes 3,850 of
the same sizes; the rest is one tensor of 400 kB in the loss's backward of each step, and the order in which the gradients of queries, keys
and values are made.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.traces.trace import ALLOC, FREE
from tests.conftest import RehearserOf, SharedRehearser

MIB = 2**20
PROGRAM = Path(__file__).with_name("small_language_model.py")
RECORDED = [json.loads(line) for line in Path(__file__).with_name("published_rehearsals.jsonl").read_text().splitlines()]
PUBLISHED_MIB = {100: (651.11, 750), 200: (1172.78, 1326)}
"""Context to the peaks of bytes asked for and of bytes reserved, on the real GPU."""


def rehearsed(rehearser: Rehearser | SharedRehearser, context: int) -> Rehearsal:
    """Three steps on a GPU of capability 8.9."""
    return rehearser.rehearse(gpu=find_gpu("rtx4090"), values={"context": context}, steps=3, context_bytes=0)


def requested_bytes(seen: Rehearsal) -> int:
    """The most bytes that were asked for at a time, before rounding: what the published figures count."""
    assert seen.trace is not None
    live: dict[int, int] = {}
    current = most = 0
    for action, address, size in zip(seen.trace.actions, seen.trace.addresses, seen.trace.sizes, strict=True):
        if action == ALLOC:
            live[address] = size
            current += size
            most = max(most, current)
        elif action == FREE:
            current -= live.pop(address)
    return most


@pytest.mark.parametrize("context", [100, 200])
def test_under_the_same_pytorch_both_peaks_are_within_one_percent(context: int) -> None:
    """What was asked for is equal to 0.01 MiB, what was reserved equal or within 0.3%."""
    line = next(line for line in RECORDED if line["torch"].startswith("2.6.") and line["context"] == context)
    requested, reserved = PUBLISHED_MIB[context]

    assert line["requested_bytes"] / MIB == pytest.approx(requested, abs=0.01)
    assert line["reserved_bytes"] / MIB == pytest.approx(reserved, rel=0.01)


@pytest.mark.parametrize("context", [100, 200])
def test_the_recorded_rehearsals_are_made_again(torch_build: TorchBuild, rehearser_of: RehearserOf, context: int) -> None:
    """Under whichever recorded PyTorch is installed, to the byte: 2.6 here is what the test above compares."""
    lines = [line for line in RECORDED if (line["torch"], line["context"]) == (torch_build.version, context)]
    if not lines:
        pytest.skip(f"no rehearsal was recorded with PyTorch {torch_build.version}")

    seen = rehearsed(rehearser_of(f"{PROGRAM}:build"), context)

    assert (requested_bytes(seen), seen.peak_reserved_bytes) == (lines[0]["requested_bytes"], lines[0]["reserved_bytes"])


if __name__ == "__main__":  # python -m tests.accuracy.test_published_snapshots >> tests/accuracy/published_rehearsals.jsonl
    with Rehearser(step_source_from(f"{PROGRAM}:build")) as program:
        for length in PUBLISHED_MIB:
            found = rehearsed(program, length)
            line = {
                "torch": found.torch,
                "context": length,
                "requested_bytes": requested_bytes(found),
                "reserved_bytes": found.peak_reserved_bytes,
            }
            print(json.dumps(line))
