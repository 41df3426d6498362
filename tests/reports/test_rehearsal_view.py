"""What the report of a rehearsal says of files, and of the values that the program read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memplan.analysis.would_fit import WouldFit
from memplan.execution.rehearsal import DeviceRead, HeldBackFile, Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryRange
from memplan.reports.rehearsal_view import view_rehearsal
from memplan.units import GIB, format_bytes


def rehearsal_with(gpu: GpuSpec, **more: Any) -> Rehearsal:
    """A rehearsal of which only *more* is of interest."""
    plain: dict[str, Any] = {
        "method": "rehearsed",
        "breakdown": MemoryBreakdown(),
        "peak_allocated_bytes": 100 * 2**20,
        "peak_reserved_bytes": 0,
        "device_used": MemoryRange(low_bytes=0, expected_bytes=0, high_bytes=0),
        "peak_phase": "forward",
        "gpu_name": gpu.name,
        "torch": "2.13.0",
        "num_alloc_retries": 0,
        "steps": (),
    }
    return Rehearsal(**plain | more)


def facts_of(gpu: GpuSpec, paths: list[str]) -> dict[str, str]:
    """The facts of a rehearsal that held back a MiB in each of *paths*."""
    rehearsal = rehearsal_with(
        gpu,
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


def read(line: int, mib: int, basis: str) -> DeviceRead:
    """A read of the number 7 at a line, with so much behind it."""
    fields = {"place": f"{Path.cwd()}/train.py:{line}", "text": "", "count": 2, "answer": "7", "reason": "as it is", "basis": basis}
    return DeviceRead.model_validate(fields | {"following_bytes": mib * 2**20})


def test_values_that_decided_memory_are_told_of(a100: GpuSpec) -> None:
    """Three of them; what has next to nothing behind it, and what decides nothing, only where all is asked for."""
    reads = [
        read(1, 50, "data"),
        read(2, 20, "answer"),
        read(3, 9, "assumed"),
        read(4, 5, "data"),
        read(5, 0, "data"),
        read(6, 9, "ordinary"),
    ]
    rehearsal = rehearsal_with(a100, reads=tuple(reads))

    short, whole = (view_rehearsal(rehearsal, a100, shows_all=shows_all).reads for shows_all in (False, True))

    assert short[0] == "train.py:1 (2×): 50.0 MiB behind it; got 7, as it is"
    assert [line.split(" ")[0] for line in short] == ["train.py:1", "train.py:2", "train.py:3", "1"]
    assert [line.split(" ")[0] for line in whole] == [f"train.py:{line}" for line in range(1, 7)]
    assert whole[4] == "train.py:5 (2×): got 7, as it is"


def test_a_range_is_told_where_its_ends_read_differently(a100: GpuSpec) -> None:
    """A few bytes are no range for a person; JSON has them."""
    high = 2**30 + 512
    ends = [MemoryRange(low_bytes=low, expected_bytes=high, high_bytes=high) for low in (2**30, 2**29)]

    told = [dict(view_rehearsal(rehearsal_with(a100, assumed_range=end), a100).facts).get("by assumption") for end in ends]

    assert told[0] is None
    assert told[1] is not None
    assert told[1].startswith("512.0 MiB to 1.00 GiB: ")


def test_it_barely_fits_only_where_what_is_expected_does(a100: GpuSpec) -> None:
    """The upper bound is over the GPU in both."""
    total = a100.total_memory_bytes

    warnings = [
        view_rehearsal(
            rehearsal_with(
                a100,
                gpu_memory_bytes=total,
                device_used=MemoryRange(low_bytes=total - GIB, expected_bytes=expected, high_bytes=total + GIB),
            ),
            a100,
        ).warnings[0]
        for expected in (total, total + 1)
    ]

    vary = f"the CUDA context and libraries' workspaces vary, with which it may take {format_bytes(total + GIB)} of {format_bytes(total)}"
    assert warnings == [f"it barely fits: {vary}", f"it runs only if PyTorch gives cached memory back: {vary}"]


def test_what_is_at_least_taken_is_the_lower_end_of_what_is_assumed(a100: GpuSpec) -> None:
    """Another size was guessed as zero: neither end of the assumption is more than a lower bound, and the lower one holds in any case."""
    used = MemoryRange(low_bytes=3 * GIB, expected_bytes=4 * GIB, high_bytes=5 * GIB)
    guessed = {"device_used": used, "lower_bound_reasons": ("sizes were guessed as zero at train.py:3",)}

    headlines = [
        view_rehearsal(rehearsal_with(a100, **guessed, assumed_range=assumed), a100).headline
        for assumed in (MemoryRange(low_bytes=GIB, expected_bytes=4 * GIB, high_bytes=4 * GIB), None)
    ]

    assert headlines == [
        f"At least 1.00 GiB (4.00 GiB by the other end of what is assumed) on {a100.name}: sizes were guessed as zero at train.py:3",
        f"At least 4.00 GiB on {a100.name}: sizes were guessed as zero at train.py:3",
    ]


def test_how_much_a_program_needs_is_told_with_how_much_of_it_was_run(a100: GpuSpec) -> None:
    """To its end, so many steps of it, or with sizes that were guessed; a plan finds the batch, of which nothing is known here."""
    found = WouldFit(device_used_bytes=50 * GIB, gpus=("NVIDIA H100 PCIe",), is_of_program=True)
    changes: list[dict[str, Any]] = [
        {},
        {"num_steps": 5},
        {"num_steps": 1, "is_lower_bound": True},
        {"device_used_bytes": None},
    ]

    told = [view_rehearsal(rehearsal_with(a100), a100, found.model_copy(update=change)).would_fit for change in changes]

    assert all("`{micro_batch_size}`" in batch for batch, _ in told)
    of_size = "on a GPU of this kind with 50.00 GiB; GPUs with that much: NVIDIA H100 PCIe (rehearse on them to be sure)"
    assert [needed for _, needed in told] == [
        f"the program as it is {of_size}",
        f"the first 5 steps of the program as it is {of_size}",
        f"the first step of the program as it is {of_size.replace('50', 'at least 50')}",
        "more memory alone does not help: the program fails with unlimited memory too",
    ]


def test_whether_an_evaluation_was_run_is_told(a100: GpuSpec) -> None:
    """One that was reached counts; of one that `--steps` left out nothing is known. A program that ran to its end needs no word."""
    cases: list[dict[str, bool]] = [{"has_evaluated": True, "was_cut": True}, {"has_evaluated": True}, {"was_cut": True}, {}]

    told = [dict(view_rehearsal(rehearsal_with(a100, **case), a100).facts)["PyTorch"].partition(" step")[2] for case in cases]

    assert [text.lstrip("s") for text in told] == [
        ", and an evaluation", ", and an evaluation", "; what comes after them, as an evaluation, was not run", "",
    ]  # fmt: skip
