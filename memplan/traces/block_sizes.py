"""The sizes that CUDA's caching allocator works with.

Read in c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13; the comment beside each is its name there. Whoever
counts blocks takes the sizes from here: recordings, the simulated allocator, and the formulas.
"""

from memplan.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
"""Every block is a multiple of this."""

MAX_SMALL_BYTES = MIB  # kSmallSize
"""Requests up to this go to the small pool. A block of the large pool is split only where more than this is left."""

SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
"""A segment of the small pool; no other segment is so small."""

LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_, kLargeBuffer before it could be set
"""A segment of the large pool for requests below MIN_LARGE_BYTES."""

MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc
"""From here on a request gets a segment of its own size ..."""

LARGE_ROUND_BYTES = 2 * MIB  # kRoundLarge
"""... rounded up to a multiple of this."""


def reserved_bytes(request_bytes: int) -> int:
    """Return the most that the caching allocator reserves for a request, or a smaller one: a segment of its own."""
    if request_bytes == 0:
        return 0
    if request_bytes <= MAX_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    # A request below 10 MiB gets 20 MiB, one from there on as much as it needs.
    return max(LARGE_SEGMENT_BYTES, -(-request_bytes // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES)
