"""What CUDA takes beside the allocator: by what was recorded on a GPU, and where nobody has looked."""

from __future__ import annotations

import json

import pytest

from memplan.hardware.catalog import catalog_gpus, find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.memory.cuda_context import context_of, usual_context
from tests.accuracy.on_card import RECORDINGS

MIB = 2**20

RECORDED = [
    json.loads(line) for line in (RECORDINGS / "context-steps-nvidia-h100-80gb-hbm3.jsonl").read_text(encoding="utf-8").splitlines()
]
"""NVIDIA H100 80GB HBM3, driver 580.159.04, PyTorch 2.11.0, 2026-11-26: after each of many calls, in processes of their own."""


def after(step: str) -> float:
    """Return MiB after *step*, in a process that had begun and did nothing else."""
    return next(
        row["outside_mib"] for row in RECORDED if row["of"][:2] == ["init", step if step != "init" else "linear"] and row["after"] == step
    )


def test_an_h200_is_taken_for_what_was_recorded_of_it() -> None:
    """NVIDIA H200, driver 580.159.04, PyTorch 2.11.0, 2026-11-27: after matrix products and convolutions as much as an H100."""
    lines = (RECORDINGS / "context-steps-nvidia-h200.jsonl").read_text(encoding="utf-8").splitlines()
    of_all = {row["after"]: row["outside_mib"] for row in map(json.loads, lines) if row["of"] == "all"}

    assert abs(usual_context(find_gpu("h200")).expected_bytes / MIB - of_all["conv_bf16"]) <= 1
    assert of_all["svd"] * MIB <= usual_context(find_gpu("h200")).high_bytes


def test_an_h100_is_taken_for_what_was_recorded_of_it() -> None:
    """After a linear layer and cuDNN: within 20 MiB of what is expected."""
    expected = usual_context(find_gpu("h100")).expected_bytes / MIB
    cudnn = after("conv") - after("init")

    assert expected == pytest.approx(after("linear") + cudnn, abs=20)


def test_the_upper_bound_covers_all_libraries_but_nccl() -> None:
    """Factorizations, Fourier transforms, recurrent networks and CUDA graphs in one process; NCCL's buffers are counted apart."""
    everything = next(row["outside_mib"] for row in RECORDED if row["of"] == "all" and row["after"] == "graph")

    assert everything > usual_context(find_gpu("h100")).expected_bytes / MIB
    assert usual_context(find_gpu("h100")).high_bytes / MIB >= everything


@pytest.mark.parametrize(("name", "mib"), [("rtx5090", 635), ("h100", after("init"))])
def test_what_was_seen_before_the_first_kernel_is_within_the_range(name: str, mib: float) -> None:
    """0.62 GiB of an RTX 5090, of which public logs tell; and no context is taken for less than the lowest that was seen."""
    context = usual_context(find_gpu(name))

    assert context.low_bytes <= mib * MIB <= context.high_bytes
    assert context.low_bytes == 130 * MIB


def test_a_gpu_that_holds_more_threads_has_a_larger_context() -> None:
    """Never below 400 MiB, with an upper bound of at least 630."""
    by_threads = sorted((card.spec for card in catalog_gpus()), key=lambda gpu: gpu.resident_threads)
    expected = [usual_context(gpu).expected_bytes for gpu in by_threads]

    assert expected == sorted(expected)
    assert expected[0] == 400 * MIB
    assert min(usual_context(gpu).high_bytes for gpu in by_threads) == 630 * MIB
    assert usual_context(find_gpu("b200")).expected_bytes > usual_context(find_gpu("a100-80")).expected_bytes > 600 * MIB


def test_a_size_that_is_given_is_the_expected_one() -> None:
    """The upper bound stays that of the kind of GPU."""
    given = usual_context(find_gpu("h100"), 500 * MIB)

    assert given.expected_bytes == 500 * MIB
    assert given.high_bytes == usual_context(find_gpu("h100")).high_bytes
    assert usual_context(find_gpu("h100"), 2000 * MIB).high_bytes == 2000 * MIB
    assert usual_context(find_gpu("t4"), 0).low_bytes == 0


def test_what_a_profile_measured_comes_before_what_is_usual() -> None:
    """With room for other kernels."""
    context = context_of(find_gpu("t4").model_copy(update={"context_bytes": 300 * MIB}))

    assert (context.low_bytes, context.expected_bytes, context.high_bytes) == (236 * MIB, 300 * MIB, 364 * MIB)


@pytest.mark.parametrize(
    ("capability", "threads"),
    [((7, 0), 2048), ((7, 5), 1024), ((8, 0), 2048), ((8, 6), 1536), ((8, 9), 1536), ((9, 0), 2048), ((12, 0), 1536)],
)
def test_threads_are_those_of_the_programming_guide(capability: tuple[int, int], threads: int) -> None:
    """CUDA C++ programming guide, technical specifications by compute capability; a GPU of which only the size is known is an A100."""
    gpu = GpuSpec(name="a GPU", total_memory_bytes=2**30, compute_capability=capability, multiprocessors=10, origin="by hand")

    assert gpu.resident_threads == 10 * threads
    assert GpuSpec(name="a GPU", total_memory_bytes=2**30, origin="by hand").resident_threads == 108 * 2048
