"""
CUDA's caching allocator as PyTorch has it, in Python: the same segments, splits, merges, retries and failures, on a GPU of any size.

After c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13; the functions have its names where it has one for the same thing. A request is
rounded up, and takes the smallest free block of its stream and kind that is large enough (`_find`), which may be split; else the GPU is
asked for a segment (`_grow`); where the GPU is full, cached segments are given back, at first only as many as are needed, then all, and it
is asked once more. That last is a *retry*: it costs time, and a program that needs any is close to its end.

Memory that another stream still uses is free for the allocator when that stream has done with it. When that is, only a trace knows: its
`free_completed`, which is what `free` means here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memplan.allocator.addresses import PAGE_BYTES, Addresses, ChunkAddresses, RisingAddresses
from memplan.allocator.blocks import ADDRESS_BITS, ADDRESS_MASK, ALLOCATED, FREE, UNMAPPED, Block, Pool
from memplan.allocator.config import NUM_INTERVALS, AllocatorSettings
from memplan.errors import UsageError
from memplan.traces.block_sizes import LARGE_ROUND_BYTES, MAX_SMALL_BYTES, MIN_BLOCK_BYTES, MIN_LARGE_BYTES, SMALL_SEGMENT_BYTES
from memplan.traces.snapshot import Segment

_FIRST_ADDRESS, _TOP_ADDRESS = 0x10000000000, 0x600000000000
"""What cudaMalloc gives lies between them, what expandable segments reserve above: 48 bits have room for both without end."""

_UNLIMITED = 1 << 64

SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"]


class OutOfMemoryError(Exception):
    """The GPU has not enough, whatever is given back."""

    def __init__(self, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes were asked for, the GPU has {free_bytes} left")
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes


class DivergedError(Exception):
    """A segment is to lie where a recorded GPU had put one, and another one lies there still: what was recorded went otherwise."""


class SegmentEvent(NamedTuple):
    """What the allocator did to its segments."""

    action: SegmentAction
    address: int
    size_bytes: int
    stream: int


class Route(NamedTuple):
    """Where a request goes."""

    size_bytes: int
    """Rounded."""
    pool: Pool


@dataclass
class Card:
    """The memory that cudaMalloc gives, in whole pages."""

    total_bytes: int
    """All of it: fractions, and the room of an expandable segment, go by this."""

    free_bytes: int
    """What is left for the allocator: without the context and what others use."""

    addresses: Addresses = field(default_factory=lambda: RisingAddresses(_FIRST_ADDRESS))

    next_reserved: int = _TOP_ADDRESS

    places: list[int] = field(default_factory=list)
    """Where a recorded GPU had put its segments, the first first: those that come are put there too."""

    placed: dict[int, int] = field(default_factory=dict)
    """Where those lie that were put there, and their bytes."""

    def break_ties_by_address(self) -> None:
        """Put the segments that come where the driver would, for an allocator that goes by that."""
        self.addresses = ChunkAddresses(_TOP_ADDRESS)

    def malloc(self, size: int) -> int | None:
        """Return the address of *size* bytes, None when there are not so many."""
        if not self.take(size):
            return None
        return self._place(size) if self.places else self.addresses.take(paged(size))

    def _place(self, size: int) -> int:
        address = self.places.pop(0)
        if any(begin < address + size and address < begin + length for begin, length in self.placed.items()):
            raise DivergedError
        self.placed[address] = size
        return address

    def take(self, size: int) -> bool:
        """Count *size* bytes as used, where there are so many."""
        if paged(size) > self.free_bytes:
            return False
        self.free_bytes -= paged(size)
        return True

    def give(self, size: int) -> None:
        """Take *size* bytes back."""
        self.free_bytes += paged(size)

    def free(self, address: int, size: int) -> None:
        """Take *size* bytes at *address* back, and the address."""
        self.give(size)
        if self.placed.pop(address, None) is None:
            self.addresses.give(address, paged(size))

    def reserve(self, size: int) -> int:
        """Return addresses for *size* bytes, with a page behind them."""
        if self.places:
            return self.places.pop(0)
        address = self.next_reserved
        self.next_reserved += paged(size) + PAGE_BYTES
        return address


def paged(size: int) -> int:
    """Return *size* in whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class CachingAllocator:
    """The allocator of one process on one GPU. Raises UsageError for settings that choose another one."""

    def __init__(self, card: Card, settings: AllocatorSettings | None = None) -> None:
        self.card = card
        self.settings = settings or AllocatorSettings()
        if self.settings.backend != "native":
            raise UsageError(
                f"the allocator {self.settings.backend} is CUDA's own, and not simulated", hint="take `backend:` out of the settings"
            )
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = self.num_ooms = 0
        self.events: list[SegmentEvent] = []
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._routes: dict[int, dict[int, Route]] = {}
        limit = self.settings.max_split_bytes
        self._max_split_bytes = limit if limit is not None else _UNLIMITED
        fraction = self.settings.memory_fraction
        self._allowed_bytes = _UNLIMITED if fraction is None else int(fraction * card.total_bytes)
        self._collects = fraction is not None and self.settings.garbage_collection_threshold > 0.0
        self._num_searches = 0
        """How often a large free block was looked for: the clock by which garbage is old."""
        self._idle_since: dict[int, int] = {}
        """What that clock showed when the large block at an address became free."""
        self._is_plain = not self._collects and not self.settings.expandable_segments and limit is None

    # asking and giving back

    # These two are the whole of a replay's time, and so they do by hand what `_find`, `Pool.take` and `Pool.put` say in words.

    def malloc(self, requested_bytes: int, stream: int = 0) -> Block:
        """Return a block of at least *requested_bytes*. Raises OutOfMemoryError."""
        routes = self._routes.get(stream)
        if routes is None:
            routes = self._new_stream(stream)
        size, pool = routes.get(requested_bytes) or self._new_route(routes, requested_bytes, stream)
        keys, free = pool.keys, pool.free
        index = bisect_left(keys, size << ADDRESS_BITS)
        if self._is_plain and index < len(keys):
            block = free.pop(keys.pop(index) & ADDRESS_MASK)
        else:
            block = self._find(pool, size, index) or self._grow(pool, size, requested_bytes)
        remaining = block.size - size
        if remaining > pool.leaves_bytes and size < pool.splits_below:
            prev, address = block.prev, block.address
            first = Block(address, size, pool, prev, block)
            if prev is not None:
                prev.next = first
            block.prev = first
            block.address = address = address + size
            block.size = remaining
            block.state = FREE
            insort(keys, (remaining << ADDRESS_BITS) | address)
            free[address] = block
            if self._collects:
                self._idle_since[address] = self._num_searches
            block = first
        else:
            block.state = ALLOCATED
            size = block.size
        self.allocated_bytes = allocated = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes:  # noqa: PLR1730  (a call of max takes longer than all of this)
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Let *block* be used again, merged with what is free beside it."""
        size, address, pool = block.size, block.address, block.pool
        self.allocated_bytes -= size
        keys, free = pool.keys, pool.free
        prev, behind = block.prev, block.next
        if prev is not None and prev.state == FREE:
            address = prev.address
            del keys[bisect_left(keys, (prev.size << ADDRESS_BITS) | address)], free[address]
            size += prev.size
            block.prev = prev = prev.prev
            if prev is not None:
                prev.next = block
        if behind is not None and behind.state == FREE:
            del keys[bisect_left(keys, (behind.size << ADDRESS_BITS) | behind.address)], free[behind.address]
            size += behind.size
            block.next = behind = behind.next
            if behind is not None:
                behind.prev = block
        block.size = size
        block.address = address
        block.state = FREE
        insort(keys, (size << ADDRESS_BITS) | address)
        free[address] = block
        if self._collects:
            self._idle_since[address] = self._num_searches

    def empty_cache(self) -> None:
        """Give back every segment that nothing is allocated in, as torch.cuda.empty_cache() does."""
        self._release_cached_blocks()

    @property
    def goes_by_time(self) -> bool:
        """Say whether it does other things with memory that has been free for longer: settings that collect garbage have it do so."""
        return self._collects

    def state(self) -> tuple[object, ...]:
        """
        Return what is free, and what it has done to its segments.

        Where that is the same later on, and what is alive lies where it did, the same requests come to the same again.
        """
        return len(self.events), self.num_alloc_retries, [pool.keys[:] for pool in self._pools.values()]

    def adopt(self, segment: Segment, allocated: Sequence[tuple[int, int]]) -> dict[int, Block]:
        """
        Take over *segment*, which was there before; return its blocks by address.

        *allocated* are the address and bytes asked for of what lies in it. A rest too small to be split off belongs to its block.
        """
        if segment.stream not in self._routes:
            self._new_stream(segment.stream)
        pool = self._pools[segment.stream, segment.is_small]
        self._count("segment_alloc", segment.address, segment.size_bytes, segment.stream)
        self.card.free_bytes -= segment.size_bytes
        self.card.placed[segment.address] = segment.size_bytes
        blocks: dict[int, Block] = {}
        inside = sorted(allocated)
        end = segment.address + segment.size_bytes
        at, last = segment.address, None
        for (address, requested_bytes), following in zip(inside, [*(address for address, _ in inside[1:]), end], strict=False):
            if address > at:
                last = self._adopt_block(at, address - at, pool, last, is_free=True)
            size = self.round_size(requested_bytes)
            if following - address - size <= pool.leaves_bytes:
                size = following - address
            last = blocks[address] = self._adopt_block(address, size, pool, last, is_free=False)
            at = address + size
        if at < end:
            self._adopt_block(at, end - at, pool, last, is_free=True)
        return blocks

    def _adopt_block(self, address: int, size: int, pool: Pool, prev: Block | None, *, is_free: bool) -> Block:
        block = Block(address, size, pool, prev, None)
        block.link()
        if is_free:
            pool.put(block)
        else:
            self.allocated_bytes += size
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def has_room(self, requested_bytes: int, stream: int = 0) -> bool:
        """Say whether a request could be met without giving anything back."""
        size = self.round_size(requested_bytes)
        if stream not in self._routes:
            self._new_stream(stream)
        pool = self._pools[stream, size <= MAX_SMALL_BYTES]
        index = pool.index(size)
        if index < len(pool.keys) and self._best_fit(pool, size, index) < len(pool.keys):
            return True
        if self._collects and self._garbage_bytes() > 0:
            return False
        wanted = self._segment_size(size)
        if self.reserved_bytes + wanted > self._allowed_bytes:
            return False
        return (self._unmapped_bytes(pool, size) if self.settings.expandable_segments else wanted) <= self.card.free_bytes

    def round_size(self, requested_bytes: int) -> int:
        """Return the bytes that *requested_bytes* take: multiples of 512, or of a part of a power of two."""
        if requested_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(requested_bytes.bit_length() - 21, 0), NUM_INTERVALS - 1)
        divisions = self.settings.roundup_power2_divisions[interval]
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (requested_bytes.bit_length() - 1)) // divisions
            return -(-requested_bytes // step) * step
        return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def _new_stream(self, stream: int) -> dict[int, Route]:
        """Make the pools of *stream*, and the memory of what its requests take and from where."""
        self._pools[stream, True] = self._new_pool(stream, is_small=True)
        self._pools[stream, False] = self._new_pool(stream, is_small=False)
        routes = self._routes[stream] = {}
        return routes

    def _new_route(self, routes: dict[int, Route], requested_bytes: int, stream: int) -> Route:
        size = self.round_size(requested_bytes)
        route = routes[requested_bytes] = Route(size, self._pools[stream, size <= MAX_SMALL_BYTES])
        return route

    def _new_pool(self, stream: int, *, is_small: bool) -> Pool:
        is_finely_split = is_small or self.settings.expandable_segments
        return Pool(
            stream,
            is_small=is_small,
            page_bytes=SMALL_SEGMENT_BYTES if is_small else self.settings.large_segment_bytes,
            leaves_bytes=MIN_BLOCK_BYTES - 1 if is_finely_split else MAX_SMALL_BYTES,
            splits_below=_UNLIMITED if is_finely_split else self._max_split_bytes,
        )

    # finding a free block

    def _find(self, pool: Pool, size: int, index: int) -> Block | None:
        """Take the smallest free block of *pool* that is large enough, and not oversized, out of it; smaller ones end before *index*."""
        if not pool.is_small:
            self._num_searches += 1
        keys = pool.keys
        if index < len(keys):
            index = self._best_fit(pool, size, index)
        if index >= len(keys):
            return None
        return pool.free.pop(keys.pop(index) & ADDRESS_MASK)

    def _best_fit(self, pool: Pool, size: int, index: int) -> int:
        """Return the index of the block for *size*, of those from *index* on that are large enough; the end where there is none."""
        if self.settings.expandable_segments:
            index = _least_expandable(pool, index)
        limit = self._max_split_bytes
        if limit < _UNLIMITED:
            found = pool.keys[index] >> ADDRESS_BITS
            if size < limit <= found or (size >= limit and found >= size + self.settings.max_non_split_rounding_bytes):
                return len(pool.keys)
        return index

    # growing

    def _grow(self, pool: Pool, size: int, requested_bytes: int) -> Block:
        """Return a block of a new segment, or of a longer one; give cached segments back where the GPU is full."""
        if self._collects:
            self._garbage_collect()
        block = self._alloc_block(pool, size)
        if block is None and self._release_available_cached_blocks(pool, size):
            block = self._alloc_block(pool, size)
        if block is None:
            self._release_cached_blocks()
            self.num_alloc_retries += 1
            block = self._alloc_block(pool, size)
        if block is None:
            self.num_ooms += 1
            self.events.append(SegmentEvent("oom", self.card.free_bytes, size, pool.stream))
            raise OutOfMemoryError(requested_bytes, self.card.free_bytes)
        return block

    def _alloc_block(self, pool: Pool, size: int) -> Block | None:
        """Return a block that no one else holds, of memory that the GPU has given, None where it has no more."""
        segment_bytes = self._segment_size(size)
        if self.reserved_bytes + segment_bytes > self._allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        address = self.card.malloc(segment_bytes)
        if address is None:
            return None
        self._count("segment_alloc", address, segment_bytes, pool.stream)
        return Block(address, segment_bytes, pool, None, None)

    def _segment_size(self, size: int) -> int:
        if size <= MAX_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.settings.large_segment_bytes
        return -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES

    def _count(self, action: SegmentAction, address: int, size: int, stream: int) -> None:
        """Note that *size* bytes at *address* were reserved, or given back."""
        self.reserved_bytes += size if action in ("segment_alloc", "segment_map") else -size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.events.append(SegmentEvent(action, address, size, stream))

    # expandable segments

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Return a block of *size* bytes or more, of pages mapped where there is room; None where the GPU has no pages left."""
        if self._range_bytes(pool) < size:
            return None
        block = self._find_expandable_block(pool, size)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # which took in what was free before it
        pool.take(block)
        return block

    def _find_expandable_block(self, pool: Pool, size: int) -> Block:
        """Return the first block of a run of free and unmapped ones with room for *size*; of a new segment where there is none."""
        for unmapped in pool.unmapped:
            first = unmapped.prev if unmapped.prev is not None and unmapped.prev.state != ALLOCATED else unmapped
            if first.has_room(size):
                return first
        length = self._range_bytes(pool)
        pool.ranges.append(self.card.reserve(length))
        block = Block(pool.ranges[-1], length, pool, None, None)
        pool.put_unmapped(block)
        return block

    def _range_bytes(self, pool: Pool) -> int:
        """Return how many addresses an expandable segment has: more than the GPU, so that pages can move from the front to the end."""
        room = self.card.total_bytes + self.card.total_bytes // 8
        return -(-room // pool.page_bytes) * pool.page_bytes

    def _unmapped_bytes(self, pool: Pool, size: int) -> int:
        """Return the bytes that would have to be mapped for *size*."""
        block, room, mapped = self._find_expandable_block(pool, size), 0, 0
        while room < size:
            taken = block.size
            if block.state == UNMAPPED:
                taken = -(-min(size - room, block.size) // pool.page_bytes) * pool.page_bytes
                mapped += taken
            room += taken
            if block.next is not None:
                block = block.next
        return mapped

    def _map(self, block: Block, size: int) -> bool:
        """Map pages for the first *size* bytes of *block*, which has none, and let it wait among the free ones; False on a full GPU."""
        pool, address = block.pool, block.address
        pages = -(-size // pool.page_bytes)
        for page in range(pages):
            if not self.card.take(pool.page_bytes):
                for _ in range(page):
                    self.card.give(pool.page_bytes)
                return False
        mapped_bytes = pages * pool.page_bytes
        pool.take_unmapped(block)
        if mapped_bytes < block.size:
            rest = Block(address + mapped_bytes, block.size - mapped_bytes, pool, block, block.next)
            rest.link()
            block.size = mapped_bytes
            pool.put_unmapped(rest)
        self.allocated_bytes += block.size  # as if it had been: to free it is to merge it
        self.free(block)
        self._count("segment_map", address, mapped_bytes, pool.stream)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of *block*, which is free; what is left of it before and behind stays free."""
        pool = block.pool
        page_bytes, origin = pool.page_bytes, pool.range_of(block)
        begin = origin + -(-(block.address - origin) // page_bytes) * page_bytes
        end = origin + (block.address + block.size - origin) // page_bytes * page_bytes
        if begin >= end:
            return
        pool.take(block)
        if begin > block.address:
            before = Block(block.address, begin - block.address, pool, block.prev, block)
            before.link()
            pool.put(before)
        if end < block.address + block.size:
            behind = Block(end, block.address + block.size - end, pool, block, block.next)
            behind.link()
            pool.put(behind)
        block.address, block.size = begin, end - begin
        for other in (block.prev, block.next):
            if other is not None and other.state == UNMAPPED:
                pool.take_unmapped(other)
                block.absorb(other)
        pool.put_unmapped(block)
        for _ in range((end - begin) // page_bytes):
            self.card.give(page_bytes)
        self._count("segment_unmap", begin, end - begin, pool.stream)

    # giving back

    def _release_available_cached_blocks(self, pool: Pool, size: int) -> bool:
        """With a limit to splitting: give back the smallest oversized block that is large enough, or as many large ones as it takes."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        index = pool.index(wanted)
        if index < len(pool.keys) and not self.settings.expandable_segments:
            self._release_block(pool.at(index))
            return True
        released = 0
        for block in reversed(pool.blocks()[:index]):
            if released >= wanted or block.size < limit or self.settings.expandable_segments:
                break
            released += block.size
            self._release_block(block)
        return released >= wanted

    def _release_cached_blocks(self) -> None:
        """Give back every segment of which all is free, and every page of expandable ones: of large blocks first."""
        for _, pool in sorted(self._pools.items(), key=lambda item: (item[0][1], item[0][0])):
            for block in pool.blocks():
                if self.settings.expandable_segments:
                    self._unmap(block)
                    if not block.is_split and block.state == UNMAPPED:
                        pool.take_unmapped(block)
                        pool.ranges.remove(block.address)
                elif not block.is_split:
                    self._release_block(block)

    def _release_block(self, block: Block) -> None:
        block.pool.take(block)
        self.card.free(block.address, block.size)
        self._count("segment_free", block.address, block.size, block.pool.stream)

    def _garbage_collect(self) -> None:
        """
        Above the threshold: give back whole large segments that have been idle longer than most, again until below it.

        A round ends with its last block, not at the threshold: so this does not happen often.
        """
        target = self._garbage_bytes()
        whole = [block for block in self._large_free_blocks() if not block.is_split]
        if target <= 0 or not whole:
            return
        total_age, reclaimed, has_freed = sum(map(self._age, whole)), 0, True
        while reclaimed < target and has_freed and whole:
            least_age = total_age / len(whole)
            has_freed = False
            for block in tuple(whole):
                if self._age(block) >= least_age and not self.settings.expandable_segments:
                    has_freed = True
                    reclaimed += block.size
                    total_age -= self._age(block)
                    whole.remove(block)
                    self._release_block(block)

    def _garbage_bytes(self) -> int:
        """Return how much is reserved above the threshold."""
        return self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed_bytes)

    def _large_free_blocks(self) -> list[Block]:
        pools = [self._pools[key] for key in sorted(self._pools) if not key[1]]
        return [block for pool in pools for block in pool.blocks()]

    def _age(self, block: Block) -> int:
        return self._num_searches - self._idle_since.get(block.address, 0)


def _least_expandable(pool: Pool, index: int) -> int:
    """
    Return the index of the best fit from *index* on where segments expand.

    A free block that could grow into the room behind it counts with that room: the next is the better fit where it fills less.
    """
    keys, free = pool.keys, pool.free
    block = free[keys[index] & ADDRESS_MASK]
    behind = block.next
    size = block.size + (behind.size if behind is not None and behind.state == UNMAPPED else 0)
    while (behind is not None or block.prev is not None) and index + 1 < len(keys):
        block = free[keys[index + 1] & ADDRESS_MASK]
        behind = block.next
        following = block.size + (behind.size if behind is not None and behind.state == UNMAPPED else 0)
        if following >= size:
            break
        index, size = index + 1, following
    return index
