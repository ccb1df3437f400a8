"""Parts of ``torch.cuda`` that a trace refuses: graphs, memory pools, raw pointers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from pytest_torchmem.errors import UsageError


class CUDAGraph:
    """``torch.cuda.CUDAGraph`` and ``torch.accelerator.Graph``."""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse: what a graph holds stays in a pool of its own as long as the graph lives."""
        raise _no_graphs("torch.cuda.CUDAGraph")


class MemPool:
    """``torch.cuda.MemPool``."""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a trace has one pool."""
        raise UsageError(
            "torch.cuda.MemPool: a trace does not model memory pools. Skip this line while tracing"
        )


def _no_graphs(name: str) -> UsageError:
    return UsageError(
        f"{name}: a trace does not model CUDA graphs, which keep their memory in a private pool. "
        "Trace the captured function without capturing it"
    )


def _graph_pool_handle() -> NoReturn:
    raise _no_graphs("torch.cuda.graph_pool_handle")


def _no_pointers(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            f"torch.cuda.{name}: raw GPU pointers are not available in a trace. Allocate a tensor "
            "of that size, or skip this call while tracing"
        )

    return refuse


UNSUPPORTED: dict[str, Callable[..., Any]] = {
    "graph_pool_handle": _graph_pool_handle,
    "is_current_stream_capturing": lambda: False,
    **{
        name: _no_pointers(name)
        for name in (
            "caching_allocator_alloc",
            "caching_allocator_delete",
            "caching_allocator_enable",
            "change_current_allocator",
        )
    },
}
