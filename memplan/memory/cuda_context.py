"""What CUDA takes of a GPU beside PyTorch's allocator: the context, loaded kernels, what libraries allocate for themselves."""

from __future__ import annotations

from typing import TypeVar

from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.units import MIB

Estimate = TypeVar("Estimate", bound=MemoryEstimate)

# What CUDA takes before the first tensor: 300 to 400 MB since kernels load lazily (CUDA 11.7); seen from 0.13 GiB (RTX A2000) to
# 0.62 GiB (RTX 5090).
CONTEXT_LOW_BYTES, CONTEXT_BYTES, CONTEXT_HIGH_BYTES = 130 * MIB, 400 * MIB, 630 * MIB

KERNELS_BYTES = 64 * MIB
"""Where a profile has measured it: what another program's kernels may take more or less, since each is loaded when it first runs."""


def context_of(gpu: GpuSpec) -> MemoryRange:
    """Return what CUDA takes of *gpu* in a process that trains."""
    measured = gpu.context_bytes
    if measured is None:
        return assumed_range(CONTEXT_BYTES)
    return MemoryRange(low_bytes=max(0, measured - KERNELS_BYTES), expected_bytes=measured, high_bytes=measured + KERNELS_BYTES)


def assumed_range(context_bytes: int) -> MemoryRange:
    """Return the range of a context that is taken for *context_bytes* and that nobody has measured."""
    return MemoryRange(
        low_bytes=min(context_bytes, CONTEXT_LOW_BYTES),
        expected_bytes=context_bytes,
        high_bytes=max(context_bytes, CONTEXT_HIGH_BYTES),
    )


def with_context(estimate: Estimate, gpu: GpuSpec) -> Estimate:
    """Return *estimate*, made for a GPU of which nothing was measured, with the context of *gpu*."""
    if gpu.context_bytes is None:
        return estimate
    context, used = context_of(gpu), estimate.device_used
    device_used = MemoryRange(
        low_bytes=max(0, used.low_bytes - CONTEXT_LOW_BYTES + context.low_bytes),
        expected_bytes=used.expected_bytes - CONTEXT_BYTES + context.expected_bytes,
        high_bytes=used.high_bytes - CONTEXT_HIGH_BYTES + context.high_bytes,
    )
    breakdown = estimate.breakdown.model_copy(update={"cuda_context_bytes": context.expected_bytes})
    return estimate.model_copy(update={"device_used": device_used, "breakdown": breakdown})
