"""``torch.distributed`` in a trace: collectives move nothing, wrappers of modules are refused.

A collective is an operator (``c10d::allreduce_`` and its like) with a kernel for ``meta``
(torch/csrc/distributed/c10d/Ops.cpp): intercepted as any other, it sends nothing and waits for
nobody, whatever the backend. ``DistributedDataParallel`` and ``fully_shard`` reach around
operators: the first reads parameters in C++ (``_verify_params_across_processes``, reducer.cpp) and
copies gradients into its buckets there, the second takes the memory of a storage away
(``free_storage`` of torch/distributed/fsdp/_fully_shard/_fsdp_common.py). Neither is modelled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced_all
from pytest_torchmem.torch_private.replaceable import sharded_parameters

_DATA_PARALLEL = (
    "DistributedDataParallel cannot be traced, because it reads and copies memory in C++ that "
    "traced tensors do not have. Trace the module that it wraps (ddp.module). In a real step, "
    "DDP's buckets take as many bytes again as the gradients, unless gradient_as_bucket_view is "
    "True"
)
_SHARDED = (
    "fully_shard (FSDP) cannot be traced, because it frees and refills the memory of storages, "
    "which traced tensors do not have. Trace the module without it; parameters, gradients and "
    "optimizer state are then those of a single process, not of one shard"
)
_RESIZED = (
    "UntypedStorage.resize_ is not supported in a trace, because it changes memory without an "
    "operator. Use tensor.resize_(size), or make a new tensor. If torch.distributed (FSDP) called "
    "it: "
) + _SHARDED


def _of_fsdp(name: str) -> Any:
    """Return a class of ``torch.distributed.fsdp``, or None where that is not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


_SHARDING = (
    (sharded_parameters, "__init__"),
    (partial(_of_fsdp, "FSDPModule"), "__call__"),
    (partial(_of_fsdp, "FullyShardedDataParallel"), "__init__"),
    (partial(_of_fsdp, "FullyShardedDataParallel"), "forward"),
)
"""What wrapping calls, and a wrapped module's forward; only of modules that are imported."""
_WRAPPED = (
    (lambda: nn.parallel.DistributedDataParallel, _DATA_PARALLEL),
    (partial(_of_fsdp, "FSDPModule"), _SHARDED),
    (partial(_of_fsdp, "FullyShardedDataParallel"), _SHARDED),
)


def refuse_wrapped(target: nn.Module) -> None:
    """Raise ``UnsupportedOperatorError`` for a module that has one wrapped for several processes.

    Its copy could not be made, or would be wrapped anew.
    """
    for find, message in _WRAPPED:
        kind = find()
        if kind is None:
            continue
        for path, inner in target.named_modules():
            if isinstance(inner, kind):
                where = f"{type(target).__name__}.{path}" if path else type(target).__name__
                raise UnsupportedOperatorError(f"{where}: {message}")


@contextmanager
def module_wrappers_refused(trace: TraceContext) -> Iterator[None]:
    """Raise ``UnsupportedOperatorError`` where this thread wraps a module for several processes.

    So does the forward of a module that was wrapped before.
    """
    original: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        __tracebackhide__ = True
        record = trace.record_of(storage)
        if record is None or not record.hollow:
            return original(storage, size)
        raise UnsupportedOperatorError(f"{trace.user_line()}: {_RESIZED}")

    parallel = nn.parallel.DistributedDataParallel
    refused = [(parallel, name, _DATA_PARALLEL) for name in ("__init__", "forward")]
    refused += [(owner, method, _SHARDED) for find, method in _SHARDING if (owner := find())]
    methods = [(owner, {name: _refusing(trace, owner, name, why)}) for owner, name, why in refused]
    with replaced_all([(torch.UntypedStorage, {"resize_": resize}), *methods]):
        yield


def _refusing(trace: TraceContext, owner: Any, name: str, message: str) -> Callable[..., Any]:
    # Not yet a hook's turn: ``FSDPState._pre_forward`` would note that a forward has begun.
    # ``FSDPModule`` is mixed into a module's own class, which brings ``__call__``.
    original = nn.Module.__call__ if name == "__call__" else getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if trace.on_thread():
            raise UnsupportedOperatorError(f"{trace.user_line()}: {message}")
        return original(*args, **kwargs)

    return method
