"""Memory-efficient and flash attention.

native/transformers/cuda/attention.cu and attention_backward.cu, mem_eff_attention/kernel_backward.h
and the lists of kernels in mem_eff_attention/kernels/cutlassB.h of 2.13. Exact but where the first
kernel of the list that fits depends on shared memory: there it is the larger of the two that may be
taken. Flash attention is exact: flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``, ``varlen``).

On the CPU native/cpu/FlashAttentionKernel.cpp, without the packed operands of machines with AMX.
What threads other than the first take is seen by no allocator's record, nor counted here.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import AttentionArguments
from pytest_torchmem.operators.matmul import SCALE, SMALLEST, Product, has_onednn_products
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    ALL,
    FLOAT,
    HALVES,
    First,
    Made,
    Request,
    Workspace,
    accumulation_type,
    bounded,
    by_onednn,
    ceil_div,
    contiguous_copy,
    dense_bytes,
    round_up,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.settings import must_be_deterministic

_ANY = 65536
_MUCH_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))


class Tile(NamedTuple):
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


def _tile_bytes(tile: Tile, half: bool, shape: "Shape") -> int:
    """``Params::workspace_size``: gradients of query, key and value added up in float."""
    batch, heads, queries, keys, size, value_size = shape
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
        floats = sum(round_up(one, tile.queries) for one in (size, value_size))
        floats *= splits * tile.keys
    blocks = ceil_div(queries, tile.queries) * ceil_div(size, tile.keys)
    floats += blocks * (4 + tile.queries * tile.keys)
    return batch * heads * round_up(floats, 4) * FLOAT


class Shape(NamedTuple):
    """What decides the workspace of a memory-efficient backward."""

    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    """Of a head of queries and keys."""
    value_size: int


def efficient_backward_bytes(
    gpu: Gpu, dtype: torch.dtype, shape: Shape, dropout: bool = False, copy: int = 0
) -> Workspace:
    """Return what the backward takes, after a dense ``copy`` of the gradient, which comes before
    the outputs.

    Where the kernel does not compute the sums of rows, a product in float is summed before it, the
    factors are cast to float for it, and the sums are turned.
    """
    half = dtype != torch.float32
    sums = FLOAT * shape.batch * shape.heads * shape.queries
    turned = sums if min(shape.heads, shape.queries) > 1 else 0
    found: list[tuple[int, tuple[Request, ...]]] = []
    for tile in _tiles(gpu, dtype, max(shape.size, shape.value_size), dropout):
        own = _tile_bytes(tile, half, shape)
        in_kernel = half and (tile.largest <= tile.queries or gpu.capability != (7, 0))
        product = 0 if in_kernel else sums * shape.value_size * (3 if half else 1)
        turn = 0 if in_kernel else turned
        turning = (turn, First(turn)) if turn else ()
        peak = max(product + sums + turn, sums + own)
        found.append((peak, (product, sums, *turning, -product, own)))
    requests = (copy, ALL, *max(found, key=lambda one: one[0])[1])
    return Workspace(requests) if len(found) == 1 else bounded(*requests)


@operator(
    "_scaled_dot_product_efficient_attention_backward", not_in_key=("philox_seed", "philox_offset")
).workspace("cuda")
def sdpa_efficient_backward(
    machine: Gpu, grad_out_: Tensor | None, attention: AttentionArguments
) -> Workspace:
    """``_efficient_attention_backward``, with heads and length exchanged."""
    query, key, value = (one.transpose(1, 2) for one in attention[:3])
    turned = attention._replace(query=query, key=key, value=value)
    gradient = None if grad_out_ is None else grad_out_.transpose(1, 2)
    return efficient_backward(machine, gradient, turned)


@operator("aten::_efficient_attention_backward").workspace("cuda")
def efficient_backward(
    machine: Gpu,
    grad_out_: Tensor | None,
    attention: AttentionArguments,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> Workspace:
    """attention_backward.cu, ``_efficient_attention_backward``."""
    query, key, value = attention[:3]
    batch, queries, heads, size = query.shape
    keys = key.shape[1]
    if cu_seqlens_q is not None:
        batch, queries, keys = cu_seqlens_q.numel() - 1, max_seqlen_q, max_seqlen_k
    shape = Shape(batch, heads, queries, keys, size, value.shape[3])
    copy = contiguous_copy(grad_out_)
    return efficient_backward_bytes(machine, query.dtype, shape, attention.dropout_p > 0, copy)


# The seed and the offset of random numbers are on the host, outside of the capture of a graph.
@operator(
    "_efficient_attention_forward _scaled_dot_product_efficient_attention",
    host_outputs={"cuda": (2, 3)},
).workspace("cuda")
def efficient_forward(outputs: tuple[Tensor, ...], value: Tensor) -> int:
    """The output in float where heads are too large to be added up in registers; attention.cu;
    kernel_forward.h, ``kNeedsOutputAccumulatorBuffer``.
    """
    out = outputs[0]
    half = out.dtype != torch.float32
    return dense_bytes(out, torch.float32) if half and value.shape[-1] > 128 else 0


_BLOCK = 128


def _rounded_size(size: int) -> int:
    """``head_size_rounded``: a multiple of 32, and 256 from 224 on."""
    rounded = round_up(size, 32)
    return rounded if rounded < 224 else 256


def flash_splits(
    gpu: Gpu, batch: int, queries: int, keys: int, heads: int, size: int, splits: int = 0
) -> int:
    """Return over how many blocks the keys are split; ``num_splits_heuristic``.
    ``set_params_splitkv`` counts every multiprocessor twice.
    """
    if splits >= 1:
        return splits
    block = 256 if size <= 64 else 128 if size <= 128 else 64
    key_blocks = ceil_div(keys, block)
    work, slots = batch * heads * ceil_div(queries, 64), 2 * gpu.multiprocessors
    if work >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    efficiency = {
        number: work * number / slots / math.ceil(work * number / slots)
        for number in range(1, most + 1)
        if number == 1 or ceil_div(key_blocks, number) != ceil_div(key_blocks, number - 1)
    }
    best = max(efficiency.values(), default=0.0)
    return next((number for number, found in efficiency.items() if found >= 0.85 * best), 1)


def _random_state(position: int) -> tuple[Request, ...]:
    """With dropout the state is made twice, and the first one, of 16 bytes, let go."""
    return (Made(0), Made(1), 16, Made(position + 1), Made(position), -16, ALL)


def _flash_forward(gpu: Gpu, query: Tensor, key: Tensor, splits: int = 0) -> tuple[Request, ...]:
    """Partial results of a split over the keys, between the result with its sums and the state of
    random numbers; query and key are (batch, length, heads, size).
    """
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1], key.shape[2]
    if queries == 1 and heads > key_heads:  # a group's queries are taken for a sequence
        queries, heads = heads // key_heads, key_heads
    number = flash_splits(gpu, batch, queries, keys, heads, size, splits)
    if number <= 1:
        return ()
    partial = FLOAT * number * batch * heads * queries
    return (Made(0), Made(1), partial, partial * _rounded_size(size), ALL)


class _Flash(NamedTuple):
    grad_out: Tensor
    query: Tensor
    key: Tensor
    out: Tensor


@operator("aten::_flash_attention_backward").workspace("cuda")
def flash_backward(
    machine: Gpu, of: _Flash, cum_seq_q: Tensor | None = None
) -> tuple[Request, ...]:
    """``mha_bwd``, of (batch, length, heads, size); of sequences of several lengths, which are
    (rows, heads, size), ``mha_varlen_bwd``, with 128 rows more each.

    Dense copies, sums of rows, the query's gradient in float, and those of repeated heads.
    """
    grad, query, key, out = of
    heads, size = query.shape[-2:]
    batch, padded = query.shape[0], query.shape[0] * round_up(query.shape[1], _BLOCK)
    if cum_seq_q is not None:
        batch = cum_seq_q.numel() - 1
        padded = query.shape[0] + _BLOCK * batch
    rows = padded * heads
    splits = ceil_div(machine.multiprocessors, batch * heads) if must_be_deterministic() else 1
    repeated = 0
    if heads != key.shape[-2]:
        repeated = math.prod(key.shape[:-2]) * heads * size * query.element_size()
    sums, added_up = FLOAT * rows, splits * FLOAT * rows * _rounded_size(size)
    return contiguous_copy(grad), contiguous_copy(out), ALL, sums, added_up, repeated, repeated


@operator("aten::_scaled_dot_product_flash_attention").workspace("cuda")
def sdpa_flash(machine: Gpu, query: Tensor, key: Tensor, dropout_p: float) -> tuple[Request, ...]:
    """As ``mha_fwd``, with heads and length exchanged."""
    if dropout_p:
        return _random_state(6)
    return _flash_forward(machine, query.transpose(1, 2), key.transpose(1, 2))


@operator("aten::_scaled_dot_product_flash_attention_backward").workspace("cuda")
def sdpa_flash_backward(machine: Gpu, of: _Flash) -> tuple[Request, ...]:
    """As ``mha_bwd``, with heads and length exchanged."""
    return flash_backward(machine, _Flash(*(tensor.transpose(1, 2) for tensor in of)))


@operator("aten::_flash_attention_forward").workspace("cuda")
def flash_forward(
    machine: Gpu,
    query: Tensor,
    key: Tensor,
    cum_seq_q: Tensor | None,
    dropout_p: float,
    *,
    num_splits: int | None = None,
) -> tuple[Request, ...]:
    """``mha_fwd``; of several sequences (``mha_varlen_fwd``) a block table's keys are split."""
    if dropout_p:
        return _random_state(2)
    if cum_seq_q is None:
        return _flash_forward(machine, query, key, num_splits or 0)
    return ()


