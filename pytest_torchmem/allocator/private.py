"""Pools of memory apart: those of CUDA graphs, and ``torch.cuda.MemPool``.

c10/cuda/CUDACachingAllocator.cpp, ``PrivatePool``, ``create_or_incref_pool``, ``releasePool``. What
a graph has captured uses the addresses of its pool at every replay. So a pool keeps its segments
until no graph, and no ``MemPool``, uses it; then they go back to the device as others do, once they
are free as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from pytest_torchmem.allocator.blocks import Pool

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
