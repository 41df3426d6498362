"""
What CUDA takes of a GPU beside PyTorch's allocator: the context, loaded kernels, what libraries allocate for themselves.

Recorded on an H100 (driver 580.159, CUDA 13.0, PyTorch 2.11, `tests/accuracy/recordings`): 610 MiB before the first kernel, 66 more for
cuBLAS, 64 for cuBLASLt, 16 to 24 for cuDNN; 742 to 766 in 49 programs that train. Beyond those: 96 for cuSOLVER, 8 for cuFFT, 70 for CUDA
graphs, of which the upper bound takes care. Most of the context is what CUDA sets aside for each thread that the GPU can hold: its stack.
"""

from __future__ import annotations

from typing import TypeVar

from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.units import MIB

Estimate = TypeVar("Estimate", bound=MemoryEstimate)

# By what two GPUs take before the first kernel: 610 MiB of an H100 (132 multiprocessors of 2048 threads), 0.13 GiB of an RTX A2000 (26 of
# 1536). It makes 0.58 GiB of an RTX 5090 (170 of 1536), of which 0.62 were seen.
_FIXED_BYTES, _THREAD_BYTES = 51 * MIB, 2170
_LIBRARIES_BYTES = 148 * MIB

# Of a GPU that nobody has measured it is never taken for less than this; contexts from 0.13 to 0.62 GiB were seen.
_LEAST_BYTES, _LEAST_HIGH_BYTES, CONTEXT_LOW_BYTES = 400 * MIB, 630 * MIB, 130 * MIB

KERNELS_BYTES = 64 * MIB
"""Where a profile has measured it: what another program's kernels may take more or less, since each is loaded when it first runs."""


def context_of(gpu: GpuSpec) -> MemoryRange:
    """Return what CUDA takes of *gpu* in a process that trains."""
    measured = gpu.context_bytes
    if measured is None:
        return usual_context(gpu)
    return MemoryRange(low_bytes=max(0, measured - KERNELS_BYTES), expected_bytes=measured, high_bytes=measured + KERNELS_BYTES)


def usual_context(gpu: GpuSpec, context_bytes: int | None = None) -> MemoryRange:
    """Return the range of the context of a kind of *gpu*, which is taken for *context_bytes* where that is given."""
    by_threads = _FIXED_BYTES + gpu.resident_threads * _THREAD_BYTES + _LIBRARIES_BYTES
    expected = max(_LEAST_BYTES, by_threads) if context_bytes is None else context_bytes
    high = max(_LEAST_HIGH_BYTES, by_threads * 5 // 4, expected)
    return MemoryRange(low_bytes=min(expected, CONTEXT_LOW_BYTES), expected_bytes=expected, high_bytes=high)


def with_context(estimate: Estimate, gpu: GpuSpec, *, made_on: GpuSpec) -> Estimate:
    """Return *estimate*, made on a kind of GPU of which nothing was measured, with the context of *gpu*."""
    if gpu.context_bytes is None and gpu.kind == made_on.kind:
        return estimate
    usual, context, used = usual_context(made_on), context_of(gpu), estimate.device_used
    device_used = MemoryRange(
        low_bytes=max(0, used.low_bytes - usual.low_bytes + context.low_bytes),
        expected_bytes=used.expected_bytes - usual.expected_bytes + context.expected_bytes,
        high_bytes=used.high_bytes - usual.high_bytes + context.high_bytes,
    )
    breakdown = estimate.breakdown.model_copy(update={"cuda_context_bytes": context.expected_bytes})
    return estimate.model_copy(update={"device_used": device_used, "breakdown": breakdown})
