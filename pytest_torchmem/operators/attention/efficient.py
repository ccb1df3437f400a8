"""Memory-efficient attention on CUDA.

native/transformers/cuda/attention.cu and attention_backward.cu, mem_eff_attention/kernel_backward.h
and the lists of kernels in mem_eff_attention/kernels/cutlassB.h of 2.13. Exact but where the first
kernel of the list that fits depends on shared memory: there it is the larger of the two that may be
taken.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import ceil_div, contiguous_copy, dense_bytes, round_up
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import ALL, First, Request, Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.state.settings import must_be_deterministic

_FLOAT = 4
_ANY = 65536
_MUCH_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True)
class Tile:
    """An ``AttentionBackwardKernel``: queries and keys of a block, and the largest head."""

    queries: int
    keys: int
    largest: int


def _tiles(gpu: Gpu, dtype: torch.dtype, size: int, dropout: bool) -> tuple[Tile, ...]:
    """Return the kernels that may be taken, of which shared memory decides; cutlassB.h."""
    if size <= 64:
        return (Tile(64, 64, 32 if size <= 32 else 64),)
    modern = gpu.capability >= (8, 0)
    largest = 128 if size <= 128 else _ANY
    if dtype == torch.float32:
        if not modern:
            return (Tile(64, 64, largest),)
        wide, narrow = Tile(128, 64, largest), Tile(64, 64, largest)
    elif modern and size <= 96 and gpu.capability in ((8, 6), (8, 9)) and not dropout:
        return (Tile(128, 64, 96),)
    elif modern and size <= 128:
        wide, narrow = Tile(128, 128, 128), Tile(64, 64, 128)
    else:
        wide, narrow = Tile(128, 64, largest), Tile(64, 64, largest)
    return (wide,) if gpu.capability in _MUCH_SHARED_MEMORY else (wide, narrow)


def _tile_bytes(
    tile: Tile, half: bool, shape: tuple[int, int, int, int], size: int, value_size: int
) -> int:
    """``Params::workspace_size``: gradients of query, key and value added up in float."""
    batch, heads, queries, keys = shape
    splits = ceil_div(keys, tile.keys)
    if batch * heads >= 256 and keys <= 2 * tile.keys:
        splits = 1
    keys_in_memory = half and tile.largest > tile.queries
    floats = 0
    if keys_in_memory:
        splits = max(1, min(splits, 200 // (batch * heads)))
    if must_be_deterministic():
        splits = 1
    if keys_in_memory:
        floats = (
            splits * tile.keys * (round_up(size, tile.queries) + round_up(value_size, tile.queries))
        )
    blocks = ceil_div(queries, tile.queries) * ceil_div(size, tile.keys)
    floats += blocks * (4 + tile.queries * tile.keys)
    return batch * heads * round_up(floats, 4) * _FLOAT


def efficient_backward_bytes(
    gpu: Gpu,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    size: int,
    value_size: int,
    dropout: bool = False,
    copy: int = 0,
) -> Workspace:
    """Return what the backward of (batch, heads, queries, keys) takes, for heads of ``size``.

    ``copy`` is what making the gradient dense takes, before the outputs are made. Where the kernel
    does not compute the sums of rows, a product in float is summed before it, the factors are cast
    to float for it, and the sums are turned.
    """
    batch, heads, queries, _ = shape
    half = dtype != torch.float32
    sums = _FLOAT * batch * heads * queries
    turned = sums if min(heads, queries) > 1 else 0
    found: list[tuple[int, tuple[Request, ...]]] = []
    for tile in _tiles(gpu, dtype, max(size, value_size), dropout):
        own = _tile_bytes(tile, half, shape, size, value_size)
        in_kernel = half and (tile.largest <= tile.queries or gpu.capability != (7, 0))
        product = 0 if in_kernel else sums * value_size * (3 if half else 1)
        turn = 0 if in_kernel else turned
        turning = (turn, First(turn)) if turn else ()
        peak = max(product + sums + turn, sums + own)
        found.append((peak, (product, sums, *turning, -product, own)))
    requests = (copy, ALL, *max(found, key=lambda one: one[0])[1])
    return Workspace(requests) if len(found) == 1 else bounded(*requests)


@operator(
    "aten::_scaled_dot_product_efficient_attention_backward",
    not_in_key=("philox_seed", "philox_offset"),
).workspace("cuda")
def sdpa_efficient_backward(
    machine: Gpu,
    grad_out_: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
) -> Workspace:
    """``_efficient_attention_backward``, with heads and length exchanged."""
    batch, heads, queries, size = query.shape
    shape = (batch, heads, queries, key.shape[2])
    copy = contiguous_copy(None if grad_out_ is None else grad_out_.transpose(1, 2))
    return efficient_backward_bytes(
        machine, query.dtype, shape, size, value.shape[3], dropout_p > 0, copy
    )


@operator("aten::_efficient_attention_backward").workspace("cuda")
def efficient_backward(
    machine: Gpu,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
) -> Workspace:
    """attention_backward.cu, ``_efficient_attention_backward``."""
    batch, queries, heads, size = query.shape
    keys = key.shape[1]
    if cu_seqlens_q is not None:
        batch, queries, keys = cu_seqlens_q.numel() - 1, max_seqlen_q, max_seqlen_k
    shape = (batch, heads, queries, keys)
    copy = contiguous_copy(grad_out_)
    return efficient_backward_bytes(
        machine, query.dtype, shape, size, value.shape[3], dropout_p > 0, copy
    )


# The seed and the offset of random numbers are on the host, outside of the capture of a graph.
@operator(
    *aten("_efficient_attention_forward _scaled_dot_product_efficient_attention"),
    host_outputs={"cuda": (2, 3)},
).workspace("cuda")
def efficient_forward(outputs: tuple[Tensor, ...], value: Tensor) -> int:
    """The output in float where heads are too large to be added up in registers.

    attention.cu; kernel_forward.h, ``kNeedsOutputAccumulatorBuffer``.
    """
    out = outputs[0]
    half = out.dtype != torch.float32
    return dense_bytes(out, torch.float32) if half and value.shape[-1] > 128 else 0
