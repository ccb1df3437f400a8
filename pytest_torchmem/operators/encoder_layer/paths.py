"""An encoder layer in inference: what stands behind its one operator, on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import EncoderLayer

_aten: Any = torch.ops.aten


def run_encoder_layer(layer: EncoderLayer, feed_forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention and ``feed_forward``, each with its sum and its norm.

    native/transformers/transformer.cpp, ``transformer_encoder_layer_forward``.
    """
    first = (layer.norm_weight_1, layer.norm_bias_1)
    second = (layer.norm_weight_2, layer.norm_bias_2)

    def norm(x: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
        shape = (layer.embed_dim,)
        normed: Tensor = _aten.native_layer_norm.default(x, shape, *parameters, layer.eps)[0]
        return normed

    x = norm(layer.src, first) if layer.norm_first else layer.src
    x = _aten._native_multi_head_attention.default(
        x, x, x, layer.embed_dim, layer.num_heads, layer.qkv_weight, layer.qkv_bias,
        layer.proj_weight, layer.proj_bias, layer.mask, False, True, layer.mask_type,
    )[0]  # fmt: skip
    x.add_(layer.src)
    if not layer.norm_first:
        x = norm(x, first)
    attended = x
    if layer.norm_first:
        x = norm(x, second)
    x = feed_forward(x)
    x.add_(attended)
    return x if layer.norm_first else norm(x, second)


def first_product(layer: EncoderLayer, rows: Tensor) -> Tensor:
    """Return the hidden values of the feed-forward part, for rows of the layer's width."""
    hidden: Tensor = _aten._addmm_activation.default(
        layer.ffn_bias_1, rows, layer.ffn_weight_1.t(), use_gelu=layer.use_gelu
    )
    return hidden
