"""What datasets take, worked out by hand: a sample exactly, all samples as the allocator has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.allocator.config import read_settings
from memplan.allocator.simulator import CachingAllocator, Card
from memplan.analysis.dataset_memory import (
    CHUNK_BYTES,
    DatasetMemory,
    SampleValue,
    Training,
    dataset_memory,
    dataset_reserved_bytes,
    most_samples,
    samples_in_chunk,
)
from memplan.dtypes import StoredDType
from memplan.errors import UsageError
from memplan.hardware.gpu import GpuSpec

GIB = 2**30


def image(dtype: StoredDType = "bfloat16", size: int = 224) -> SampleValue:
    """An image of three channels."""
    return SampleValue(name="image", shape=(3, size, size), dtype=dtype)


def gpu_of(total_bytes: int) -> GpuSpec:
    """A GPU with that memory."""
    return GpuSpec(name="a GPU", total_memory_bytes=total_bytes, origin="test")


def on_one(total_bytes: int, *values: SampleValue, used_bytes: int = 0, num_samples: int | None = None, margin: float = 0) -> DatasetMemory:
    """A dataset beside a training on one GPU."""
    return dataset_memory(values, [gpu_of(total_bytes)], lambda _: Training(used_bytes), num_samples=num_samples, margin=margin)


@pytest.mark.parametrize(("dtype", "sample_bytes", "dataset_gib"), [("float32", 602_112, 56.08), ("bfloat16", 301_056, 28.04)])
def test_a_hundred_thousand_images_are_not_a_hundred_gigabytes(dtype: StoredDType, sample_bytes: int, dataset_gib: float) -> None:
    """3 × 224 × 224 × 4 bytes and × 2; a guide says 1 MB a sample and 100 GB."""
    found = on_one(80 * GIB, image(dtype), num_samples=100_000)

    assert found.sample_bytes == sample_bytes
    assert round((found.dataset_bytes or 0) / GIB, 2) == dataset_gib


def test_what_the_training_and_the_margin_leave_is_for_samples() -> None:
    """24 GiB x 0.95 - 12 GiB."""
    found = on_one(24 * GIB, image(), used_bytes=12 * GIB, num_samples=38_474, margin=0.05)
    (gpu,) = found.gpus

    assert gpu.left_bytes == int(24 * GIB * 0.95) - 12 * GIB
    # The order takes six segments of 2 MiB. Of the 11,583,828,787 bytes that are left then, 5523 x 2 MiB hold images of 301,056 bytes.
    assert gpu.num_samples_that_fit == 38_473
    assert (gpu.fits, found.fits) == (False, False)


def test_where_the_training_does_not_fit_no_sample_does() -> None:
    """Whatever is free."""
    found = dataset_memory([image()], [gpu_of(GIB)], lambda _: Training(0, fits=False))

    assert (found.gpus[0].training_fits, found.gpus[0].num_samples_that_fit, found.fits) == (False, 0, False)


def test_a_chunk_is_a_sample_at_least_and_the_dataset_at_most() -> None:
    """64 MiB of images are 222 in bf16."""
    assert samples_in_chunk(301_056) == 222
    assert samples_in_chunk(301_056, 10) == 10
    assert samples_in_chunk(CHUNK_BYTES * 3, 10) == 1


def test_a_sample_without_bytes_is_refused() -> None:
    """There would be room for any number of them."""
    with pytest.raises(UsageError, match="takes no bytes"):
        on_one(GIB, SampleValue(shape=(0, 3), dtype="float32"))


@given(sizes=st.lists(st.integers(0, 5_000_000), min_size=1, max_size=4), num_samples=st.integers(1, 300))
def test_the_allocator_reserves_no_more_than_is_said(sizes: list[int], num_samples: int) -> None:
    """The simulated one, which is PyTorch's event for event, from empty: each value is one request."""
    allocator = CachingAllocator(Card(2**46, 2**46), read_settings(""))
    for size in filter(None, sizes):
        allocator.malloc(size * num_samples)

    assert allocator.reserved_bytes <= dataset_reserved_bytes(sizes, num_samples)


@given(sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=3), num_samples=st.integers(1, 50))
def test_more_samples_never_take_less(sizes: list[int], num_samples: int) -> None:
    """Else a search for the most would end too early. (The allocator itself reserves 20 MiB for 9 MiB, and 12 MiB for 11.)"""
    assert dataset_reserved_bytes(sizes, num_samples) <= dataset_reserved_bytes(sizes, num_samples + 1)


@given(sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=3), left_bytes=st.integers(0, 2**40))
def test_the_most_samples_fit_and_one_more_does_not(sizes: list[int], left_bytes: int) -> None:
    """At any size."""
    most = most_samples(sizes, left_bytes)

    assert most == 0 or dataset_reserved_bytes(sizes, most) <= left_bytes
    assert dataset_reserved_bytes(sizes, most + 1) > left_bytes
