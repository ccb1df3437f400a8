"""Geometry of CUDA operators' outputs that ``meta`` does not know, or knows wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import RecurrentSettings
from pytest_torchmem.operators.recurrent.dispatch import GATES, LSTM, weight_elements
from pytest_torchmem.operators.registry import operator

_GRU_WORKSPACE = 5
"""``GRU_WORKSPACE_MULTIPLIER``, native/cuda/RNN.cu."""


@operator("aten::_cudnn_rnn").meta("cuda")
def cudnn_rnn(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    settings: RecurrentSettings,
) -> tuple[Tensor, ...]:
    """Output, hidden and cell state, what is kept for the backward, the weight buffer.

    native/cudnn/RNN.cpp, ``_cudnn_rnn``. With ``batch_first`` the output is a transposed tensor.
    """
    hidden, layers = settings.hidden_size, settings.num_layers * settings.directions
    out = settings.proj_size or hidden
    if settings.batch_sizes:
        batch, rows = settings.batch_sizes[0], input.size(0)
        output = input.new_empty((rows, out * settings.directions))
    else:
        steps, batch = (input.transpose(0, 1) if settings.batch_first else input).shape[:2]
        rows = steps * batch
        output = input.new_empty((steps, batch, out * settings.directions))
        if settings.batch_first:
            output.transpose_(0, 1)
    hy = hx.new_empty((layers, batch, out))
    cy = hx.new_empty((0,) if cx is None else (layers, batch, hidden))
    nbytes = reserve_bytes(rows, settings, input.element_size()) if settings.train else 0
    reserve = input.new_empty((nbytes,), dtype=torch.uint8)
    if weight_buf is None:
        elements = weight_elements(weight, weight_stride0, settings.mode, hidden)
        weight_buf = input.new_empty((elements,))
    return output, hy, cy, reserve, weight_buf


def reserve_bytes(rows: int, settings: RecurrentSettings, element_size: int) -> int:
    """Return what the backward needs of the forward: a lower bound of cuDNN's reserve, in bytes.

    Per row (a step of a sequence), layer and direction: every gate's activation, for an LSTM the
    cell state, for a GRU the hidden half of the candidate; the outputs of all layers but the last,
    and their dropout masks. ``cudnnGetRNNTempSpaceSizes`` itself cannot be asked without cuDNN.
    """
    hidden, gates = settings.hidden_size, GATES[settings.mode]
    layers, out = settings.num_layers, settings.proj_size or hidden
    elements = layers * (gates * hidden + (hidden if gates > 1 else 0))
    elements += (layers - 1) * out * (2 if settings.dropout else 1)
    return rows * settings.directions * elements * element_size


@operator("aten::_cudnn_rnn_backward").meta("cuda")
def cudnn_rnn_backward(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    hx: Tensor,
    cx: Tensor | None,
    settings: RecurrentSettings,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
    """Gradients of input and states, and those of the weights, which share one flat buffer.

    native/cudnn/RNN.cpp, ``_cudnn_rnn_backward_input`` and ``_cudnn_rnn_backward_weight``. Without
    biases the weights' gradients are copied out of the buffer.
    """
    if settings.transposes:
        grad_input = torch.empty_like(
            input.transpose(0, 1), memory_format=torch.contiguous_format
        ).transpose_(0, 1)
    else:
        grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    grad_hx = torch.empty_like(hx, memory_format=torch.contiguous_format)
    grad_cx = None
    if cx is not None and settings.mode == LSTM:
        grad_cx = torch.empty_like(cx, memory_format=torch.contiguous_format)
    grads: list[Tensor] = []
    if output_mask[3]:
        elements = weight_elements(weight, weight_stride0, settings.mode, settings.hidden_size)
        if elements == sum(one.numel() for one in weight):
            buffer, offset = input.new_empty((elements,)), 0
            for one in weight:
                grads.append(buffer[offset : offset + one.numel()].view(one.shape))
                offset += one.numel()
        else:
            grads = [torch.empty_like(one) for one in weight]
    return grad_input, grad_hx, grad_cx, grads


@operator("aten::_thnn_fused_gru_cell").meta("cuda")
def fused_gru_cell(hx: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/RNN.cu, ``_thnn_fused_gru_cell_cuda``."""
    workspace = hx.new_empty((hx.size(0), hx.size(1) * _GRU_WORKSPACE))
    return torch.empty_like(hx, memory_format=torch.contiguous_format), workspace


@operator("aten::_thnn_fused_gru_cell_backward").meta("cuda")
def fused_gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """native/cuda/RNN.cu, ``_thnn_fused_gru_cell_backward_cuda``."""
    gates = workspace.size(1) // _GRU_WORKSPACE * 3
    shape = (workspace.size(0), gates)
    bias = workspace.new_empty((gates,)) if has_bias else None
    other = workspace.new_empty((gates,)) if has_bias else None
    return (
        workspace.new_empty(shape),
        workspace.new_empty(shape),
        torch.empty_like(grad_hy, memory_format=torch.contiguous_format),
        bias,
        other,
    )


@operator("aten::log_sigmoid_forward").meta("cuda")
def log_sigmoid_forward(input: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer is the CPU's only; native/cuda/ActivationLogSigmoidKernel.cu."""
    return torch.empty_like(input), input.new_empty((0,))


@operator("aten::_ctc_loss").meta("cuda")
def ctc_loss(log_probs: Tensor, target_lengths: Any) -> tuple[Tensor, Tensor]:
    """The losses and their logarithms by step and label; native/cuda/LossCTC.cu, ctc_loss_gpu."""
    steps, batch, _ = log_probs.shape
    labels = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, labels))
