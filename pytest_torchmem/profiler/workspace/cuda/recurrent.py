"""Recurrent layers: copies, and cuDNN's workspace, which it alone knows the size of.

native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward_input``, ``_cudnn_rnn_backward_weight``)
asks ``cudnnGetRNNTempSpaceSizes`` for the workspace and for the reserve that the backward needs; of
the reserve, an output, a trace books a lower bound (``profiler/dispatch/shapes.py``). The cells'
fused kernels, native/cuda/RNN.cu, are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.profiler.devices.catalogue import Gpu
from pytest_torchmem.profiler.workspace import Workspace, unknown, workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import (
    Outputs,
    contiguous_copy,
    dense_bytes,
)


@workspace("aten::_cudnn_rnn", device="cuda")
def cudnn_rnn(
    gpu: Gpu,
    outputs: Outputs,
    input: Tensor,
    weight: Sequence[Tensor],
    stride: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> Workspace:
    """Dense copies of input and states, and cuDNN's workspace."""
    return unknown(_by_step(input, batch_first, batch_sizes), *_states(hx, cx))


@workspace("aten::_cudnn_rnn_backward", device="cuda")
def cudnn_rnn_backward(
    gpu: Gpu,
    outputs: Outputs,
    input: Tensor,
    weight: Sequence[Tensor],
    stride: int,
    buffer: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    *rest: object,
) -> Workspace:
    """Dense copies of input, output and gradients, states' gradients where none came; cuDNN's."""
    copies = [_by_step(found, batch_first, batch_sizes) for found in (input, output)]
    if grad_output is None:
        copies.append(dense_bytes(output))
    else:
        copies.append(_by_step(grad_output, batch_first, batch_sizes))
    states = [dense_bytes(hx) if grad_hy is None else contiguous_copy(grad_hy)]
    if cx is not None:
        states.append(dense_bytes(cx) if grad_cy is None else contiguous_copy(grad_cy))
    return unknown(*copies, *_states(hx, cx), *states)


def _by_step(tensor: Tensor, batch_first: bool, batch_sizes: Sequence[int]) -> int:
    """Bytes of the copy that lies step by step; a packed sequence always does."""
    if batch_first and not batch_sizes:
        tensor = tensor.transpose(0, 1)
    return contiguous_copy(tensor)


def _states(*states: Tensor | None) -> tuple[int, ...]:
    return tuple(map(contiguous_copy, states))


@workspace(
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell_backward_impl",
    "aten::_thnn_fused_gru_cell_backward",
    device="cuda",
)
def fused_cell(gpu: Gpu, outputs: Outputs, *arguments: object) -> int:
    """Nothing: the gates are an output, kept for the backward."""
    return 0
