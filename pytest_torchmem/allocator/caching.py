"""The algorithm of torch's CUDA caching allocator, on addresses that stand for no memory.

c10/cuda/CUDACachingAllocator.cpp, ``DeviceCachingAllocator``; each method names the function that
it follows. Two things are the driver's and not torch's: where segments lie (device_memory.py), and
memory handed out in whole segments, which is taken to be never fragmented.

With ``expandable_segments:True`` segments grow page by page (``ExpandableSegment``,
``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block``, ``unmap_block``).
"""

from bisect import bisect_left
from collections.abc import Collection
from typing import Any, NamedTuple

from pytest_torchmem.allocator.device_memory import (
    DEFAULTS,
    MIB,
    AllocatorOptions,
    Block,
    Expandable,
    Pool,
    PoolId,
    PoolStatistics,
    PrivatePools,
    Statistics,
    addresses_of_this_torch,
)

MIN_BLOCK = 512
_NO_DIVISIONS = DEFAULTS.roundup_power2_divisions
SMALL = MIB
"""Requests up to this size are packed into the small pool's segments."""
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB
"""Requests from this size on have segments of their own, in multiples of ``ROUND_LARGE``."""
ROUND_LARGE = 2 * MIB
_SMALL_PAGE = 2 * MIB
#: Addresses for a device that never runs out.
_UNLIMITED = 1 << 44


class OutOfMemory(Exception):
    """The device has no memory left for a segment; sizes in bytes."""

    def __init__(self, segment: int, allocated: int, reserved: int) -> None:
        super().__init__(segment, allocated, reserved)
        self.segment = segment
        """What was asked of the device."""
        self.allocated, self.reserved = allocated, reserved


