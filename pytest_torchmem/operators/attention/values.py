"""Attention's values, computed by the CPU: what the fused kernels of cuda give, by the formula.

native/transformers/attention.cpp, ``_scaled_dot_product_attention_math``. With dropout the backward
has to drop what the forward dropped: both draw from the seed that the forward keeps where the
fused kernels keep theirs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pytest_torchmem.operators.derivatives import gradients_of, run_plainly
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.step.generators import own_generator


def _draw_seed(dropout: float) -> int:
    if not dropout:
        return 0
    return int(torch.randint(0, 2**31 - 1, (), generator=own_generator()))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return output and logarithm of the summed exponentials of (batch, heads, length, size)."""
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    if key.size(1) != query.size(1):
        repeats = query.size(1) // key.size(1)
        key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    logsumexp = scores.logsumexp(-1)
    # A row of which nothing is attended to is 0; ``_safe_softmax``.
    weights = torch.nan_to_num(scores.softmax(-1)) if bias is not None else scores.softmax(-1)
    if dropout:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.rand(weights.shape, generator=generator) >= dropout
        weights = weights * kept / (1 - dropout)
    return (weights @ value).to(dtype), logsumexp


def _by_formula(*inputs: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = run_plainly(attend, *inputs)
    return found


def _gradients(
    grad_out: Tensor, tensors: list[Tensor | None], dropout: float, is_causal: bool, *rest: Any
) -> list[Tensor | None]:
    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        scale, seed = rest
        return attend(query, key, value, bias, dropout, is_causal, scale, seed)[0]

    return gradients_of(forward, tensors, [grad_out])


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
    seed = _draw_seed(dropout_p)
    output, sums = _by_formula(query, key, value, None, dropout_p, is_causal, scale, seed)
    state = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint64)
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
    seed = _seed_in(philox_seed, dropout_p)
    return _gradients(grad_out, [query, key, value, None], dropout_p, is_causal, scale, seed)[:3]


def _seed_in(state: Tensor, dropout: float) -> int:
    return int(state.reshape(-1).view(torch.int64)[0]) if dropout and state.numel() else 0


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
    seed = _draw_seed(dropout_p)
    output, sums = _by_formula(query, key, value, attn_bias, dropout_p, is_causal, scale, seed)
    number = torch.tensor(seed, dtype=torch.int64)
    if compute_log_sumexp:
        sums = nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf)
    return output, sums if compute_log_sumexp else None, number, torch.zeros((), dtype=torch.int64)


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
    seed = _seed_in(philox_seed, dropout_p)
    tensors = [query, key, value, attn_bias]
    found = _gradients(grad_out_, tensors, dropout_p, is_causal, scale, seed)
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
    seed = _draw_seed(dropout_p)
    output, sums = _by_formula(query, key, value, attn_bias, dropout_p, is_causal, scale, seed)
    number = torch.tensor(seed, dtype=torch.int64)
    zero = torch.zeros((), dtype=torch.int64)
    return output, sums.unsqueeze(-1), None, None, None, None, number, zero, None


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
    seed = _seed_in(philox_seed, dropout_p)
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    return _gradients(grad_out, [query, key, value, bias], dropout_p, is_causal, scale, seed)[:3]
