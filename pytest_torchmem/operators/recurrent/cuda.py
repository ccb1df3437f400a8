"""Recurrent layers: copies, and cuDNN's workspace, which it alone knows the size of.

native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward_input``, ``_cudnn_rnn_backward_weight``)
asks ``cudnnGetRNNTempSpaceSizes`` for the workspace and for the reserve that the backward needs; of
the reserve, an output, a trace books a lower bound (``profiler/dispatch/shapes.py``). The cells'
fused kernels, native/cuda/RNN.cu, are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pytest_torchmem.operators.geometry import (
    Outputs,
    contiguous_copy,
    dense_bytes,
    packed_copies,
)
from pytest_torchmem.operators.reduction.cuda import sum_buffers
from pytest_torchmem.operators.signatures import RecurrentSettings
from pytest_torchmem.operators.workspace import Workspace, unknown, workspace
from pytest_torchmem.targets.gpus import Gpu


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
    *settings: Any,
) -> Workspace:
    """A dense copy of the input, and cuDNN's workspace; states are dense already."""
    return unknown(_by_step(input, RecurrentSettings(*settings)))


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
    *arguments: Any,
) -> Workspace:
    """Dense copies, states' gradients where none came, and cuDNN's; then the weights' gradients.

    The buffer of these is made when the copies for the input's gradient are gone.
    """
    *settings, _reserve, output_mask = arguments
    recurrent = RecurrentSettings(*settings)
    source = _by_step(input, recurrent)
    gradient = dense_bytes(output) if grad_output is None else _by_step(grad_output, recurrent)
    states = dense_bytes(hx) if grad_hy is None else contiguous_copy(grad_hy)
    if cx is not None:
        states += dense_bytes(cx) if grad_cy is None else contiguous_copy(grad_cy)
    later = sum(map(dense_bytes, weight)) if output_mask[3] else 0
    return unknown(max(source + gradient + states - later, source))


def _by_step(tensor: Tensor, settings: RecurrentSettings) -> int:
    """Bytes of the copy that lies step by step; a packed sequence always does."""
    return contiguous_copy(tensor.transpose(0, 1) if settings.transposes else tensor)


@workspace(
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell_backward_impl",
    device="cuda",
)
def fused_cell(gpu: Gpu, outputs: Outputs, *arguments: object) -> int:
    """Nothing: the gates are an output, kept for the backward."""
    return 0


@workspace("aten::_thnn_fused_gru_cell_backward", device="cuda")
def gru_cell_backward(
    gpu: Gpu, outputs: Outputs, grad: Tensor, kept: Tensor, has_bias: bool
) -> tuple[int, ...]:
    """The sums that are the gradients of the biases, one after the other."""
    gates = outputs[0]
    if not has_bias or gates is None:
        return ()
    return sum_buffers(gpu, gates.shape, 0, gates.dtype)


@workspace("aten::_pack_padded_sequence", device="cuda")
def pack_padded_sequence(
    gpu: Gpu,
    outputs: tuple[Tensor, Tensor],
    input: Tensor,
    lengths: Tensor,
    batch_first: bool,
) -> tuple[int, ...]:
    """Dense copies of the parts; the lengths are the host's. Exact, native/PackedSequence.cpp."""
    return packed_copies(input, outputs[1].tolist(), batch_first)
