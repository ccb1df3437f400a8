"""Collectives: ``c10d`` (torch/csrc/distributed/c10d/Ops.cpp) and ``_c10d_functional``.

NCCL's kernels work in place, and its own buffers are outside of PyTorch's allocator. A collective
that gets lists of tensors flattens them: ProcessGroupNCCL.cpp, ``allgather``, ``reduce_scatter``.
On the host gloo's threads take and give back what they need, which the allocator of the thread that
asked for the collective does not see.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.distributed.backend_checks import describe_checks
from pytest_torchmem.operators.registry import DEVICES, OperatorKind, operator
from pytest_torchmem.torch_private.dispatch.operators import all_operators
from pytest_torchmem.torch_private.distributed.process_groups import (
    place_in_group,
    register_meta_kernels,
)

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_FLATTENS = "c10d::reduce_scatter_"
"""What flattens a list of inputs into one tensor for as long as it takes. ``allgather_`` does so
with its outputs, which are its work's (``process_groups.flattened_like``).
"""

_MOVES_SHARD = "_dtensor::shard_dim_alltoall"
"""How a ``DTensor`` is split along another dimension, on GPUs."""
_functional: Any = torch.ops._c10d_functional

_WAITS = "_c10d_functional::wait_tensor"
"""Returns the tensor that it is given (c10d/Functional.cpp); on ``meta`` it makes another one."""

_SENDS = ("_c10d_functional::all_gather", "_c10d_functional::all_to_all")
_REDUCES_PARTS = ("_c10d_functional::reduce_scatter",)
"""Of these gloo sends copies (ProcessGroupGloo.cpp, ``reduce_scatter_tensor_coalesced``); what the
others send is what they make, a clone or what they write to (c10d/Functional.cpp).
"""

_WITHOUT_META = frozenset(
    {
        "c10d::allgather_into_tensor_coalesced_",
        "c10d::allreduce_coalesced_",
        "c10d::check_for_nan",
        "c10d::reduce_scatter_tensor_coalesced_",
    }
)
_LISTS = "c10d::allgather_coalesced_"
"""Operators of which Ops.cpp registers no kernel for ``meta``; they write to what they get."""


def describe() -> None:
    """Make a record of every collective that this torch has."""
    register_meta_kernels()
    there = frozenset(all_operators())
    if _MOVES_SHARD in there:
        operator(_MOVES_SHARD, source="c10d/Functional.cpp").decomposition()(_moved_shard)
    wraps = "_c10d_functional::_wrap_tensor_autograd"
    if wraps in there:  # makes a tensor subclass that waits at its first use
        operator(wraps, kind=OperatorKind.NATIVE)
    if _WAITS in there:
        operator(_WAITS, kind=OperatorKind.NATIVE, waits=True)
    names = [name for name in there if name.partition("::")[0] in NAMESPACES]
    alone = (_FLATTENS, _WAITS)
    operator(*(name for name in names if name not in alone), takes_nothing=frozenset(DEVICES))
    for name in names:
        if name.startswith(_SENDS + _REDUCES_PARTS):
            on = DEVICES if name.startswith(_SENDS) else ("cuda",)
            operator(name, work_holds=frozenset(on))
        if name.endswith("_tensor_out"):
            operator(name).meta()(_written)
    describe_checks(names)
    for name in _WITHOUT_META & there:
        operator(name).meta()(_nothing)
    if _LISTS in there:
        operator(_LISTS).meta()(_lists)
    if _FLATTENS in there:
        operator(_FLATTENS, takes_nothing=frozenset({"cpu"}))
        scattered = operator(_FLATTENS, source="ProcessGroupNCCL.cpp, reduce_scatter")
        scattered.workspace("cuda")(_scattered)


def _moved_shard(input: Tensor, gather_dim: int, shard_dim: int, group_name: str) -> Tensor:
    """Functional.cpp, ``shard_dim_alltoall``: what is sent and what is received are contiguous, the
    parts of other processes first.
    """
    place = place_in_group([group_name])
    size = place[1] if place is not None else 1
    split, sizes = list(input.shape), list(input.shape)
    split[shard_dim : shard_dim + 1] = [size, split[shard_dim] // size]
    sizes[shard_dim] //= size
    sizes[gather_dim] *= size
    sent = input.view(split).movedim(shard_dim, 0).contiguous()
    parts = [1] * size
    received = _functional.all_to_all_single(sent, parts, parts, group_name)
    whole: Tensor = _functional.wait_tensor(received).movedim(0, gather_dim).contiguous()
    return whole.view(sizes)


def _written(out: Tensor) -> Tensor:
    """What is returned is ``out``; torch's own functions make another tensor."""
    return out


def _nothing() -> None:
    """No storage is made."""


def _lists(output_lists: Sequence[Sequence[Tensor]]) -> tuple[Any, None]:
    """The outputs, and work."""
    return output_lists, None


def _scattered(input_tensors: Sequence[Sequence[Tensor]]) -> int:
    """All inputs in one tensor; ``newLikeFlat``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in input_tensors[0])
