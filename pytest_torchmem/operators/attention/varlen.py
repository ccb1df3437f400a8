"""Attention on sequences of several lengths in one tensor: ``torch.nn.attention.varlen``, values.

torch/nn/attention/varlen.py; native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_varlen_fwd``.

Values are computed by the formula, for nested tensors as well (torch/nested/_internal/sdpa.py).
Dimensions are (rows, heads, size), where a sequence has the rows from one of the cumulated lengths
to the next; without these they are (batch, length, heads, size).
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_torchmem.operators.attention.values import (
    FusedAttention,
    attend,
    gradients,
    random_state,
    results,
)
from pytest_torchmem.operators.registry import operator


def describe() -> None:
    """Make the records; they are known once torch/nn/attention/varlen.py is imported."""
    operator("torch_attn::_varlen_attn").values("cuda")(_forward)
    operator("torch_attn::_varlen_attn_backward").values("cuda")(_backward)


def _forward(
    attention: FusedAttention,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    window_size: Sequence[int] | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums and an empty random state; torch/nn/attention/varlen.py, ``_varlen_attn``."""
    around = _Sequences(cu_seq_q, cu_seq_k, *(window_size or ()))
    output, sums, *_ = flash(attention, around, seqused_k, None, block_table)
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    attention: FusedAttention,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    rng_state: Tensor,
    window_size: Sequence[int] | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value; ``_varlen_attn_backward``."""
    around = _Sequences(cu_seq_q, cu_seq_k, *(window_size or ()))
    return flash_backward(grad_out, attention, around, rng_state)


_TOP_LEFT = 1
"""The custom mask of the memory-efficient kernel that begins at the first key; 2 ends at the last
(native/transformers/cuda/mem_eff_attention/kernel_forward.h, ``CustomMaskType``).
"""


class _Window(NamedTuple):
    """Keys that a query attends to, before its own place and behind it; ``None`` for all."""

    left: int | None = None
    right: int | None = None
    from_the_end: bool = True
    """Whether the last query stands at the last key, and not the first at the first."""

    def bias(self, rows: int, columns: int) -> Tensor | None:
        """Return minus infinity for keys that are out of it."""
        if self.left is None and self.right is None:
            return None
        shift = columns - rows if self.from_the_end else 0
        ahead = torch.arange(columns) - (torch.arange(rows)[:, None] + shift)
        outside = torch.zeros(rows, columns, dtype=torch.bool)
        if self.left is not None:
            outside |= ahead < -self.left
        if self.right is not None:
            outside |= ahead > self.right
        return torch.zeros(rows, columns).masked_fill(outside, -math.inf)


class _Lengths(NamedTuple):
    """Where sequences begin among the rows, of queries and of keys; ``None`` in a batch."""

    queries: list[int] | None
    keys: list[int] | None

    @classmethod
    def of(cls, queries: Tensor | None, keys: Tensor | None) -> "_Lengths":
        if queries is None and keys is None:
            return cls(None, None)
        if queries is None or keys is None:
            raise NotImplementedError("lengths of the queries or of the keys alone")
        return cls(queries.tolist(), keys.tolist())

    def split(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield each sequence's as (1, heads, length, size)."""
        if self.queries is None or self.keys is None:
            for one in zip(query, key, value, strict=True):
                yield tuple(part.transpose(0, 1)[None] for part in one)
            return
        starts = zip(self.queries, self.queries[1:], self.keys, self.keys[1:], strict=False)
        for first, last, first_key, last_key in starts:
            parts = (query[first:last], key[first_key:last_key], value[first_key:last_key])
            yield tuple(part.transpose(0, 1)[None] for part in parts)


class _Sequences(NamedTuple):
    """What flash attention is told of sequences of several lengths, by the names of its schemas."""

    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    window_size_left: int | None = None
    window_size_right: int | None = None

    @property
    def lengths(self) -> _Lengths:
        """Where sequences begin."""
        return _Lengths.of(self.cum_seq_q, self.cum_seq_k)

    def window(self, is_causal: bool) -> _Window:
        """native/transformers/cuda/flash_attn/flash_api.cpp, ``set_params_fprop``."""
        sides = (self.window_size_left, self.window_size_right)
        left, right = (None if one is None or one < 0 else one for one in sides)
        return _Window(left, 0 if is_causal else right)


