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

from pytest_torchmem.operators.attention.values import AttentionOptions, attend, gradients, results
from pytest_torchmem.operators.registry import operator


def describe() -> None:
    """Make the records; they are known once torch/nn/attention/varlen.py is imported."""
    operator("torch_attn::_varlen_attn").values("cuda")(_forward)
    operator("torch_attn::_varlen_attn_backward").values("cuda")(_backward)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_size: Sequence[int] | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums and an empty random state; torch/nn/attention/varlen.py, ``_varlen_attn``."""
    left, right = window_size or (None, None)
    output, sums, *_ = flash(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        0.0,
        is_causal,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=seqused_k,
        alibi_slopes=None,
        block_table=block_table,
    )
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None,
    window_size: Sequence[int] | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value; ``_varlen_attn_backward``."""
    left, right = window_size or (None, None)
    return flash_backward(
        grad_out,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        0.0,
        is_causal,
        rng_state,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


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

    @classmethod
    def of_flash(cls, is_causal: bool, left: int | None, right: int | None) -> "_Window":
        """native/transformers/cuda/flash_attn/flash_api.cpp, ``set_params_fprop``."""
        left, right = (None if one is None or one < 0 else one for one in (left, right))
        return cls(left, 0 if is_causal else right)

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


def _attend(
    lengths: _Lengths,
    window: _Window,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    by: AttentionOptions,
) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the sums of each sequence as (heads, length)."""
    outputs, sums = [], []
    for of_query, of_key, of_value in lengths.split(query, key, value):
        masked = window.bias(of_query.shape[2], of_key.shape[2])
        output, summed = attend(of_query, of_key, of_value, masked, by)
        outputs.append(output[0].transpose(0, 1))
        sums.append(summed[0])
    joined = torch.stack(outputs) if lengths.queries is None else torch.cat(outputs)
    return joined, sums


def _output_alone(*about: Any) -> Tensor:
    return _attend(*about)[0]


@operator("aten::_flash_attention_forward").values()
def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Any, ...]:
    """Output, sums, and the seed in the place of the random state."""
    if any(one is not None for one in (seqused_k, alibi_slopes, block_table)):
        raise NotImplementedError("keys of a cache, or slopes of positions")
    lengths = _Lengths.of(cum_seq_q, cum_seq_k)
    window = _Window.of_flash(is_causal, window_size_left, window_size_right)
    by = AttentionOptions(dropout_p, False, scale)
    output, sums, number = results(partial(_attend, lengths, window), query, key, value, None, by)
    state = torch.tensor([number, 0], dtype=torch.int64).view(torch.uint64)
    joined = torch.stack(sums) if lengths.queries is None else torch.cat(sums, 1)
    return output, joined, state, None, None


@operator("aten::_flash_attention_backward").values()
def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    *,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value."""
    window = _Window.of_flash(is_causal, window_size_left, window_size_right)
    function = partial(_output_alone, _Lengths.of(cum_seq_q, cum_seq_k), window)
    by = AttentionOptions(dropout_p, False, scale)
    return gradients(function, grad_out, [query, key, value, None], rng_state, by)[:3]


def _flat(lengths: _Lengths, *tensors: Tensor) -> list[Tensor]:
    return [*tensors] if lengths.queries is None else [one[0] for one in tensors]


@operator("aten::_efficient_attention_forward").values()
def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool,
    *,
    scale: float | None,
    seqlen_k: Tensor | None,
    window_size: int | None,
) -> tuple[Any, ...]:
    """Output, sums (padded with infinity, to a multiple of 32), seed, offset and the lengths."""
    if any(one is not None for one in (bias, seqlen_k, window_size)):
        raise NotImplementedError("a bias, lengths of keys, or a window")
    lengths = _Lengths.of(cu_seqlens_q, cu_seqlens_k)
    window = _of_mask(custom_mask_type)
    query, key, value = _flat(lengths, query, key, value)
    by = AttentionOptions(dropout_p, False, scale)
    output, sums, number = results(partial(_attend, lengths, window), query, key, value, None, by)
    longest = max([one.shape[1] for one in sums], default=0)
    if lengths.queries is not None:
        output, longest = output[None], max_seqlen_q or longest
    width = longest + -longest % 32
    padded = [nn.functional.pad(one, (0, width - one.shape[1]), value=math.inf) for one in sums]
    seed, offset = (torch.tensor(one, dtype=torch.int64) for one in (number, 0))
    return output, torch.stack(padded) if compute_log_sumexp else None, seed, offset, None, None


@operator("aten::_efficient_attention_backward").values()
def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    dropout_p: float,
    philox_seed: Tensor,
    custom_mask_type: int,
    *,
    scale: float | None,
    window_size: int | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value."""
    if bias is not None or window_size is not None:
        raise NotImplementedError("a bias, or a window")
    lengths = _Lengths.of(cu_seqlens_q, cu_seqlens_k)
    function = partial(_output_alone, lengths, _of_mask(custom_mask_type))
    gradient, *given = _flat(lengths, grad_out_, query, key, value)
    by = AttentionOptions(dropout_p, False, scale)
    found = gradients(function, gradient, [*given, None], philox_seed, by)[:3]
    if lengths.queries is not None:
        found = [None if one is None else one[None] for one in found]
    return [*found, None]


def _of_mask(kind: int) -> _Window:
    return _Window(None, 0 if kind else None, from_the_end=kind != _TOP_LEFT)
