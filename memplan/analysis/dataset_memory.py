"""
How much of a dataset can live on a GPU beside the training: arithmetic on shapes, types and sizes.

Samples are kept as one tensor for each of their values, of all samples together. So the bytes of a sample are exactly those of its values,
and what a dataset takes of the GPU is what the caching allocator reserves for so many tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from memplan.description import Description
from memplan.dtypes import StoredDType, bytes_of_element
from memplan.errors import UsageError
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import DEFAULT_MARGIN, MemoryBudget
from memplan.planner.search import largest_fitting
from memplan.traces.block_sizes import reserved_bytes
from memplan.units import MIB

CHUNK_BYTES = 64 * MIB
"""Samples that are collected on the host before they go to the device together."""

SHUFFLE_BYTES = (8, 8, 8, 8, 17)
"""
What torch.randperm asks of the GPU for each sample, request by request: the order of an epoch, and what it is sorted with.

Rehearsed with PyTorch 2.13 for 1000 to a million samples: four requests of 8 bytes a sample, and that of the sorting itself, 16.5 at most.
Beside them it asks for a few bytes, once.
"""

LARGEST_NUM_SAMPLES = 2**40
"""Where a search for the most samples ends."""


class SampleValue(Description):
    """One value of a sample that goes to the device."""

    name: str = ""
    """Where it is in a sample; empty where the sample is the value itself."""

    shape: tuple[NonNegativeInt, ...]
    """Without a dimension for the samples."""

    dtype: StoredDType
    """The type of its elements, by torch's name."""

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of the value in one sample."""
        return math.prod(self.shape) * bytes_of_element(self.dtype)


class DatasetOnGpu(Description):
    """How many samples one GPU has memory for."""

    gpu: GpuSpec
    """The GPU."""

    budget_bytes: NonNegativeInt
    """What programs may use of it, the margin taken off."""

    training_bytes: NonNegativeInt
    """What the training takes of it at its peak, at its upper bound and with the CUDA context."""

    left_bytes: NonNegativeInt
    """What the training leaves for samples."""

    training_fits: bool
    """Whether the training itself is within the budget."""

    num_samples_that_fit: NonNegativeInt
    """The most samples that can be kept there."""

    fits: bool
    """Whether all samples of the dataset can; where their number is not known, whether one can."""


class DatasetMemory(Description):
    """What a dataset takes: of GPUs, of the host while it is filled, and of a disk."""

    schema_version: int = 1
    """Of this format; it grows when a field changes its meaning or goes."""

    values: tuple[SampleValue, ...]
    """What of a sample goes to the device."""

    host_values: tuple[str, ...] = ()
    """What of a sample stays on the host: texts."""

    sample_bytes: PositiveInt
    """Of one sample on the device, exactly."""

    num_samples: PositiveInt | None = None
    """Samples of the dataset; None where nobody said."""

    dataset_bytes: PositiveInt | None = None
    """Of all samples; as much is read from a cache on disk, which has a header of some KiB besides."""

    filling_bytes: NonNegativeInt
    """Host memory that filling takes at a time, beside what reading one sample takes."""

    margin: float
    """Share of a GPU's free memory that stays free."""

    gpus: tuple[DatasetOnGpu, ...]
    """Each GPU."""

    @property
    def fits(self) -> bool:
        """Say whether it fits on at least one GPU."""
        return any(gpu.fits for gpu in self.gpus)


class Training(NamedTuple):
    """What the training takes of one GPU, beside which samples are to be kept."""

    used_bytes: int
    """At its upper bound, the CUDA context included."""
    fits: bool = True
    """Whether it fits there at all."""


def dataset_memory(
    values: Sequence[SampleValue],
    gpus: Sequence[GpuSpec],
    training_on: Callable[[GpuSpec], Training],
    *,
    host_values: Sequence[str] = (),
    num_samples: int | None = None,
    margin: float = DEFAULT_MARGIN,
) -> DatasetMemory:
    """
    Return what a dataset with samples of *values* takes, and how many samples each of *gpus* has memory for.

    *training_on* says what the training takes of a GPU. Raises UsageError where a sample takes nothing.
    """
    sample_bytes = sum(value.sample_bytes for value in values)
    if sample_bytes == 0:
        raise UsageError("a sample takes no bytes on the GPU", hint="give shapes without a dimension of 0")
    return DatasetMemory(
        values=tuple(values),
        host_values=tuple(host_values),
        sample_bytes=sample_bytes,
        num_samples=num_samples,
        dataset_bytes=None if num_samples is None else num_samples * sample_bytes,
        filling_bytes=samples_in_chunk(sample_bytes, num_samples) * sample_bytes,
        margin=margin,
        gpus=tuple(_on_gpu(gpu, values, training_on(gpu), num_samples=num_samples, margin=margin) for gpu in gpus),
    )


def samples_in_chunk(sample_bytes: int, num_samples: int | None = None) -> int:
    """Return how many samples are collected on the host at a time: one at least, and no more than there are."""
    chunk = max(1, CHUNK_BYTES // max(1, sample_bytes))
    return chunk if num_samples is None else min(chunk, num_samples)


def dataset_reserved_bytes(sizes: Sequence[int], num_samples: int) -> int:
    """Return what *num_samples* samples, of values with these *sizes* in bytes, take of a GPU at most, with the order of an epoch."""
    return sum(reserved_bytes(size * num_samples) for size in (*sizes, *SHUFFLE_BYTES)) + reserved_bytes(1)


def most_samples(sizes: Sequence[int], left_bytes: int) -> int:
    """Return how many samples with values of these *sizes* in bytes fit into *left_bytes*."""

    def fits(num_samples: int) -> bool:
        return dataset_reserved_bytes(sizes, num_samples) <= left_bytes

    return largest_fitting(fits, low=1, high=LARGEST_NUM_SAMPLES) or 0


def _on_gpu(gpu: GpuSpec, values: Sequence[SampleValue], training: Training, *, num_samples: int | None, margin: float) -> DatasetOnGpu:
    budget = MemoryBudget(total_bytes=gpu.total_memory_bytes, others_used_bytes=gpu.others_used_bytes, margin=margin)
    left_bytes = max(0, budget.budget_bytes - training.used_bytes) if training.fits else 0
    most = most_samples([value.sample_bytes for value in values], left_bytes)
    return DatasetOnGpu(
        gpu=gpu,
        budget_bytes=budget.budget_bytes,
        training_bytes=training.used_bytes,
        left_bytes=left_bytes,
        training_fits=training.fits and training.used_bytes <= budget.budget_bytes,
        num_samples_that_fit=most,
        fits=most >= (num_samples or 1),
    )
