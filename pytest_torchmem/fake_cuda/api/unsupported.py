"""Parts of ``torch.cuda`` that a trace refuses: graphs, memory pools, raw pointers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from pytest_torchmem.errors import UsageError


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"torch.cuda.{name}: {reason}")

    return refuse


_NO_GRAPHS = (
    "a trace does not model CUDA graphs, which keep their memory in a private pool. Trace the "
    "captured function without capturing it"
)
_NO_POINTERS = (
    "raw GPU pointers are not available in a trace. Allocate a tensor of that size, or skip this "
    "call while tracing"
)
_NO_POOLS = "a trace does not model memory pools. Skip this line while tracing"

CUDAGraph = type("CUDAGraph", (), {"__new__": _refused("CUDAGraph", _NO_GRAPHS)})
"""``torch.cuda.CUDAGraph`` and ``torch.accelerator.Graph``."""
MemPool = type("MemPool", (), {"__new__": _refused("MemPool", _NO_POOLS)})

UNSUPPORTED: dict[str, Callable[..., Any]] = {
    "graph_pool_handle": _refused("graph_pool_handle", _NO_GRAPHS),
    "is_current_stream_capturing": lambda: False,
    **{
        name: _refused(name, _NO_POINTERS)
        for name in (
            "caching_allocator_alloc",
            "caching_allocator_delete",
            "caching_allocator_enable",
            "change_current_allocator",
        )
    },
}
