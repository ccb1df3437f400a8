"""Attention's values, computed by the CPU: what the fused kernels of cuda give, by the formula.

native/transformers/attention.cpp, ``_scaled_dot_product_attention_math``. Dropout drops what it
would on the CPU, and the backward what the forward dropped: where the fused kernels keep their seed
stands a number by which the generator is found that the forward drew from.

Of sequences of several lengths in one tensor (torch/nn/attention/varlen.py; ``mha_varlen_fwd`` of
native/transformers/cuda/flash_attn/flash_api.cpp), of nested tensors as well
(torch/nested/_internal/sdpa.py), dimensions are (rows, heads, size), where a sequence has the rows
from one of the cumulated lengths to the next; without these they are (batch, length, heads, size).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_torchmem.operators.activations import gradients_of, plainly
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import asked_for
from pytest_torchmem.step.generators import current_generator, forward_draws


class FusedAttention(NamedTuple):
    """What attention's operators have in common, by the names of their schemas' arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    attn_bias: Tensor | None = None
    generator: torch.Generator | None = None
    """What the dropout draws from."""

    @property
    def tensors(self) -> list[Tensor | None]:
        """What has gradients: query, key, value and bias."""
        return [self.query, self.key, self.value, self.attn_bias]

    def of(self, *tensors: Any) -> "FusedAttention":
        """Return the same of other ``tensors``."""
        query, key, value, bias = tensors
        return self._replace(query=query, key=key, value=value, attn_bias=bias)


def attend(by: FusedAttention) -> tuple[Tensor, Tensor]:
    """Return output and logarithm of the summed exponentials of (batch, heads, length, size)."""
    query, key, value, bias = by.query, by.key, by.value, by.attn_bias
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    if key.size(1) != query.size(1):
        repeats = query.size(1) // key.size(1)
        key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    factor = 1 / math.sqrt(query.size(-1)) if by.scale is None else by.scale
    scores = query @ key.transpose(-2, -1) * factor
    if bias is not None:
        scores = scores + bias.float()
    if by.is_causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    logsumexp = scores.logsumexp(-1)
    kept = None
    if by.dropout_p:
        kept = torch.empty_like(scores).bernoulli_(1 - by.dropout_p, generator=by.generator)
        kept /= 1 - by.dropout_p
    weighted_sum: Any = _WeightedSum.apply
    output: Tensor = weighted_sum(scores, value, logsumexp, kept)
    return output.to(dtype), logsumexp


class _WeightedSum(torch.autograd.Function):
    """Values weighted by the softmax of scores, and its derivative as the fused kernels have it.

    A row that attends to nothing is 0, and so are its gradients. Backwards compute the weights anew
    from the logarithm of the summed exponentials, which loses its summands where the scores are the
    least numbers of their type; native/cpu/FlashAttentionKernel.cpp, ``cpu_flash_attention`` and
    ``cpu_flash_attention_backward``.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, value: Tensor, logsumexp: Tensor, kept: Tensor | None
    ) -> Tensor:
        weights = scores.softmax(-1).masked_fill((logsumexp == -math.inf).unsqueeze(-1), 0)
        output = (weights if kept is None else weights * kept) @ value
        ctx.save_for_backward(scores, value, logsumexp, kept, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scores, value, logsumexp, kept, output = ctx.saved_tensors
        logsumexp = logsumexp.unsqueeze(-1)
        weights = (scores - logsumexp).exp().masked_fill(logsumexp == -math.inf, 0)
        of_weights = gradient @ value.transpose(-2, -1)
        dropped = weights
        if kept is not None:
            # For dropout_p=1 the forward multiplies 0 and 1 / 0, and the backward chooses 0;
            # mem_eff_attention/kernel_forward.h and kernel_backward.h, ``dropout_scale``.
            kept = kept.nan_to_num()
            dropped, of_weights = weights * kept, of_weights * kept
        of_value = dropped.transpose(-2, -1) @ gradient
        of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdim=True))
        return of_scores, of_value, None, None


def results(
    function: Callable[[FusedAttention], tuple[Tensor, Any]], by: FusedAttention
) -> tuple[Tensor, Any, Tensor]:
    """Return output and sums of ``function``, and the number that stands for the random state."""
    number = forward_draws().keep() if by.dropout_p else 0
    with plainly():
        output, sums = function(by._replace(generator=current_generator()))
    return output, sums, torch.tensor(number, dtype=torch.int64)


def gradients(
    function: Callable[[FusedAttention], tuple[Tensor, Any]],
    grad_out: Tensor,
    by: FusedAttention,
    seed: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of query, key, value and bias, ``None`` for those without values.
    ``seed`` has the number that ``results`` returned.
    """
    if by.dropout_p:
        number = int(seed.reshape(-1).view(torch.int64)[0]) if seed.numel() else 0
        generator = forward_draws().of(number)
        if generator is None:
            return [None] * len(by.tensors)
        by = by._replace(generator=generator)
    return gradients_of(lambda *given: function(by.of(*given)), by.tensors, [grad_out])


