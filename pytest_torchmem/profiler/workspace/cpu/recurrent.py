"""LSTM layers through oneDNN; native/mkldnn/RNN.cpp over oneDNN's src/cpu/rnn.

Its sizes follow rnn_utils.hpp (``set_workspace_sizes``, ``get_good_ld``) and rnn_utils.cpp
(``set_offsets``). Exact for float32 on oneDNN 3.12; for bfloat16 the brgemm kernels take up to some
hundred bytes per thread more in the forward, and up to about 100 KiB in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.profiler.devices.host import Host
from pytest_torchmem.profiler.workspace import workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import contiguous_copy, dense_bytes

_PAGE = 4096
_BOOKS = 4664
"""A page to align the scratchpad, and oneDNN's arrays of pointers to weights and biases."""

_FLOAT = 4


def leading_dimension(size: int, element_size: int) -> int:
    """``get_good_ld``: rows of whole cache lines, and never a multiple of 256 elements."""
    line = 64 // element_size
    rows = -(-size // line) * line
    return rows + line if rows % 256 == 0 else rows


def in_pages(*sizes: int) -> int:
    """``set_offsets``: every buffer begins on a page."""
    offset = 0
    for size in sizes:
        offset = -(-offset // _PAGE) * _PAGE + size
    return offset


def _states(steps: int, batch: int, inputs: int, hidden: int, element_size: int) -> int:
    """Bytes of the states of all steps, of the layer and of the cell before it."""
    width = leading_dimension(max(inputs, hidden), element_size)
    return 2 * (steps + 1) * batch * width * element_size


def lstm_workspace(steps: int, batch: int, inputs: int, hidden: int, element_size: int) -> int:
    """Bytes of the workspace that a training forward hands to the backward: the fourth output."""
    gates = steps * batch * leading_dimension(4 * hidden, element_size) * element_size
    projected = steps * batch * leading_dimension(hidden, element_size) * element_size
    cells = 2 * (steps + 1) * batch * hidden
    gradients = _states(steps, batch, inputs, hidden, _FLOAT)
    return in_pages(
        gates,
        projected,
        _states(steps, batch, inputs, hidden, element_size),
        0,
        cells * element_size,
        gradients,
        gradients,
        cells * _FLOAT,
        0,
    )


def _scratchpad(steps: int, batch: int, hidden: int, element_size: int) -> int:
    """Gates before their activation: of all steps at once in float32, of one in bfloat16.

    Inference runs as training does: ATen asks for the same primitive.
    """
    merged = element_size == _FLOAT and batch < 128
    gates = batch * leading_dimension(4 * hidden, _FLOAT) * _FLOAT * (steps if merged else 1)
    projected = batch * leading_dimension(hidden, element_size) * element_size
    gradient = batch * leading_dimension(hidden, _FLOAT) * _FLOAT
    return in_pages(gates, projected, gradient, 0) + _BOOKS


def _forward_weight(rows: int, hidden: int, element_size: int) -> int:
    """A weight as the kernels want it: rows of all gates, or for bfloat16 blocks of 2 by 32."""
    if element_size == _FLOAT:
        return rows * leading_dimension(4 * hidden, _FLOAT) * _FLOAT
    return (rows + rows % 2) * 4 * (-(-hidden // 32) * 32) * element_size


def _backward_weight(rows: int, hidden: int, element_size: int) -> int:
    """A weight of the backward pass, which may take it as it is."""
    if element_size == _FLOAT:
        width = leading_dimension(rows, _FLOAT)
        return 0 if width == rows else 4 * hidden * width * _FLOAT
    return (-(-rows // 32) * 32) * 4 * hidden * element_size


@workspace("aten::mkldnn_rnn_layer", device="cpu")
def lstm_layer(
    machine: Host,
    outputs: Sequence[Tensor],
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    hx: Tensor,
    cx: Tensor,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> int:
    """The sum of both biases, both weights reordered, and the scratchpad."""
    steps, batch, inputs = input.shape
    size = input.element_size()
    copies = sum(contiguous_copy(tensor) for tensor in (input, hx, cx))
    weights = _forward_weight(inputs, hidden_size, size)
    weights += _forward_weight(hidden_size, hidden_size, size)
    bias = 4 * hidden_size * size
    return copies + bias + weights + _scratchpad(steps, batch, hidden_size, size)


@workspace("aten::mkldnn_rnn_layer_backward", device="cpu")
def lstm_layer_backward(
    machine: Host,
    outputs: Sequence[Tensor],
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    hx: Tensor,
    cx: Tensor,
    output: Tensor,
    hy: Tensor,
    cy: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    *settings: object,
) -> int:
    """Gradients made dense, weights in the backward's order, their gradients in rows of gates.

    The second bias gradient is a copy of the first, made when everything else is freed.
    """
    steps, batch, inputs = input.shape
    hidden = hx.shape[-1]
    size = input.element_size()
    pairs = ((grad_output, output), (grad_hy, hy), (grad_cy, cy))
    copies = sum(
        dense_bytes(like) if gradient is None else contiguous_copy(gradient)
        for gradient, like in pairs
    )
    copies += sum(contiguous_copy(tensor) for tensor in (input, hx, cx))
    if size != _FLOAT:
        copies += sum(like.numel() * _FLOAT for _, like in pairs)
    weights = _backward_weight(inputs, hidden, size) + _backward_weight(hidden, hidden, size)
    rows = leading_dimension(4 * hidden, _FLOAT) * _FLOAT
    gradients = (inputs + hidden) * rows
    bias = 4 * hidden * size
    scratchpad = _scratchpad(steps, batch, hidden, size)
    return copies + bias + weights + gradients + scratchpad
