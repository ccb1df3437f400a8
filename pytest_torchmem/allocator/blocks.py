"""Blocks of device memory, and pools of free ones: those of graphs and ``MemPool`` are apart.

c10/cuda/CUDACachingAllocator.cpp, ``Block``, ``BlockPool``, ``ExpandableSegment``.

c10/cuda/CUDACachingAllocator.cpp, ``PrivatePool``, ``create_or_incref_pool``, ``releasePool``. What
a graph has captured uses the addresses of its pool at every replay. So a pool keeps its segments
until no graph, and no ``MemPool``, uses it; then they go back to the device as others do, once they
are free as a whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


class Expandable:
    """A range of addresses that memory is mapped into page by page; ``ExpandableSegment``."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address, self.size, self.page = address, size, page


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A piece of a segment, in use or free; ``before`` and ``after`` are its neighbours there."""

    address: int
    size: int
    stream: int
    pool: Pool
    expandable: Expandable | None = None
    mapped: bool = True
    requested: int = 0
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None
    waiting: set[int] | None = None
    """Other streams whose work on the block has to be over before it is free again."""
    age_base: int = 0

    @property
    def is_split(self) -> bool:
        """Whether the block is a part of its segment only."""
        return self.before is not None or self.after is not None

    def part(self, address: int, size: int) -> Block:
        """Return a new block of the same segment."""
        return Block(address, size, self.stream, self.pool, self.expandable)

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Put the block between two that are neighbours."""
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self
        self.before, self.after = before, after

    def split(self, size: int) -> Block:
        """Return the first ``size`` bytes as a block of their own; what is left stays this one."""
        before, address = self.before, self.address
        block = Block(address, size, self.stream, self.pool, self.expandable)
        block.after = self
        if before is not None:
            block.before = before
            before.after = block
        self.before = block
        self.address = address + size
        self.size -= size
        return block

    def merge(self, other: Block | None) -> int:
        """Merge a free neighbour into this block; return its size, or 0 (``try_merge_blocks``)."""
        if (
            other is None
            or other.allocated
            or other.waiting is not None
            or self.mapped is not other.mapped
        ):
            return 0
        if other.mapped:
            other.pool.erase(other)
        else:
            other.pool.erase_unmapped(other)
        if self.before is other:
            self.address = other.address
            beyond = self.before = other.before
            if beyond is not None:
                beyond.after = self
        else:
            beyond = self.after = other.after
            if beyond is not None:
                beyond.before = self
        size = other.size
        self.size += size
        return size


class Pool:
    """The free blocks of a small or a large pool, by stream in order of size and address.

    ``owner`` is the private pool that it is of, (0, 0) for the common ones.
    """

    __slots__ = ("_unmapped", "free", "is_small", "owner", "searches")

    def __init__(self, is_small: bool, owner: tuple[int, int] = (0, 0)) -> None:
        self.is_small = is_small
        self.owner = owner
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0
        """Requests so far, by which the age of a free block is counted."""

    def insert(self, block: Block) -> None:
        """Keep a free block."""
        block.age_base = self.searches
        free = self.free.get(block.stream)
        if free is None:
            free = self.free[block.stream] = []
        insort(free, (block.size, block.address, block))

    def erase(self, block: Block) -> None:
        """Take a free block out."""
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def blocks(self) -> list[Block]:
        """Return the free blocks in order of stream, size and address."""
        return [block for stream in sorted(self.free) for _, _, block in self.free[stream]]

    def insert_unmapped(self, block: Block) -> None:
        """Keep addresses that have no memory."""
        insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def erase_unmapped(self, block: Block) -> None:
        """Take addresses without memory out."""
        blocks = self._unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def unmapped(self, stream: int) -> list[Block]:
        """Return addresses without memory, the lowest first."""
        return [block for _, block in self._unmapped.get(stream, ())]


PoolId: TypeAlias = tuple[int, int]
"""``c10::MempoolId_t``: one of the two numbers is 0."""


class PrivatePools:
    """The private pools of one allocator."""

    def __init__(self) -> None:
        self._pools: dict[PoolId, tuple[Pool, Pool]] = {}
        self._uses: dict[PoolId, int] = {}
        self.capturing = 0
        """How many graphs are being captured: nothing waits for other streams meanwhile."""

    def retain(self, pool: PoolId) -> None:
        """Count one more user of a pool, and make it for the first (``create_or_incref_pool``)."""
        self._pools.setdefault(pool, (Pool(True, pool), Pool(False, pool)))
        self._uses[pool] = self.uses(pool) + 1

    def release(self, pool: PoolId) -> None:
        """Count one user less (``releasePool``)."""
        self._uses[pool] = max(0, self.uses(pool) - 1)

    def uses(self, pool: PoolId) -> int:
        """Return how many graphs and ``MemPool`` use a pool."""
        return self._uses.get(pool, 0)

    def pool(self, pool: PoolId, is_small: bool) -> Pool:
        """Return the part of a pool that serves small, or large, requests."""
        small, large = self._pools[pool]
        return small if is_small else large

    def pools(self) -> Iterator[Pool]:
        """Yield all parts of all pools."""
        for both in self._pools.values():
            yield from both

    def unused(self, pool: PoolId | None) -> list[Pool]:
        """Return the parts of the pools that nothing uses any more, or of one if it is unused."""
        return [
            part
            for found, parts in self._pools.items()
            if not self._uses[found] and pool in (None, found)
            for part in parts
        ]
