"""
Where segments lie, which decides how the allocator breaks ties: of two free blocks of a size it takes the lower one.

As `standin/csrc/addresses.c` has it, by what was recorded on an H100: the driver reserves addresses in chunks of whole 32 MiB, each below
the one before; it takes the lowest free range of its chunks that is large enough, and a new chunk where there is none. What CUDA has left
free of its own is filled first.

From 2.13 on PyTorch takes the block of the older segment instead, wherever that lies: as if each new segment lay above all others. 2.12
goes by an age of blocks that changes when they are split and merged; that is not simulated, and it is taken for 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from memplan.units import MIB

CHUNK_BYTES, LEFT_FREE_BYTES = 32 * MIB, 384 * MIB
PAGE_BYTES = 2 * MIB
"""What the GPU hands out is a multiple of this."""


class Addresses(Protocol):
    """Those that cudaMalloc gives; sizes are whole pages."""

    def take(self, size: int) -> int:
        """Return the address of *size* bytes that are in use from now on."""
        ...

    def give(self, address: int, size: int) -> None:
        """Take *size* bytes at *address* back."""
        ...


class RisingAddresses:
    """Each above all others that were ever given, with a page between: the lower of two segments is the older one."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, size: int) -> int:
        """Return the address of *size* bytes."""
        address = self._next
        self._next += size + PAGE_BYTES
        return address

    def give(self, address: int, size: int) -> None:
        """Do nothing: they are not given again."""


class ChunkAddresses:
    """Those of the driver, below *top*."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._begin()

    def _begin(self) -> None:
        self._lowest = self._top - LEFT_FREE_BYTES
        self._bytes_in_use = 0
        self._free = [(self._lowest, self._top)]
        """Where each free range begins and ends, the lowest first."""

    def take(self, size: int) -> int:
        """Return the address of *size* bytes that are in use from now on."""
        free = self._free
        self._bytes_in_use += size
        at = next((at for at, (begin, end) in enumerate(free) if end - begin >= size), None)
        if at is None:
            chunk = -(-size // CHUNK_BYTES) * CHUNK_BYTES
            self._lowest -= chunk
            free.insert(0, (self._lowest, self._lowest + chunk))
            at = 0
        begin, end = free.pop(at)
        if end > begin + size:
            free.insert(at, (begin + size, end))
        return begin

    def give(self, address: int, size: int) -> None:
        """Take *size* bytes at *address* back, for others to have; where nothing is in use any more all is as at the beginning."""
        self._bytes_in_use -= size
        if self._bytes_in_use <= 0:
            self._begin()
            return
        free, end = self._free, address + size
        at = bisect_left(free, (address, end))
        if at < len(free) and free[at][0] == end:
            end = free.pop(at)[1]
        if at and free[at - 1][1] == address:
            address = free.pop(at - 1)[0]
        insort(free, (address, end))
