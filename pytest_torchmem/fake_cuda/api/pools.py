"""``torch.cuda.MemPool`` and ``use_mem_pool``: memory apart, which requests are sent to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import finalize

from pytest_torchmem.allocator.private import PoolId
from pytest_torchmem.allocator.segments import segments
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.fake_cuda.memory import DeviceMemory

_NUMBERS = itertools.count(1)


def pool_handle(*, made_by_user: bool = True) -> PoolId:
    """Return the number of a new pool (aten/src/ATen/cuda/MemPool.cpp, ``graph_pool_handle``)."""
    number = next(_NUMBERS)
    return (0, number) if made_by_user else (number, 0)


class MemPool:
    """``torch.cuda.MemPool``, on the GPU that is current."""

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None or use_on_oom or no_split:
            raise UsageError(
                "torch.cuda.MemPool: a trace models pools of the caching allocator alone, without "
                "allocator, use_on_oom and no_split. Leave these out while tracing"
            )
        self.id = pool_handle()
        self._index = SESSION.running.current
        self._memory: DeviceMemory = SESSION.memories[self._index]
        self._memory.retain_pool(self.id)
        finalize(self, _end, self._memory, self.id).atexit = False

    @property
    def device(self) -> int:
        """The index of the GPU that the pool is on."""
        return self._index

    def use_count(self) -> int:
        """Return how many use the pool."""
        return self._memory.follow().private.uses(self.id)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments as ``torch.cuda.memory_snapshot`` does."""
        return segments(self._memory.follow(), self._index, self.id)


def _end(memory: DeviceMemory, pool: PoolId) -> None:
    # MemPool.cpp, ~MemPool
    memory.release_pool(pool)
    memory.empty_cache(pool)


def pool_functions(memories: Sequence[DeviceMemory]) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda`` about pools."""

    @contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        # torch/cuda/memory.py, use_mem_pool
        memory, thread = memories[SESSION.index_of(device)], get_ident()
        end = memory.serve(pool.id, lambda _: get_ident() == thread, graph=False)
        try:
            yield
        finally:
            end()
            memory.release_pool(pool.id)

    return {"use_mem_pool": use_mem_pool, "graph_pool_handle": pool_handle}
