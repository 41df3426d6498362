"""
Blocks and the pools that the free ones wait in.

A segment is what cudaMalloc gave; it is a chain of blocks, which is split and merged but never leaves its segment. Free blocks wait in the
pool of their stream and kind (small or large), by size and then by address, so that the first that is large enough is the best fit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

ADDRESS_BITS = 48
"""Of a key in a pool: the size stands above, so that keys sort by size and then by address."""

ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

ALLOCATED, FREE, UNMAPPED = range(3)


class Block:
    """A piece of a segment: allocated, free, or (in an expandable segment) addresses that no memory is mapped to."""

    __slots__ = ("address", "next", "pool", "prev", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool, prev: Block | None, next: Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.prev = prev
        self.next = next
        self.state = ALLOCATED

    @property
    def is_split(self) -> bool:
        """Say whether its segment has other blocks."""
        return self.prev is not None or self.next is not None

    def link(self) -> None:
        """Let the neighbours know of this block."""
        if self.prev is not None:
            self.prev.next = self
        if self.next is not None:
            self.next.prev = self

    def absorb(self, other: Block) -> None:
        """Take in *other*, which lies beside this block and which nothing else holds."""
        if self.prev is other:
            self.address = other.address
            self.prev = other.prev
        else:
            self.next = other.next
        self.size += other.size
        self.link()

    def has_room(self, size: int) -> bool:
        """Say whether *size* bytes begin here that are not allocated."""
        room, block = 0, self
        while room < size and block.state != ALLOCATED:
            room += block.size
            if block.next is None:
                break
            block = block.next
        return room >= size


class Pool:
    """The free blocks of one kind on one stream."""

    __slots__ = ("free", "is_small", "keys", "leaves_bytes", "page_bytes", "ranges", "splits_below", "stream", "unmapped")

    def __init__(self, stream: int, *, is_small: bool, page_bytes: int, leaves_bytes: int, splits_below: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.page_bytes = page_bytes
        """What an expandable segment maps at once."""
        self.leaves_bytes = leaves_bytes
        """A rest up to this stays with its block."""
        self.splits_below = splits_below
        """Requests from this size on get whole blocks."""
        self.keys: list[int] = []
        """Size and address of each free block, in order."""
        self.free: dict[int, Block] = {}
        """By address."""
        self.ranges: list[int] = []
        """Where expandable segments begin; pages are counted from there."""
        self.unmapped: list[Block] = []
        """By address."""

    def put(self, block: Block) -> None:
        """Let *block* wait here."""
        block.state = FREE
        insort(self.keys, (block.size << ADDRESS_BITS) | block.address)
        self.free[block.address] = block

    def take(self, block: Block) -> None:
        """Take *block* out."""
        keys = self.keys
        del keys[bisect_left(keys, (block.size << ADDRESS_BITS) | block.address)]
        del self.free[block.address]

    def index(self, size: int) -> int:
        """Return how many blocks are smaller than *size*."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def at(self, index: int) -> Block:
        """Return the free block at *index*, by size and address."""
        return self.free[self.keys[index] & ADDRESS_MASK]

    def blocks(self) -> list[Block]:
        """Return the free blocks by size and address."""
        return [self.free[key & ADDRESS_MASK] for key in self.keys]

    def put_unmapped(self, block: Block) -> None:
        """Keep *block*, which has no memory."""
        block.state = UNMAPPED
        insort(self.unmapped, block, key=lambda other: other.address)

    def take_unmapped(self, block: Block) -> None:
        """Take *block* out."""
        self.unmapped.remove(block)

    def range_of(self, block: Block) -> int:
        """Return where the expandable segment of *block* begins."""
        return self.ranges[bisect_right(self.ranges, block.address) - 1]
