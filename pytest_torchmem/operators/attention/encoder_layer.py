"""An encoder layer in inference: what stands behind its one operator, on every device.

native/transformers/transformer.cpp, ``transformer_encoder_layer_forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import EncoderLayer
from pytest_torchmem.operators.attention.multi_head import by_kernel
from pytest_torchmem.operators.nested.context import NestedTensors
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.tensors.tensors import nested_sizes

_aten: Any = torch.ops.aten
_layer = operator("aten::_transformer_encoder_layer_fwd")
_layer.decomposition("cpu")(by_kernel)


@_layer.path("cuda")
def one_after_the_other(layer: EncoderLayer) -> Tensor:
    """``transformer_encoder_layer_forward``: the layer's own operators, one after the other."""

    def feed_forward(x: Tensor) -> Tensor:
        hidden = _first_product(layer, x.reshape(-1, x.size(-1)))
        rows = torch.addmm(layer.ffn_bias_2, hidden, layer.ffn_weight_2.t())
        return rows.view(layer.src.shape)

    return _run(layer, feed_forward)


@_layer.nested()
def of_nested(nested: NestedTensors, layer: EncoderLayer) -> Tensor:
    """native/transformers/transformer.cpp, ``ffn``: on the buffer, with sizes of their own."""

    def feed_forward(x: Tensor) -> Tensor:
        sizes = nested_sizes(x)
        hidden = _first_product(layer, x.values().view(-1, layer.embed_dim))
        width = layer.ffn_weight_1.size(0)
        x = nested.wrap(hidden.view(-1), nested.with_last_size(sizes, width))
        del hidden
        rows = x.values().view(-1, width)
        output = torch.addmm(layer.ffn_bias_2, rows, layer.ffn_weight_2.t())
        return nested.wrap(
            output.view(-1), nested.with_last_size(sizes, layer.ffn_weight_2.size(0))
        )

    return _run(layer, feed_forward)


def _run(layer: EncoderLayer, feed_forward: Callable[[Tensor], Tensor]) -> Tensor:
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


def _first_product(layer: EncoderLayer, rows: Tensor) -> Tensor:
    """Return the hidden values of the feed-forward part, for rows of the layer's width."""
    hidden: Tensor = _aten._addmm_activation.default(
        layer.ffn_bias_1, rows, layer.ffn_weight_1.t(), use_gelu=layer.use_gelu
    )
    return hidden