def random_state(number: Tensor) -> Tensor:
    """Return the seed and the offset of flash attention in one tensor."""
    return torch.stack([number, torch.zeros_like(number)]).view(torch.uint64)


@operator("aten::_scaled_dot_product_flash_attention").values()
def flash(attention: FusedAttention) -> tuple[Any, ...]:
    """Output, sums, and the seed in the place of the random state."""
    output, sums, number = results(attend, attention)
    return output, sums, None, None, None, None, random_state(number), None, None


@operator("aten::_scaled_dot_product_efficient_attention").values()
def efficient(attention: FusedAttention, compute_log_sumexp: bool) -> tuple[Any, ...]:
    """Output, sums, seed and offset.

    The rows of the sums are padded with infinity to a multiple of 32: ``kAlignLSE`` of
    ``AttentionKernel``; native/transformers/cuda/mem_eff_attention/kernel_forward.h.
    """
    output, sums, seed = results(attend, attention)
    if compute_log_sumexp:
        sums = nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf)
    return output, sums if compute_log_sumexp else None, seed, torch.zeros_like(seed)


@operator("aten::_scaled_dot_product_cudnn_attention").values()
def cudnn(attention: FusedAttention, compute_log_sumexp: bool) -> tuple[Any, ...]:
    """Output, sums (with a dimension more), seed and offset."""
    output, sums, seed = results(attend, attention)
    kept = sums.unsqueeze(-1) if compute_log_sumexp else None
    return output, kept, None, None, None, None, seed, torch.zeros_like(seed), None


@operator("aten::_scaled_dot_product_flash_attention_backward").values()
@operator("aten::_scaled_dot_product_cudnn_attention_backward").values()
def backward(
    grad_out: Tensor, attention: FusedAttention, philox_seed: Tensor
) -> list[Tensor | None]:
    """Gradients of query, key and value; to cuDNN no mask is one without elements."""
    bias = attention.attn_bias
    if bias is not None and not bias.numel():
        attention = attention._replace(attn_bias=None)
    return gradients(attend, grad_out, attention, philox_seed)[:3]


