"""The fast path of attention layers and encoder layers in inference.

native/transformers/transformer.cpp and native/transformers/cuda/attention.cu: what stands behind
one operator is a sequence of others on CUDA as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.operators.arguments import AttentionLayer, EncoderLayer
from pytest_torchmem.operators.attention.choice import MATH, Attention, choose
from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.encoder_layer.paths import first_product, run_encoder_layer
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.gpus import Gpu

_aten: Any = torch.ops.aten


@operator("aten::_native_multi_head_attention").path("cuda")
def native_multi_head_attention(machine: Gpu, call: CompositeCall, layer: AttentionLayer) -> Any:
    """``native_multi_head_attention_cuda``: a fused attention where one takes it."""
    query, heads = layer.query, layer.num_head
    if query.dim() != 3:
        return call()
    batch, steps, _ = query.shape
    size = layer.embed_dim // heads
    # A mask of padding has not the shape that fused kernels want.
    fused = query is layer.key is layer.value and not layer.need_weights and layer.mask is None
    if fused and size % 8 == 0:
        parts = query.view(batch, steps, heads, size).transpose(1, 2)
        if choose(Attention(machine, parts, parts, parts, None, 0.0, False, False)) != MATH:
            projected = functional.linear(query, layer.qkv_weight, layer.qkv_bias)
            q, k, v = (
                part.view(batch, -1, heads, size).transpose(1, 2) for part in projected.chunk(3, -1)
            )
            output = functional.scaled_dot_product_attention(q, k, v)
            merged = output.transpose(1, 2).reshape(batch, -1, layer.embed_dim)
            return functional.linear(merged, layer.proj_weight, layer.proj_bias), None
    return _unfused(layer)


def _unfused(layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
    """Project, multiply, softmax, multiply, project."""
    heads = layer.num_head
    batch, steps, embed = layer.query.shape
    projected = _qkv_projection(layer.query, layer.key, layer.value, layer.qkv_weight)
    q, k, v = _aten._transform_bias_rescale_qkv.default(projected, layer.qkv_bias, heads)
    del projected
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, heads, q.size(2), k.size(2))
    del q, k
    if layer.mask is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = _aten._masked_softmax.default(scores, layer.mask, 3, layer.mask_type)
    del scores
    output = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(batch, heads, steps, -1)
    merged = output.transpose(1, 2).reshape(batch, steps, embed)
    result = functional.linear(merged, layer.proj_weight, layer.proj_bias)
    if not layer.need_weights:
        return result, None
    return result, weights.sum(1).div_(heads) if layer.average_attn_weights else weights


def _qkv_projection(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """``qkv_projection``: one product where all three are the same."""
    if query is key is value:
        return functional.linear(query, weight)
    parts = [
        functional.linear(tensor, part)
        for tensor, part in zip((query, key, value), weight.chunk(3), strict=True)
    ]
    return torch.cat(parts, 2)


@operator("aten::_transformer_encoder_layer_fwd").path("cuda")
def transformer_encoder_layer_fwd(layer: EncoderLayer) -> Tensor:
    """``transformer_encoder_layer_forward``: the layer's own operators, one after the other."""

    def feed_forward(x: Tensor) -> Tensor:
        hidden = first_product(layer, x.reshape(-1, x.size(-1)))
        rows = torch.addmm(layer.ffn_bias_2, hidden, layer.ffn_weight_2.t())
        return rows.view(layer.src.shape)

    return run_encoder_layer(layer, feed_forward)