def _attend(lengths: _Lengths, window: _Window, by: FusedAttention) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the sums of each sequence as (heads, length)."""
    outputs, sums = [], []
    for query, key, value in lengths.split(by.query, by.key, by.value):
        masked = window.bias(query.shape[2], key.shape[2])
        output, summed = attend(by._replace(is_causal=False).of(query, key, value, masked))
        outputs.append(output[0].transpose(0, 1))
        sums.append(summed[0])
    joined = torch.stack(outputs) if lengths.queries is None else torch.cat(outputs)
    return joined, sums


@operator("aten::_flash_attention_forward").values()
def flash(
    attention: FusedAttention,
    sequences: _Sequences,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Any, ...]:
    """Output, sums, and the seed in the place of the random state."""
    if any(one is not None for one in (seqused_k, alibi_slopes, block_table)):
        raise NotImplementedError("keys of a cache, or slopes of positions")
    lengths, window = sequences.lengths, sequences.window(attention.is_causal)
    output, sums, number = results(partial(_attend, lengths, window), attention)
    joined = torch.stack(sums) if lengths.queries is None else torch.cat(sums, 1)
    return output, joined, random_state(number), None, None


@operator("aten::_flash_attention_backward").values()
def flash_backward(
    grad_out: Tensor, attention: FusedAttention, sequences: _Sequences, rng_state: Tensor
) -> list[Tensor | None]:
    """Gradients of query, key and value."""
    function = partial(_attend, sequences.lengths, sequences.window(attention.is_causal))
    return gradients(function, grad_out, attention, rng_state)[:3]


def _flat(lengths: _Lengths, attention: FusedAttention) -> FusedAttention:
    if lengths.queries is None:
        return attention
    return attention.of(attention.query[0], attention.key[0], attention.value[0], None)


@operator("aten::_efficient_attention_forward").values()
def efficient(
    attention: FusedAttention,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    custom_mask_type: int,
    compute_log_sumexp: bool,
    *,
    seqlen_k: Tensor | None,
    window_size: int | None,
) -> tuple[Any, ...]:
    """Output, sums (padded with infinity, to a multiple of 32), seed, offset and the lengths."""
    if any(one is not None for one in (bias, seqlen_k, window_size)):
        raise NotImplementedError("a bias, lengths of keys, or a window")
    lengths = _Lengths.of(cu_seqlens_q, cu_seqlens_k)
    function = partial(_attend, lengths, _of_mask(custom_mask_type))
    output, sums, seed = results(function, _flat(lengths, attention))
    longest = max([one.shape[1] for one in sums], default=0)
    if lengths.queries is not None:
        output, longest = output[None], max_seqlen_q or longest
    width = longest + -longest % 32
    padded = [nn.functional.pad(one, (0, width - one.shape[1]), value=math.inf) for one in sums]
    whole = torch.stack(padded) if compute_log_sumexp else None
    return output, whole, seed, torch.zeros_like(seed), None, None


@operator("aten::_efficient_attention_backward").values()
def efficient_backward(
    grad_out_: Tensor,
    attention: FusedAttention,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    philox_seed: Tensor,
    custom_mask_type: int,
    *,
    window_size: int | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value."""
    if bias is not None or window_size is not None:
        raise NotImplementedError("a bias, or a window")
    lengths = _Lengths.of(cu_seqlens_q, cu_seqlens_k)
    function = partial(_attend, lengths, _of_mask(custom_mask_type))
    gradient = grad_out_ if lengths.queries is None else grad_out_[0]
    found = gradients(function, gradient, _flat(lengths, attention), philox_seed)[:3]
    if lengths.queries is not None:
        found = [None if one is None else one[None] for one in found]
    return [*found, None]


def _of_mask(kind: int) -> _Window:
    return _Window(None, 0 if kind else None, from_the_end=kind != _TOP_LEFT)