class CachingAllocator:
    """One device's caching allocator.

    ``capacity`` is the most bytes that the device can hand out as segments, ``None`` for a device
    that never runs out; ``total`` is the device's memory, of which ``set_memory_fraction`` takes
    a part.
    """

    def __init__(
        self,
        options: AllocatorOptions = DEFAULTS,
        capacity: int | None = None,
        total: int | None = None,
    ) -> None:
        self.capacity, self.total = capacity, total if total is not None else capacity
        self.statistics = Statistics()
        self.reserved = 0
        self.addresses = addresses_of_this_torch()
        self.allowed: int | None = None
        """The most bytes of segments that this process may have, where it is limited."""
        self.options = options
        """May be replaced at any time; what is there stays as it is."""
        self.set_memory_fraction(options.memory_fraction)
        self.small, self.large = Pool(is_small=True), Pool(is_small=False)
        self.private = PrivatePools()
        self.active: set[Block] = set()
        self._waiting: list[Block] = []

    def allocate(self, nbytes: int, stream: int = 0, private: PoolId | None = None) -> Block | None:
        """Return a block for ``nbytes``, or ``None`` for no bytes (``malloc``).

        ``private`` is the private pool that serves the request instead of the common ones.
        Raises ``OutOfMemory`` where neither the cache nor the device has any left.
        """
        if nbytes <= 0:
            return None
        if self._waiting and not self.private.capturing:
            self._finish_waiting()
        if self.options.roundup_power2_divisions is _NO_DIVISIONS:  # as mostly, and without a call
            size = (nbytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        else:
            size = self.rounded(nbytes)
        if private is None:
            pool = self.small if size <= SMALL else self.large
        else:
            pool = self.private.pool(private, size <= SMALL)
        block = self._from_cache(pool, size, stream) or self._from_device(pool, size, stream)
        return self._hand_out(block, size, nbytes)

    def free(self, block: Block) -> None:
        """Take a block back (``free``)."""
        block.allocated = False
        size = block.size
        counted = self.statistics.of[block.pool.is_small]
        for statistics in counted:
            statistics.free(size)
        limit = self.options.max_split_size
        if limit is not None and size >= limit:
            self.statistics.oversize_allocations.change(-1)
        if block.waiting:
            self._waiting.append(block)
        else:
            self._free_block(block, counted)

    def record_stream(self, block: Block, stream: int) -> None:
        """Let ``block``, once given back, wait for what ``stream`` does with it (``recordStream``).
        Work takes no time here: the block is free when the next request is made.
        """
        if stream != block.stream:
            block.waiting = (block.waiting or set()) | {stream}

    def empty_cache(self, private: PoolId | None = None) -> None:
        """Give back every segment that is free as a whole (``release_cached_blocks``).

        Of private pools only those that nothing uses any more: of all, or of one that is named.
        While a graph is captured the common pools keep what they have.
        """
        pools = self.private.unused(private)
        if private is not None or self.private.capturing:
            if private is not None and pools:
                self.statistics.num_sync_all_streams += 1
                self._finish_waiting(pools)
        else:
            self.statistics.num_sync_all_streams += 1
            self._finish_waiting()
            pools = [self.large, self.small, *pools]
        for pool in pools:
            expandable = []
            for block in pool.blocks():
                if block.expandable is not None:
                    expandable.append(block)
                elif not block.is_split:
                    self._release(block)
            for block in expandable:
                self._unmap(block)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit this process to a part of the device's memory (``setMemoryFraction``)."""
        if fraction >= 1:
            self.allowed = None
        elif self.total is not None:
            self.allowed = int(fraction * self.total)

    def change_reserved(self, size: int, small: bool, segments: int = 0) -> None:
        """Count memory that the device gave, or that went back to it: then below 0."""
        self.reserved += size
        if size > 0:
            self.statistics.num_device_alloc += 1
        else:
            self.statistics.num_device_free += 1
        for statistics in self.statistics.of[small]:
            statistics.reserved_bytes.change(size)
            statistics.segment.change(segments)

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block that a request needs (``round_size``)."""
        table = self.options.roundup_power2_divisions
        divisions = table[min(max(nbytes.bit_length() - 21, 0), len(table) - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            # ``roundup_power2_next_division``: 1,200 bytes in 4 divisions are 1,280.
            floor = 1 << (nbytes.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
            return -(-nbytes // step) * step
        return -(-nbytes // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK

    def segment_size(self, size: int) -> int:
        """Return the bytes of the segment that is made for a block (``get_allocation_size``)."""
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.options.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def blocks(self) -> list[Block]:
        """Return all blocks that have memory, in use or free, in order of address."""
        pools = (self.small, self.large, *self.private.pools())
        every = [*self.active, *(block for pool in pools for block in pool.blocks())]
        return sorted(every, key=lambda block: block.address)

    def _from_cache(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Return the smallest free block that is large enough (``get_free_block``)."""
        options = self.options
        if self.allowed is not None and self._collects:
            pool.searches += 1
        blocks = pool.free.get(stream)
        if not blocks:
            return None
        position = bisect_left(blocks, (size,))
        if position == len(blocks):
            return None
        block = blocks[position][2]
        if block.expandable is not None:
            position = self._choose(blocks, position)
            if position < 0:
                return None
            block = blocks[position][2]
        limit = options.max_split_size
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + options.max_non_split_rounding:
                return None
        del blocks[position]
        return block

    def _from_device(self, pool: Pool, size: int, stream: int) -> Block:
        """Return a block of new memory, after having given back what can be (``malloc``)."""
        if self._collects:
            self._collect_garbage()
        block = self._new_block(pool, size, stream)
        if block is None and self._release_available(pool, size, stream):
            block = self._new_block(pool, size, stream)
        if block is None and not self.private.capturing:
            self.empty_cache()
            self.statistics.num_alloc_retries += 1
            block = self._new_block(pool, size, stream)
        if block is None:
            self.statistics.num_ooms += 1
            allocated = self.statistics.all.allocated_bytes.current
            raise OutOfMemory(self.segment_size(size), allocated, self.reserved)
        return block

    def _new_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Return a new segment as one block, or ``None`` (``alloc_block``)."""
        segment = self.segment_size(size)
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self.options.expandable_segments:
            return self._expand(pool, size, stream)
        if not self._has(segment):
            return None
        block = Block(self.addresses.take(segment), segment, stream, pool)
        self.change_reserved(segment, pool.is_small, segments=1)
        limit = self.options.max_split_size
        if limit is not None and segment >= limit:
            self.statistics.oversize_segments.change(1)
        return block

    def _has(self, size: int) -> bool:
        """Whether the device can give ``size`` bytes more."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def _hand_out(self, block: Block, size: int, nbytes: int) -> Block:
        """Return the part of a free block that a request needs (``alloc_found_block``)."""
        pool = block.pool
        already_split = block.before is not None or block.after is not None
        counted = self.statistics.of[pool.is_small]
        if size < block.size and self._should_split(block, size):
            remaining = block
            block = remaining.split(size)
            pool.insert(remaining)
            if counted and block.expandable is None:
                for statistics in counted:
                    if already_split:
                        statistics.inactive_split_bytes.change(-size)
                    else:
                        statistics.inactive_split_bytes.change(remaining.size)
                        statistics.inactive_split.change(1)
        elif counted and already_split and block.expandable is None:
            for statistics in counted:
                statistics.inactive_split_bytes.change(-block.size)
                statistics.inactive_split.change(-1)
        block.allocated, block.requested = True, nbytes
        self.active.add(block)
        for statistics in counted:
            statistics.hand_out(block.size, nbytes)
        limit = self.options.max_split_size
        if limit is not None and block.size >= limit:
            self.statistics.oversize_allocations.change(1)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        """Whether what is left of a block is worth keeping apart (``should_split``)."""
        remaining = block.size - size
        if block.pool.is_small or self.options.expandable_segments:
            return remaining >= MIN_BLOCK
        limit = self.options.max_split_size
        return (limit is None or size < limit) and remaining > SMALL

    def _free_block(self, block: Block, counted: tuple[PoolStatistics, ...]) -> None:
        """Put a block among the free ones, with its free neighbours (``free_block``)."""
        size, requested = block.size, block.requested
        blocks = nbytes = 0
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.allocated:
                merged = block.merge(neighbour)
                if merged:
                    blocks -= 1
                    nbytes -= merged
        self.active.discard(block)
        block.pool.insert(block)
        if block.before is not None or block.after is not None:
            blocks += 1
            nbytes += block.size
        for statistics in counted:
            if (blocks or nbytes) and block.expandable is None:
                statistics.inactive_split.change(blocks)
                statistics.inactive_split_bytes.change(nbytes)
            statistics.retire(size, requested)

    def _finish_waiting(self, pools: Collection[Pool] | None = None) -> None:
        """Free what was used on other streams, whose work is over (``process_events``)."""
        waiting, self._waiting = self._waiting, []
        if pools is not None:
            self._waiting = [block for block in waiting if block.pool not in pools]
            waiting = [block for block in waiting if block.pool in pools]
        for block in waiting:
            block.waiting = None
            self._free_block(block, self.statistics.of[block.pool.is_small])

    def _release(self, block: Block) -> None:
        """Give a segment back to the device (``release_block``)."""
        self.change_reserved(-block.size, block.pool.is_small, segments=-1)
        self.addresses.give_back(block.address, block.size)
        limit = self.options.max_split_size
        if limit is not None and block.size >= limit:
            self.statistics.oversize_segments.change(-1)
        block.pool.erase(block)

    def _release_available(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back oversize segments, just enough for one (``release_available_cached_blocks``).
        Whether enough was given back.
        """
        limit = self.options.max_split_size
        if limit is None:
            return False
        size = max(size, limit)
        blocks = pool.free.get(stream, [])
        position = bisect_left(blocks, (size,))
        if position < len(blocks) and blocks[position][2].expandable is None:
            self._release(blocks[position][2])
            return True
        released = 0
        for nbytes, _, block in reversed(blocks[:position]):
            if released >= size or nbytes < limit:
                break
            if block.expandable is None:
                released += nbytes
                self._release(block)
        return released >= size

    @property
    def _collects(self) -> bool:
        return self.allowed is not None and self.options.garbage_collection_threshold > 0

    def _collect_garbage(self) -> None:
        """Give back the oldest free segments (``garbage_collect_cached_blocks``). A segment's age
        is the number of requests since it was last in use.
        """
        assert self.allowed is not None
        threshold = int(self.options.garbage_collection_threshold * self.allowed)
        if self.reserved <= threshold:
            return
        target, reclaimed = self.reserved - threshold, 0
        pool = self.large
        free = [block for block in pool.blocks() if not block.is_split]
        age = sum(pool.searches - block.age_base for block in free)
        count = len(free)
        freed = True
        while reclaimed < target and freed and count > 0:
            oldest = age / count
            freed = False
            for block in pool.blocks():
                own = pool.searches - block.age_base
                if not block.is_split and block.expandable is None and own >= oldest:
                    freed = True
                    reclaimed += block.size
                    age -= own
                    count -= 1
                    self._release(block)

    # -- expandable segments -----------------------------------------------------------------------

    def _choose(self, blocks: list[tuple[int, int, Block]], position: int) -> int:
        """Return the position of the free block to take, from the first that is large enough. -1
        where there is none. A block's size is here the one it can grow to, so that a full segment
        is taken before one that has room to grow (``get_free_block``).
        """
        if not self.options.expandable_segments:
            # Switched off in the meantime: only blocks of ordinary segments are taken.
            rest = range(position, len(blocks))
            return next((one for one in rest if blocks[one][2].expandable is None), -1)
        while (
            position + 1 < len(blocks)
            and blocks[position][2].expandable is not None
            and _expandable_size(blocks[position + 1][2]) < _expandable_size(blocks[position][2])
        ):
            position += 1
        return position

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Return a free block of at least ``size`` bytes with memory, or ``None``."""
        block = self._find(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # which has swallowed the one before it
        pool.erase(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give the whole pages of a free block back to the device (``unmap_block``)."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        begin = -(-(block.address - segment.address) // segment.page)
        end = (block.address + block.size - segment.address) // segment.page
        if begin >= end:
            return
        address, size = segment.address + begin * segment.page, (end - begin) * segment.page
        pool.erase(block)
        left, right = address - block.address, block.address + block.size - (address + size)
        if left:
            rest = block.part(block.address, left)
            rest.splice(block.before, block)
            pool.insert(rest)
        if right:
            rest = block.part(address + size, right)
            rest.splice(block, block.after)
            pool.insert(rest)
        block.address, block.size, block.mapped = address, size, False
        block.merge(block.before)
        block.merge(block.after)
        pool.insert_unmapped(block)
        self.change_reserved(-size, pool.is_small)
        if not block.is_split:
            pool.erase_unmapped(block)  # the whole segment is gone

    def _find(self, pool: Pool, size: int, stream: int) -> Block:
        """Return the first of neighbours that are free or have no memory, with enough addresses."""
        for block in pool.unmapped(stream):
            start = block.before if _allocatable(block.before) else block
            assert start is not None
            if _addresses(start, size) >= size:
                return start
        page = _SMALL_PAGE if pool.is_small else self.options.large_segment_size
        total = self.total if self.total is not None else _UNLIMITED
        # 1 1/8 of the device's memory, in whole pages.
        nbytes = -(-(total + total // 8) // page) * page
        segment = Expandable(self.addresses.reserve(nbytes), page)
        block = Block(segment.address, nbytes, stream, pool, segment, mapped=False)
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Have memory for the first ``size`` bytes of a block, in whole pages; whether there is."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        begin = (block.address - segment.address) // segment.page
        end = -(-(block.address + size - segment.address) // segment.page)
        nbytes = (end - begin) * segment.page
        if not nbytes or not self._has(nbytes):
            return False
        pool.erase_unmapped(block)
        block.mapped = True
        if nbytes < block.size:
            rest = block.part(block.address + nbytes, block.size - nbytes)
            rest.mapped = False
            rest.splice(block, block.after)
            pool.insert_unmapped(rest)
            block.size = nbytes
        block.merge(block.before)
        block.merge(block.after)
        pool.insert(block)
        self.change_reserved(nbytes, pool.is_small)
        return True


def _expandable_size(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _allocatable(block: Block | None) -> bool:
    return block is not None and not block.is_active


def _addresses(block: Block | None, enough: int) -> int:
    """Return the bytes of addresses from ``block`` on that can be had, up to ``enough``."""
    found = 0
    while block is not None and found < enough and _allocatable(block):
        found += block.size
        block = block.after
    return found


def segments(
    allocator: CachingAllocator, index: int = 0, pool: PoolId | None = None
) -> list[dict[str, Any]]:
    """Return the segments and their blocks as ``torch.cuda.memory_snapshot`` does. Those of one
    private ``pool``, or all.
    """
    found: list[list[Block]] = []
    for block in allocator.blocks():
        if pool in (None, block.pool.owner):
            if not found or block.before is not found[-1][-1]:
                found.append([])
            found[-1].append(block)
    return [
        {
            "device": index,
            "address": blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": sum(block.size for block in blocks if block.allocated),
            "active_size": sum(block.size for block in blocks if block.is_active),
            "requested_size": sum(block.requested for block in blocks if block.is_active),
            "stream": blocks[0].stream,
            "segment_type": "small" if blocks[0].pool.is_small else "large",
            "segment_pool_id": blocks[0].pool.owner,
            "is_expandable": blocks[0].expandable is not None,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested if block.is_active else 0,
                    "state": (
                        "active_allocated"
                        if block.allocated
                        else "active_pending_free"
                        if block.is_active
                        else "inactive"
                    ),
                    "frames": [],
                }
                for block in blocks
            ],
        }
        for blocks in found
    ]


class Peaks(NamedTuple):
    """What the allocator counted at its most, each for itself, and at the end; in bytes.

    ``requested`` is the sum of what was asked for, ``allocated`` that of the blocks handed out
    (``torch.cuda.max_memory_allocated``), ``reserved`` that of the segments
    (``torch.cuda.max_memory_reserved``). ``unallocated`` is what was reserved and not allocated
    when ``reserved`` was at its peak first.
    """

    requested: int = 0
    allocated: int = 0
    reserved: int = 0
    unallocated: int = 0


class RunningPeaks:
    """The peaks of a sequence of requests so far."""

    __slots__ = ("allocated", "requested", "reserved", "unallocated")

    def __init__(self) -> None:
        self.requested = self.allocated = self.reserved = self.unallocated = -1

    def note(self, allocator: CachingAllocator) -> None:
        """Raise the peaks to what is in use now."""
        statistics = allocator.statistics.all
        allocated = statistics.allocated_bytes.current
        if statistics.requested_bytes.current > self.requested:
            self.requested = statistics.requested_bytes.current
        if allocated > self.allocated:
            self.allocated = allocated
        if allocator.reserved > self.reserved:
            self.reserved = allocator.reserved
            self.unallocated = allocator.reserved - allocated

    def found(self) -> Peaks:
        return Peaks(self.requested, self.allocated, self.reserved, self.unallocated)