@operator("aten::_scaled_dot_product_efficient_attention_backward").values()
def efficient_backward(
    grad_out_: Tensor, attention: FusedAttention, philox_seed: Tensor, grad_input_mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and the bias."""
    return asked_for(gradients(attend, grad_out_, attention, philox_seed), grad_input_mask)


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
    output, sums, *_ = flash_of_lengths(attention, around, seqused_k, None, block_table)
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
    return flash_backward_of_lengths(grad_out, attention, around, rng_state)


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


_Rows = list[tuple[slice, slice]] | None
"""Each sequence's rows of queries and of keys; ``None`` in a batch."""


def _rows_of(queries: Tensor | None, keys: Tensor | None) -> _Rows:
    """Return the rows from one of the cumulated lengths to the next."""
    if queries is None and keys is None:
        return None
    if queries is None or keys is None:
        raise NotImplementedError("lengths of the queries or of the keys alone")
    starts = ([slice(*pair) for pair in pairwise(one.tolist())] for one in (queries, keys))
    return list(zip(*starts, strict=False))


class _Sequences(NamedTuple):
    """What flash attention is told of sequences of several lengths, by the names of its schemas."""

    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    window_size_left: int | None = None
    window_size_right: int | None = None

    def window(self, is_causal: bool) -> _Window:
        """native/transformers/cuda/flash_attn/flash_api.cpp, ``set_params_fprop``."""
        sides = (self.window_size_left, self.window_size_right)
        left, right = (None if one is None or one < 0 else one for one in sides)
        return _Window(left, 0 if is_causal else right)


def _attend(rows: _Rows, window: _Window, by: FusedAttention) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the sums of each sequence as (heads, length)."""
    outputs, sums = [], []
    sequences: Any = zip(by.query, by.key, by.value, strict=True)
    if rows is not None:
        sequences = ((by.query[own], by.key[keys], by.value[keys]) for own, keys in rows)
    for sequence in sequences:
        query, key, value = (part.transpose(0, 1)[None] for part in sequence)
        masked = window.bias(query.shape[2], key.shape[2])
        output, summed = attend(by._replace(is_causal=False).of(query, key, value, masked))
        outputs.append(output[0].transpose(0, 1))
        sums.append(summed[0])
    joined = torch.stack(outputs) if rows is None else torch.cat(outputs)
    return joined, sums


@operator("aten::_flash_attention_forward").values()
def flash_of_lengths(
    attention: FusedAttention,
    sequences: _Sequences,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Any, ...]:
    """Output, sums, and the seed in the place of the random state."""
    if any(one is not None for one in (seqused_k, alibi_slopes, block_table)):
        raise NotImplementedError("keys of a cache, or slopes of positions")
    rows, window = _rows_of(*sequences[:2]), sequences.window(attention.is_causal)
    output, sums, number = results(partial(_attend, rows, window), attention)
    joined = torch.stack(sums) if rows is None else torch.cat(sums, 1)
    return output, joined, random_state(number), None, None


@operator("aten::_flash_attention_backward").values()
def flash_backward_of_lengths(
    grad_out: Tensor, attention: FusedAttention, sequences: _Sequences, rng_state: Tensor
) -> list[Tensor | None]:
    """Gradients of query, key and value."""
    rows, window = _rows_of(*sequences[:2]), sequences.window(attention.is_causal)
    return gradients(partial(_attend, rows, window), grad_out, attention, rng_state)[:3]


def _of_lengths(
    rows: _Rows, kind: int, attention: FusedAttention
) -> tuple[Callable[[FusedAttention], tuple[Tensor, Any]], FusedAttention]:
    """Return what attends with a kind of mask, and the attention, without the batch of one."""
    function = partial(_attend, rows, _Window(None, 0 if kind else None, kind != _TOP_LEFT))
    if rows is None:
        return function, attention
    return function, attention.of(attention.query[0], attention.key[0], attention.value[0], None)


@operator("aten::_efficient_attention_forward").values()
def efficient_of_lengths(
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
    rows = _rows_of(cu_seqlens_q, cu_seqlens_k)
    output, sums, seed = results(*_of_lengths(rows, custom_mask_type, attention))
    longest = max([one.shape[1] for one in sums], default=0)
    if rows is not None:
        output, longest = output[None], max_seqlen_q or longest
    width = longest + -longest % 32
    padded = [nn.functional.pad(one, (0, width - one.shape[1]), value=math.inf) for one in sums]
    whole = torch.stack(padded) if compute_log_sumexp else None
    return output, whole, seed, torch.zeros_like(seed), None, None


@operator("aten::_efficient_attention_backward").values()
def efficient_backward_of_lengths(
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
    rows = _rows_of(cu_seqlens_q, cu_seqlens_k)
    function, flat = _of_lengths(rows, custom_mask_type, attention)
    gradient = grad_out_ if rows is None else grad_out_[0]
    found = gradients(function, gradient, flat, philox_seed)[:3]
    if rows is not None:
        found = [None if one is None else one[None] for one in found]
    return [*found, None]
