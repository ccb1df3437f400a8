"""Attention's values, computed by the CPU: what the fused kernels of cuda give, by the formula.

native/transformers/attention.cpp, ``_scaled_dot_product_attention_math``. Dropout drops what it
would on the CPU, and the backward what the forward dropped: where the fused kernels keep their seed
stands a number by which the generator is found that the forward drew from.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_torchmem.operators.derivatives import gradients_of, run_plainly
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.step.generators import current_generator, forward_draws


class AttentionOptions(NamedTuple):
    """What attention does beside its tensors."""

    dropout: float
    is_causal: bool
    scale: float | None
    generator: torch.Generator | None = None
    """What the dropout draws from."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, by: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return output and logarithm of the summed exponentials of (batch, heads, length, size)."""
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
    if by.dropout:
        kept = torch.empty_like(scores).bernoulli_(1 - by.dropout, generator=by.generator)
        kept /= 1 - by.dropout
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
            dropped, of_weights = weights * kept, of_weights * kept
        of_value = dropped.transpose(-2, -1) @ gradient
        of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdim=True))
        return of_scores, of_value, None, None


def results(
    function: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    by: AttentionOptions,
) -> tuple[Tensor, Any, int]:
    """Return output, sums, and the number that stands for the random state.

    ``function`` takes the tensors and ``by``, as ``attend`` does.
    """
    number = forward_draws().keep() if by.dropout else 0
    by = by._replace(generator=current_generator())
    output, sums = run_plainly(function, query, key, value, bias, by)
    return output, sums, number


def gradients(
    function: Callable[..., Tensor],
    grad_out: Tensor,
    tensors: list[Tensor | None],
    seed: Tensor,
    by: AttentionOptions,
) -> list[Tensor | None]:
    """Return the gradients of query, key, value and bias, ``None`` for those without values.

    ``function`` returns the output alone; ``seed`` has the number that ``results`` returned.
    """
    if by.dropout:
        number = int(seed.reshape(-1).view(torch.int64)[0]) if seed.numel() else 0
        generator = forward_draws().of(number)
        if generator is None:
            return [None] * len(tensors)
        by = by._replace(generator=generator)
    return gradients_of(partial(_given, function, by), tensors, [grad_out])


def _given(
    function: Callable[..., Tensor], by: AttentionOptions, *tensors: Tensor | None
) -> Tensor:
    return function(*tensors, by)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, by: AttentionOptions
) -> tuple[Tensor, Tensor, int]:
    return results(attend, query, key, value, bias, by)


def _backward(
    grad_out: Tensor, tensors: list[Tensor | None], seed: Tensor, by: AttentionOptions
) -> list[Tensor | None]:
    return gradients(_output_alone, grad_out, tensors, seed, by)


def _output_alone(*about: Any) -> Tensor:
    return attend(*about)[0]


@operator("aten::_scaled_dot_product_flash_attention").values()
def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> tuple[Any, ...]:
    """Output, sums, and the seed in the place of the random state."""
    by = AttentionOptions(dropout_p, is_causal, scale)
    output, sums, number = _forward(query, key, value, None, by)
    state = torch.tensor([number, 0], dtype=torch.int64).view(torch.uint64)
    return output, sums, None, None, None, None, state, None, None


@operator("aten::_scaled_dot_product_flash_attention_backward").values()
def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    *,
    scale: float | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value."""
    by = AttentionOptions(dropout_p, is_causal, scale)
    return _backward(grad_out, [query, key, value, None], philox_seed, by)[:3]


@operator("aten::_scaled_dot_product_efficient_attention").values()
def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> tuple[Any, ...]:
    """Output, sums, seed and offset.

    The rows of the sums are padded with infinity to a multiple of 32: ``kAlignLSE`` of
    ``AttentionKernel``; native/transformers/cuda/mem_eff_attention/kernel_forward.h.
    """
    by = AttentionOptions(dropout_p, is_causal, scale)
    output, sums, number = _forward(query, key, value, attn_bias, by)
    seed, offset = (torch.tensor(one, dtype=torch.int64) for one in (number, 0))
    if compute_log_sumexp:
        sums = nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf)
    return output, sums if compute_log_sumexp else None, seed, offset


@operator("aten::_scaled_dot_product_efficient_attention_backward").values()
def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    philox_seed: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool,
    *,
    scale: float | None,
) -> list[Tensor | None]:
    """Gradients of query, key, value and the bias."""
    by = AttentionOptions(dropout_p, is_causal, scale)
    found = _backward(grad_out_, [query, key, value, attn_bias], philox_seed, by)
    return [one if wanted else None for one, wanted in zip(found, grad_input_mask, strict=True)]


@operator("aten::_scaled_dot_product_cudnn_attention").values()
def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> tuple[Any, ...]:
    """Output, sums (with a dimension more), seed and offset."""
    by = AttentionOptions(dropout_p, is_causal, scale)
    output, sums, number = _forward(query, key, value, attn_bias, by)
    seed, offset = (torch.tensor(one, dtype=torch.int64) for one in (number, 0))
    return output, sums.unsqueeze(-1), None, None, None, None, seed, offset, None


@operator("aten::_scaled_dot_product_cudnn_attention_backward").values()
def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    philox_seed: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value."""
    by = AttentionOptions(dropout_p, is_causal, scale)
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    return _backward(grad_out, [query, key, value, bias], philox_seed, by)[:3]
