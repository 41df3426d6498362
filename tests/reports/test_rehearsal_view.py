"""What the report of a rehearsal says of files."""

from __future__ import annotations

from pathlib import Path

from memplan.execution.rehearsal import HeldBackFile, Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryRange
from memplan.reports.rehearsal_view import view_rehearsal


def facts_of(gpu: GpuSpec, paths: list[str]) -> dict[str, str]:
    """The facts of a rehearsal that held back a MiB in each of *paths*."""
    rehearsal = Rehearsal(
        method="rehearsed",
        breakdown=MemoryBreakdown(),
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        device_used=MemoryRange(low_bytes=0, expected_bytes=0, high_bytes=0),
        peak_phase="forward",
        gpu_name=gpu.name,
        torch="2.13.0",
        num_alloc_retries=0,
        steps=(),
        held_back_files=tuple(HeldBackFile(path=path, size_bytes=2**20) for path in paths),
        num_held_back_files=len(paths),
        held_back_bytes=len(paths) * 2**20,
    )
    return dict(view_rehearsal(rehearsal, gpu).facts)


def test_files_of_the_working_folder_are_named_first(a100: GpuSpec) -> None:
    """As they are seen from there; caches elsewhere follow, by the end of their names."""
    cache = "/home/me/.cache/" + "x" * 60 + "/kernel.so"

    facts = facts_of(a100, [cache, f"{Path.cwd()}/runs/ckpt.pt"])

    assert facts["files held back"] == f"2 (2.0 MiB): runs/ckpt.pt, …{cache[-40:]}; `allow_writes=True` writes them"


def test_a_rehearsal_that_wrote_nothing_says_nothing_of_files(a100: GpuSpec) -> None:
    """As most do."""
    assert not {"files held back", "removals held back"} & set(facts_of(a100, []))
