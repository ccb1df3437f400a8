"""Recurrent layers: copies, and cuDNN's workspace, which it alone knows the size of.

native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward_input``, ``_cudnn_rnn_backward_weight``)
asks ``cudnnGetRNNTempSpaceSizes`` for the workspace and for the reserve that the backward needs; of
the reserve, an output, a trace books a lower bound (``profiler/dispatch/shapes.py``). The cells'
fused kernels, native/cuda/RNN.cu, are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.operators.arguments import RecurrentSettings
from pytest_torchmem.operators.geometry import (
    Outputs,
    contiguous_copy,
    dense_bytes,
    packed_copies,
)
from pytest_torchmem.operators.reduction.cuda_buffers import sum_buffers
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, unknown
from pytest_torchmem.targets.gpus import Gpu


@operator("aten::_cudnn_rnn").workspace("cuda")
def cudnn_rnn(input: Tensor, settings: RecurrentSettings) -> Workspace:
    """A dense copy of the input, and cuDNN's workspace; states are dense already."""
    return unknown(_by_step(input, settings))


@operator("aten::_cudnn_rnn_backward").workspace("cuda")
def cudnn_rnn_backward(
    input: Tensor,
    weight: Sequence[Tensor],
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    settings: RecurrentSettings,
    output_mask: Sequence[bool],
) -> Workspace:
    """Dense copies, states' gradients where none came, and cuDNN's; then the weights' gradients.

    The buffer of these is made when the copies for the input's gradient are gone.
    """
    source = _by_step(input, settings)
    gradient = dense_bytes(output) if grad_output is None else _by_step(grad_output, settings)
    states = dense_bytes(hx) if grad_hy is None else contiguous_copy(grad_hy)
    if cx is not None:
        states += dense_bytes(cx) if grad_cy is None else contiguous_copy(grad_cy)
    later = sum(map(dense_bytes, weight)) if output_mask[3] else 0
    return unknown(max(source + gradient + states - later, source))


def _by_step(tensor: Tensor, settings: RecurrentSettings) -> int:
    """Bytes of the copy that lies step by step; a packed sequence always does."""
    return contiguous_copy(tensor.transpose(0, 1) if settings.transposes else tensor)


@operator(
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell_backward_impl",
).workspace("cuda")
def fused_cell() -> int:
    """Nothing: the gates are an output, kept for the backward."""
    return 0


@operator("aten::_thnn_fused_gru_cell_backward").workspace("cuda")
def gru_cell_backward(machine: Gpu, outputs: Outputs, has_bias: bool) -> tuple[int, ...]:
    """The sums that are the gradients of the biases, one after the other."""
    gates = outputs[0]
    if not has_bias or gates is None:
        return ()
    return sum_buffers(machine, gates.shape, 0, gates.dtype)


@operator("aten::_pack_padded_sequence").workspace("cuda")
def pack_padded_sequence(
    outputs: tuple[Tensor, Tensor], input: Tensor, batch_first: bool
) -> tuple[int, ...]:
    """Dense copies of the parts; the lengths are the host's. Exact, native/PackedSequence.cpp."""
    return packed_copies(input, outputs[1].tolist(), batch_first)
