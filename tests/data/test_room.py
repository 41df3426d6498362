"""Data on the simulated GPU: what they take of it is what is said, to the byte, and what does not fit is refused with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.analysis.dataset_memory import dataset_reserved_bytes
from memplan.errors import UsageError
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from tests.conftest import RehearserOf
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

PROGRAMS = Path(__file__).with_name("device_steps_of_data.py")
MIB, GIB = 2**20, 2**30

Rehearse = Callable[..., Rehearsal]


@pytest.fixture
def rehearse(rehearser_of: RehearserOf) -> Rehearse:
    """Rehearse a program of this folder on a T4."""

    def run(program: str, memory_bytes: int | None = None, **values: Any) -> Rehearsal:
        gpu = find_gpu("t4")
        gpu = gpu if memory_bytes is None else gpu.model_copy(update={"total_memory_bytes": memory_bytes})
        return rehearser_of(f"{PROGRAMS}:{program}").rehearse(gpu=gpu, values=values, steps=1, context_bytes=0)

    return run


def test_the_samples_take_what_they_say_to_the_byte(rehearse: Rehearse) -> None:
    """1000 images of 3 × 32 × 32 in bf16 and their labels in int64, each as a block of 512 bytes and more."""
    found = rehearse("only_kept", num_samples=1000, size=32)

    assert found.peak_allocated_bytes == 1000 * 3 * 32 * 32 * 2 + -(-1000 * 8 // 512) * 512
    assert found.peak_reserved_bytes == 20 * MIB + 2 * MIB


def test_a_training_takes_its_batches_from_the_gpu(rehearse: Rehearse) -> None:
    """It has a verdict: nothing of the order is read back, though samples have names on the host."""
    found = rehearse("trained", num_samples=1000, size=32, batch=64)

    assert (found.verdict, found.reads) == ("fits", ())
    assert found.peak_allocated_bytes > 1000 * 3 * 32 * 32 * 2


@pytest.mark.parametrize("num_samples", [1000, 100_000])
def test_the_order_of_an_epoch_takes_no_more_than_is_counted(rehearse: Rehearse, num_samples: int) -> None:
    """Where samples are small, it takes more than they do."""
    found = rehearse("shuffled", num_samples=num_samples)

    assert found.peak_reserved_bytes <= dataset_reserved_bytes([8], num_samples)
    assert found.peak_allocated_bytes > 2 * 8 * num_samples


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({}, "10,000 samples of 588.0 KiB take 5.62 GiB, and 3.80 GiB are left of 4.00 GiB: the training takes 0 B at its peak (that of"),
        ({"others": 2 * GIB}, "and 1.80 GiB are left of 4.00 GiB: the training takes 2.00 GiB at its peak (given), and 5% stay free"),
        (
            {"after_peak": 3 * GIB},
            "and 819.2 MiB are left of 4.00 GiB: the training takes 3.00 GiB at its peak (that of this process so far), and 5% stay free",
        ),
    ],
)
def test_what_does_not_fit_beside_the_training_is_refused(rehearse: Rehearse, values: dict[str, int], error: str) -> None:
    """What was said that it takes, or else the peak that it has had."""
    with pytest.raises(UsageError) as caught:
        rehearse("refused", memory_bytes=4 * GIB, num_samples=10_000, size=224, **values)

    assert "the dataset does not fit on cuda:0" in caught.value.message
    assert error in caught.value.message


def test_a_gpu_that_is_full_is_told_with_what_holds_it(rehearse: Rehearse) -> None:
    """400 MiB of a GPU of 2 GiB are a context's, and the training's peak is the rest."""
    with pytest.raises(UsageError) as caught:
        rehearse("refused", memory_bytes=2 * GIB, num_samples=10, size=224, others=2 * GIB)

    assert "and 0 B are left of" in caught.value.message
    assert "of the GPU are in use beside PyTorch's tensors" in str(caught.value)


def test_memory_that_runs_out_after_all_is_told_too(rehearse: Rehearse) -> None:
    """By the allocator, for another reason than what the driver says is free."""
    with pytest.raises(UsageError, match=r"memory of cuda:0 ran out for 5,000 samples, though 14\.01 GiB were left: CUDA out of memory\n"):
        rehearse("limited", num_samples=5_000, size=224)


def test_a_plan_says_what_the_training_takes(rehearse: Rehearse) -> None:
    """Its upper bound, without the part of its context that is there already."""
    assert rehearse("beside_a_plan", num_samples=100).fits
    with pytest.raises(UsageError, match=r"the training takes \d+\.\d\d GiB at its peak \(planned\)"):
        rehearse("beside_a_plan", num_samples=25_000)
