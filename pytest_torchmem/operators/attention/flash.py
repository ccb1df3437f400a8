"""Flash attention on CUDA: exact.

native/transformers/cuda/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd`` and their ``varlen``
forms) of 2.13.
"""

import math

from torch import Tensor

from pytest_torchmem.operators.geometry import ceil_div, contiguous_copy, round_up
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import ALL, Made, Request
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.state.settings import must_be_deterministic

_FLOAT = 4
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


def _flash_forward(gpu: Gpu, query: Tensor, key: Tensor, splits: int = 0) -> tuple[int, ...]:
    """Partial results of a split over the keys; query and key are (batch, length, heads, size)."""
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1], key.shape[2]
    if queries == 1 and heads > key_heads:  # a group's queries are taken for a sequence
        queries, heads = heads // key_heads, key_heads
    number = flash_splits(gpu, batch, queries, keys, heads, size, splits)
    if number <= 1:
        return ()
    partial = _FLOAT * number * batch * heads * queries
    return (partial, partial * _rounded_size(size))


def _flash_backward(
    gpu: Gpu, grad: Tensor, query: Tensor, key: Tensor, out: Tensor, batch: int, padded: int
) -> tuple[Request, ...]:
    """Dense copies, sums of rows, the query's gradient in float, and those of repeated heads.

    Query and key are (..., heads, size); ``padded`` is how many queries there are in whole blocks.
    """
    heads, size = query.shape[-2:]
    rows = padded * heads
    splits = ceil_div(gpu.multiprocessors, batch * heads) if must_be_deterministic() else 1
    repeated = 0
    if heads != key.shape[-2]:
        repeated = math.prod(key.shape[:-2]) * heads * size * query.element_size()
    return (
        contiguous_copy(grad),
        contiguous_copy(out),
        ALL,
        _FLOAT * rows,
        splits * _FLOAT * rows * _rounded_size(size),
        repeated,
        repeated,
    )


def _flash_backward_of_batch(
    gpu: Gpu, grad: Tensor, query: Tensor, key: Tensor, out: Tensor
) -> tuple[Request, ...]:
    """``mha_bwd``; query and key are (batch, length, heads, size)."""
    batch, queries = query.shape[:2]
    return _flash_backward(gpu, grad, query, key, out, batch, batch * round_up(queries, _BLOCK))


@operator("aten::_scaled_dot_product_flash_attention").workspace("cuda")
def sdpa_flash(machine: Gpu, query: Tensor, key: Tensor, dropout_p: float) -> tuple[Request, ...]:
    """As ``mha_fwd``, with heads and length exchanged."""
    if dropout_p:
        return _random_state(6)
    return _flash_forward(machine, query.transpose(1, 2), key.transpose(1, 2))


@operator("aten::_scaled_dot_product_flash_attention_backward").workspace("cuda")
def sdpa_flash_backward(
    machine: Gpu, grad_out: Tensor, query: Tensor, key: Tensor, out: Tensor
) -> tuple[Request, ...]:
    """As ``mha_bwd``, with heads and length exchanged."""
    grad, queries, keys, result = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, out))
    return _flash_backward_of_batch(machine, grad, queries, keys, result)


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
    """``mha_fwd``; of sequences of several lengths (``mha_varlen_fwd``) only a block table's keys
    are split.
    """
    if dropout_p:
        return _random_state(2)
    if cum_seq_q is None:
        return _flash_forward(machine, query, key, num_splits or 0)
    return ()


@operator("aten::_flash_attention_backward").workspace("cuda")
def flash_backward(
    machine: Gpu,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    out: Tensor,
    cum_seq_q: Tensor | None,
) -> tuple[Request, ...]:
    """``mha_bwd``; of sequences of several lengths ``mha_varlen_bwd``, with 128 rows more each."""
    if cum_seq_q is None:
        return _flash_backward_of_batch(machine, grad_out, query, key, out)
    batch = cum_seq_q.numel() - 1
    padded = query.shape[0] + _BLOCK * batch
    return _flash_backward(machine, grad_out, query, key, out, batch, padded)
