"""Attention's values, computed by the CPU: what the fused kernels of cuda give, by the formula.

native/transformers/attention.cpp, ``_scaled_dot_product_attention_math``. Dropout drops what it
would on the CPU, and the backward what the forward dropped: where the fused kernels keep their seed
stands a number by which the generator is found that the forward drew from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_torchmem.operators.derivatives import gradients_of, run_plainly
from pytest_torchmem.operators.geometry import asked_for
from pytest_torchmem.operators.registry import operator
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

    def of(self, *tensors: Any) -> FusedAttention:
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
            dropped, of_weights = weights * kept, of_weights * kept
        of_value = dropped.transpose(-2, -1) @ gradient
        of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdim=True))
        return of_scores, of_value, None, None


def results(
    function: Callable[[FusedAttention], tuple[Tensor, Any]], by: FusedAttention
) -> tuple[Tensor, Any, Tensor]:
    """Return output, sums, and the number that stands for the random state.

    ``function`` takes the attention, as ``attend`` does.
    """
    number = forward_draws().keep() if by.dropout_p else 0
    output, sums = run_plainly(function, by._replace(generator=current_generator()))
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
def cudnn(attention: FusedAttention) -> tuple[Any, ...]:
    """Output, sums (with a dimension more), seed and offset."""
    output, sums, seed = results(attend, attention)
    offset = torch.zeros_like(seed)
    return output, sums.unsqueeze(-1), None, None, None, None, seed, offset, None


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
