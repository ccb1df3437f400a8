"""The fast path of attention layers and encoder layers in inference.

native/transformers/transformer.cpp and native/transformers/cuda/attention.cu: what stands behind
one operator is a sequence of others on CUDA as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.profiler.devices.catalogue import Gpu
from pytest_torchmem.profiler.dispatch.attention import MATH, Attention, choose
from pytest_torchmem.profiler.dispatch.registry import Composite, cuda_kernel

_aten: Any = torch.ops.aten


@cuda_kernel("aten::_native_multi_head_attention")
def native_multi_head_attention(
    gpu: Gpu,
    composite: Composite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """``native_multi_head_attention_cuda``: a fused attention where one takes it."""
    if query.dim() != 3:
        return composite()
    batch, steps, _ = query.shape
    size = embed_dim // num_head
    # A mask of padding has not the shape that fused kernels want.
    if query is key is value and size % 8 == 0 and not need_weights and mask is None:
        heads = query.view(batch, steps, num_head, size).transpose(1, 2)
        call = Attention(gpu, heads, heads, heads, None, 0.0, False, False)
        if choose(call) != MATH:
            projected = functional.linear(query, qkv_weight, qkv_bias)
            q, k, v = (
                part.view(batch, -1, num_head, size).transpose(1, 2)
                for part in projected.chunk(3, -1)
            )
            output = functional.scaled_dot_product_attention(q, k, v)
            merged = output.transpose(1, 2).reshape(batch, -1, embed_dim)
            return functional.linear(merged, proj_weight, proj_bias), None
    return _unfused(
        query, key, value, num_head, (qkv_weight, qkv_bias), (proj_weight, proj_bias), mask,
        mask_type, need_weights, average_attn_weights,
    )  # fmt: skip


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    qkv: tuple[Tensor, Tensor],
    projection: tuple[Tensor, Tensor],
    mask: Tensor | None,
    mask_type: int | None,
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None]:
    """Project, multiply, softmax, multiply, project."""
    batch, steps, embed = query.shape
    projected = _qkv_projection(query, key, value, qkv[0])
    q, k, v = _aten._transform_bias_rescale_qkv.default(projected, qkv[1], heads)
    del projected
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, heads, q.size(2), k.size(2))
    del q, k
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = _aten._masked_softmax.default(scores, mask, 3, mask_type)
    del scores
    output = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(batch, heads, steps, -1)
    merged = output.transpose(1, 2).reshape(batch, steps, embed)
    result = functional.linear(merged, *projection)
    if not need_weights:
        return result, None
    return result, weights.sum(1).div_(heads) if average else weights


def _qkv_projection(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """``qkv_projection``: one product where all three are the same."""
    if query is key is value:
        return functional.linear(query, weight)
    parts = [
        functional.linear(tensor, part)
        for tensor, part in zip((query, key, value), weight.chunk(3), strict=True)
    ]
    return torch.cat(parts, 2)


@cuda_kernel("aten::_transformer_encoder_layer_fwd")
def transformer_encoder_layer_fwd(
    gpu: Gpu,
    composite: Composite,
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """``transformer_encoder_layer_forward``: the layer's own operators, one after the other."""
    first, second = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)

    def norm(x: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
        return torch.layer_norm(x, (embed_dim,), *parameters, eps)

    x = norm(src, first) if norm_first else src
    x = _aten._native_multi_head_attention.default(
        x,
        x,
        x,
        embed_dim,
        num_heads,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        mask,
        False,
        True,
        mask_type,
    )[0]
    x.add_(src)
    if not norm_first:
        x = norm(x, first)
    attended = x
    if norm_first:
        x = norm(x, second)
    hidden = _aten._addmm_activation.default(
        ffn_bias_1, x.reshape(-1, x.size(-1)), ffn_weight_1.t(), beta=1, alpha=1, use_gelu=use_gelu
    )
    x = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view(src.shape)
    del hidden
    x.add_(attended)
    return x if norm_first else norm(x, second)
