"""Arguments that stand together in the schemas of several operators.

A function that is registered for such an operator takes them as one parameter, whose annotation is
one of these classes (``binding.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """Those of ``aten::scaled_dot_product_attention`` that its kernel depends on; ``sdp_params`` in
    native/transformers/sdp_utils_cpp.h.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def is_jagged(self) -> bool:
        """Whether the inputs are jagged, of which neither what is asked of dense tensors nor what
        is asked of strided nested ones is checked here but in torch/nested/_internal/sdpa.py;
        ``has_only_dense_inputs``, ``has_for_nested_inputs``.
        """
        return self.query.is_nested or self.key.is_nested or self.value.is_nested

    @property
    def trains(self) -> bool:
        """Whether a backward will follow; ``input_requires_grad``."""
        inputs = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


class AttentionLayer(NamedTuple):
    """Those of ``aten::_native_multi_head_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim: int
    num_head: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    mask: Tensor | None = None
    need_weights: bool = True
    average_attn_weights: bool = True
    mask_type: int | None = None


class EncoderLayer(NamedTuple):
    """Those of ``aten::_transformer_encoder_layer_fwd``."""

    src: Tensor
    embed_dim: int
    num_heads: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    use_gelu: bool
    norm_first: bool
    eps: float
    norm_weight_1: Tensor
    norm_bias_1: Tensor
    norm_weight_2: Tensor
    norm_bias_2: Tensor
    ffn_weight_1: Tensor
    ffn_bias_1: Tensor
    ffn_weight_2: Tensor
    ffn_bias_2: Tensor
    mask: Tensor | None = None
    mask_type: int | None = None


class ConvolutionSettings(NamedTuple):
    """Those of ``aten::convolution`` and its backward that are no tensors; ``ConvParams``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool = False
    output_padding: Sequence[int] = (0,)
    groups: int = 1


class RecurrentSettings(NamedTuple):
    """Those of ``aten::_cudnn_rnn`` and its backward behind the tensors of the forward."""

    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: Sequence[int]
    dropout_state: Tensor | None

    @property
    def directions(self) -> int:
        """How many directions a sequence is read in."""
        return 2 if self.bidirectional else 1

    @property
    def transposes(self) -> bool:
        """Whether tensors have the batch before the steps; those of packed sequences never have."""
        return self.batch_first and not self.batch_sizes


class LayerSettings(NamedTuple):
    """Those of ``aten::lstm.input`` and its kin behind the states."""

    params: list[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool


GROUPS = {
    group.__name__: group
    for group in (
        Attention,
        AttentionLayer,
        ConvolutionSettings,
        EncoderLayer,
        LayerSettings,
        RecurrentSettings,
    )
}
"""By name: what a function may take as one parameter."""
