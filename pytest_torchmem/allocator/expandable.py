"""Segments that grow page by page, with ``expandable_segments:True``.

c10/cuda/CUDACachingAllocator.cpp, ``ExpandableSegment``, ``find_expandable_block``, ``map_block``,
``try_allocate_expandable_block``, ``unmap_block``.
"""

from __future__ import annotations

from pytest_torchmem.allocator.blocks import Block, Expandable, Pool
from pytest_torchmem.allocator.options import MIB
from pytest_torchmem.allocator.statistics import ReservedMemory

_SMALL_PAGE = 2 * MIB
#: Addresses for a device that never runs out.
_UNLIMITED = 1 << 44


class ExpandableSegments:
    """What an allocator does differently with expandable segments."""

    def __init__(self, memory: ReservedMemory) -> None:
        self._memory = memory

    def choose(self, blocks: list[tuple[int, int, Block]], position: int) -> int:
        """Return the position of the free block to take, from the first that is large enough.

        -1 where there is none. A block's size is here the one it can grow to, so that a full
        segment is taken before one that has room to grow (``get_free_block``).
        """
        if not self._memory.options.expandable_segments:
            # Switched off in the meantime: only blocks of ordinary segments are taken.
            while position < len(blocks) and blocks[position][2].expandable is not None:
                position += 1
            return position if position < len(blocks) else -1
        following = position + 1
        while (
            blocks[position][2].expandable is not None
            and following < len(blocks)
            and _expandable_size(blocks[following][2]) < _expandable_size(blocks[position][2])
        ):
            position = following
            following += 1
        return position

    def allocate(self, pool: Pool, size: int, stream: int) -> Block | None:
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

    def unmap(self, block: Block) -> None:
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
        self._memory.remove_reserved(size, pool.is_small)
        if not block.is_split:
            pool.erase_unmapped(block)  # the whole segment is gone

    def _find(self, pool: Pool, size: int, stream: int) -> Block:
        """Return the first of neighbours that are free or have no memory, with enough addresses."""
        for block in pool.unmapped(stream):
            start = block.before if _allocatable(block.before) else block
            assert start is not None
            if _addresses(start, size) >= size:
                return start
        memory = self._memory
        page = _SMALL_PAGE if pool.is_small else memory.options.large_segment_size
        total = memory.total if memory.total is not None else _UNLIMITED
        # 1 1/8 of the device's memory, in whole pages.
        nbytes = -(-(total + total // 8) // page) * page
        segment = Expandable(memory.new_addresses(nbytes), nbytes, page)
        block = Block(segment.address, nbytes, stream, pool, segment, mapped=False)
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Have memory for the first ``size`` bytes of a block, in whole pages; whether there is."""
        segment, pool, memory = block.expandable, block.pool, self._memory
        assert segment is not None
        begin = (block.address - segment.address) // segment.page
        end = -(-(block.address + size - segment.address) // segment.page)
        nbytes = (end - begin) * segment.page
        if not nbytes or (
            memory.capacity is not None and memory.reserved + nbytes > memory.capacity
        ):
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
        memory.add_reserved(nbytes, pool.is_small)
        return True


def _expandable_size(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _allocatable(block: Block | None) -> bool:
    return block is not None and not block.allocated and block.waiting is None


def _addresses(block: Block | None, enough: int) -> int:
    """Return the bytes of addresses from ``block`` on that can be had, up to ``enough``."""
    found = 0
    while block is not None and found < enough and _allocatable(block):
        found += block.size
        block = block.after
    return found
