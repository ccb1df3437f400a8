"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.recurrent.cpu import lstm_workspace
from pytest_torchmem.operators.registry import operator


@operator("aten::_cudnn_rnn_flatten_weight").meta()
def cudnn_rnn_flatten_weight(weight_arr: Sequence[Tensor]) -> Tensor:
    """native/cudnn/RNN.cpp: all parameters in one buffer."""
    return like(weight_arr[0], (sum(weight.numel() for weight in weight_arr),))


@operator("aten::_cudnn_init_dropout_state").meta()
def cudnn_dropout_state() -> Tensor:
    """native/cudnn/RNN.cpp: 8 bytes for every thread that a GPU runs at once."""
    return torch.empty((0,), dtype=torch.uint8, device="meta")


@operator("aten::mkldnn_rnn_layer").meta()
def lstm_layer(input: Tensor, hx_: Tensor, cx_: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last output is what oneDNN keeps for a backward, always; native/mkldnn/RNN.cpp."""
    steps, batch, inputs = input.shape
    hidden_size = hx_.shape[-1]
    nbytes = lstm_workspace(steps, batch, inputs, hidden_size, input.element_size())
    return (
        input.new_empty((steps, batch, hidden_size)),
        torch.empty_like(hx_, memory_format=torch.contiguous_format),
        torch.empty_like(cx_, memory_format=torch.contiguous_format),
        input.new_empty((nbytes,), dtype=torch.uint8),
    )


@operator("aten::mkldnn_rnn_layer_backward").meta()
def lstm_layer_backward(
    input: Tensor, weight1: Tensor, weight2: Tensor, hx_: Tensor, cx_tmp: Tensor
) -> tuple[Tensor, ...]:
    """Gradients in float, of each bias by itself; native/mkldnn/RNN.cpp."""
    bias = weight1[:, 0]  # without biases, weights stand in their place
    like = (input, weight1, weight2, bias, bias, hx_, cx_tmp)
    return tuple(tensor.new_empty(tuple(tensor.shape), dtype=torch.float32) for tensor in like)
