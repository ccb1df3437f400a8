"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.meta_functions import like, meta
from pytest_torchmem.operators.recurrent.cpu import lstm_workspace


@meta("aten::_cudnn_rnn_flatten_weight")
def cudnn_rnn_flatten_weight(weights: Sequence[Tensor], *rest: Any) -> Tensor:
    """native/cudnn/RNN.cpp: all parameters in one buffer."""
    return like(weights[0], (sum(weight.numel() for weight in weights),))


@meta("aten::_cudnn_init_dropout_state")
def cudnn_dropout_state(dropout: float, train: bool, dropout_seed: int, **options: Any) -> Tensor:
    """native/cudnn/RNN.cpp: 8 bytes for every thread that a GPU runs at once."""
    return torch.empty((0,), dtype=torch.uint8, device="meta")


@meta("aten::mkldnn_rnn_layer")
def lstm_layer(
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    hx: Tensor,
    cx: Tensor,
    *settings: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last output is what oneDNN keeps for a backward, always; native/mkldnn/RNN.cpp."""
    steps, batch, inputs = input.shape
    hidden_size = hx.shape[-1]
    nbytes = lstm_workspace(steps, batch, inputs, hidden_size, input.element_size())
    return (
        input.new_empty((steps, batch, hidden_size)),
        torch.empty_like(hx, memory_format=torch.contiguous_format),
        torch.empty_like(cx, memory_format=torch.contiguous_format),
        input.new_empty((nbytes,), dtype=torch.uint8),
    )


@meta("aten::mkldnn_rnn_layer_backward")
def lstm_layer_backward(
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    hx: Tensor,
    cx: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients in float, of each bias by itself; native/mkldnn/RNN.cpp."""
    bias = weight_input[:, 0]  # without biases, weights stand in their place
    like = (input, weight_input, weight_hidden, bias, bias, hx, cx)
    return tuple(tensor.new_empty(tuple(tensor.shape), dtype=torch.float32) for tensor in like)