_KEYS = 512
"""Keys and values that a thread takes at a time."""

_forward = operator("aten::_scaled_dot_product_flash_attention_for_cpu")
_backward = operator("aten::_scaled_dot_product_flash_attention_for_cpu_backward")


def _split(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that one thread works on; ``flash_attention`` picks by length."""
    rows = query.shape[-2]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(block, rows), min(_KEYS, key.shape[-2])


@_forward.meta("cpu")
def outputs_with_sums(query: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Sums of exponentials in double where the query is, which ``meta`` does not know before torch
    2.13; native/transformers/attention.cpp, _scaled_dot_product_flash_attention_cpu.
    """
    overload: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, logsumexp = overload(**arguments)
    return result, logsumexp.to(accumulation_type(query.dtype))


@_forward.workspace("cpu")
def flash_attention(machine: Host, query: Tensor, key: Tensor) -> int | Workspace:
    """Per thread: a block of scores, its row maxima and sums, and a block of the output. Operands
    that oneDNN has packed for AMX are not counted.
    """
    if query.numel() == 0 or key.numel() == 0:
        return 0
    rows, columns = _split(query, key)
    accumulated = accumulation_type(query.dtype).itemsize
    block = (rows * columns + 2 * rows + rows * query.shape[-1]) * accumulated
    if query.dtype in HALVES:
        block += rows * columns * query.element_size()
    taken = machine.threads * block
    packs = has_onednn_products(machine, query.dtype)
    return by_onednn(machine, query.dtype, taken) if packs else taken


@_backward.workspace("cpu")
def flash_attention_backward(
    machine: Host, grad_out: Tensor, query: Tensor, key: Tensor
) -> int | Workspace:
    """Per thread: blocks of scores and of their gradient; once: the sums of one block's rows. The
    gradient is copied unless it lies with the heads inside, as the output does.
    """
    if query.numel() == 0 or key.numel() == 0:
        return 0
    rows, columns = _split(query, key)
    accumulated = accumulation_type(query.dtype).itemsize
    blocks = 2 * rows * columns * accumulated
    if query.dtype in HALVES:
        blocks += 2 * rows * columns * query.element_size()
    copied = contiguous_copy(grad_out.transpose(1, 2))
    taken = copied + machine.threads * blocks + rows * accumulated
    if not has_onednn_products(machine, query.dtype):
        return taken
    products = max(_products(machine, query, key))
    return by_onednn(machine, query.dtype, taken + products)


def _products(machine: Host, query: Tensor, key: Tensor) -> list[int]:
    """Bytes that oneDNN takes for the products of each pair of blocks: the gradient of the value,
    and, multiplied by the scale, those of the query and of the key.

    A gradient of the value is of one that lies with the heads inside, so never without gaps.
    """
    rows, columns = _split(query, key)
    width, keys = query.shape[-1], key.shape[-2]
    dense = bool(key.stride(-2) == width)
    sizes = {rows, query.shape[-2] % rows or rows}
    lengths = {columns, keys % columns or columns}
    found = [0]
    for queries, length in product(sizes, lengths):
        if queries * length * width <= SMALLEST:
            continue
        of_query = Product(machine, 1, queries, length, width, False, False, dense, True)
        of_key = Product(machine, 1, length, queries, width, True, True, False, True)
        found += [SCALE + of_query.scratchpad(), SCALE + of_key.scratchpad()]
    return found
