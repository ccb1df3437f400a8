"""LSTM layers through oneDNN; native/mkldnn/RNN.cpp over oneDNN's src/cpu/rnn.

Its sizes follow rnn_utils.hpp (``set_workspace_sizes``, ``get_good_ld``), rnn_utils.cpp
(``set_offsets``) and, for the brgemm kernels of bfloat16, src/cpu/x64/rnn/rnn_brgemm_utils.cpp.
"""

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    ceil_div,
    contiguous_copy,
    dense_bytes,
    like,
    round_up,
)
from pytest_torchmem.operators.libraries.onednn.problem import booked, by_onednn
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.targets.host import Host

_layer = operator("aten::mkldnn_rnn_layer", asks_grad_mode=True)
_layer_backward = operator("aten::mkldnn_rnn_layer_backward")

_PAGE = 4096
_BOOKS = 4632
"""A page to align the scratchpad, and oneDNN's arrays of pointers to weights."""

_FLOAT = 4


def leading_dimension(size: int, element_size: int) -> int:
    """``get_good_ld``: rows of whole cache lines, and never a multiple of 256 elements."""
    line = 64 // element_size
    rows = round_up(size, line)
    return rows + line if rows % 256 == 0 else rows


def in_pages(*sizes: int) -> int:
    """``set_offsets``: every buffer begins on a page."""
    offset = 0
    for size in sizes:
        offset = round_up(offset, _PAGE) + size
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


def _merges(steps: int, batch: int, brgemm: bool) -> bool:
    """Whether a forward multiplies the inputs of all steps at once: lone sequences, and small
    batches where another kernel than brgemm does it.
    """
    return batch == 1 and steps > 1 if brgemm else batch < 128


def _scratchpad(steps: int, batch: int, hidden: int, element_size: int, backward: bool) -> int:
    """Gates before their activation, of all steps where they are merged, as those of a backward in
    float32 always are.
    """
    gate = element_size if backward else _FLOAT
    brgemm = element_size != _FLOAT
    merged = gate == _FLOAT if backward else _merges(steps, batch, brgemm)
    gates = batch * leading_dimension(4 * hidden, gate) * gate * (steps if merged else 1)
    projected = batch * leading_dimension(hidden, element_size) * element_size
    gradient = batch * leading_dimension(hidden, _FLOAT) * _FLOAT
    return in_pages(gates, projected, gradient, 0) + _BOOKS + 8 * element_size


def _inference_scratchpad(
    steps: int, batch: int, inputs: int, hidden: int, element_size: int
) -> int:
    """The same where no backward follows: the states that training keeps in its workspace, the
    gates, and no gradients.
    """
    merged = _merges(steps, batch, brgemm=True)
    gates = batch * leading_dimension(4 * hidden, _FLOAT) * _FLOAT * (steps if merged else 1)
    return (
        in_pages(
            _states(steps, batch, inputs, hidden, element_size),
            2 * (steps + 1) * batch * hidden * element_size,
            gates,
            batch * leading_dimension(hidden, element_size) * element_size,
            0,
        )
        + _BOOKS
        + 8 * element_size
    )


_ELEMENT = 40
"""Bytes that describe one product of a batch, ``brgemm_batch_element_t``."""

_COLUMNS = 32
"""Gates of one block of a weight."""


def _brgemm_forward(threads: int, inputs: int, hidden: int, merged: bool) -> int:
    """Lists of products; twice as many where both weights are multiplied at once."""
    products = 2 * (2 if inputs == hidden and not merged else 1)
    return booked(products * threads * _ELEMENT)


def _brgemm_backward(threads: int, batch: int, inputs: int, hidden: int, size: int) -> int:
    """Lists of the products of four gates, and for the gradient of the weights the gates in blocks
    and the states of both kinds turned.
    """
    depth = round_up(batch, 2)
    if batch > 1:
        turned = (inputs, hidden)
    else:
        rows = hidden if inputs == hidden else max(inputs, hidden)
        if inputs == hidden:
            rows = _rows(threads, hidden, ceil_div(4 * hidden, _COLUMNS))
        turned = (threads * min(rows, inputs), threads * min(rows, hidden))
    return booked(
        5 * threads * _ELEMENT,
        threads * depth * _COLUMNS * size,
        *(states * depth * size for states in turned),
    )


def _rows(threads: int, rows: int, blocks: int) -> int:
    """Rows of a block of a gradient of a weight, ``brgemm_calc_m_block_vanilla_rnn``."""
    if blocks < threads:
        most = min(24, max(1, rows // (4 * ceil_div(threads, blocks))))
        return next((size for size in range(most, 3, -1) if rows % size == 0), rows)
    rest = blocks % threads / threads
    if not 0 < rest < 0.9:
        return rows
    best, fullest = rows // 2, 0.0
    for size in range(rows // 2, 7, -1):
        if rows % size:
            continue
        busy = rows // size * blocks % threads / threads
        if busy > fullest + 0.01:
            best, fullest = size, busy
        if busy >= 0.9 or busy == 0:
            return size
    return best if rest < fullest else rows


def _forward_weight(rows: int, hidden: int, element_size: int, brgemm: bool) -> int:
    """A weight as the kernels want it: rows of all gates, or for brgemm blocks of 32 columns, and
    in bfloat16 of two rows. A lone row is as they want it.
    """
    if not brgemm:
        return 0 if rows == 1 else rows * leading_dimension(4 * hidden, _FLOAT) * _FLOAT
    return round_up(rows, _FLOAT // element_size) * 4 * round_up(hidden, 32) * element_size


def _gradient_of_weight(rows: int, hidden: int) -> int:
    """Rows of gates in float; of a lone row, nothing beyond it (``memory_desc_wrapper::size``)."""
    width = 4 * hidden if rows == 1 else leading_dimension(4 * hidden, _FLOAT)
    return rows * width * _FLOAT


def _backward_weight(rows: int, hidden: int, element_size: int) -> int:
    """A weight of the backward pass, which may take it as it is."""
    if element_size == _FLOAT:
        width = leading_dimension(rows, _FLOAT)
        return 0 if width == rows else 4 * hidden * width * _FLOAT
    return round_up(rows, 32) * 4 * round_up(hidden, 2) * element_size


@_layer.meta("cpu")
def outputs_and_workspace(
    input: Tensor, hx_: Tensor, cx_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The last output is what oneDNN keeps for a backward, where gradients are enabled;
    ``mkldnn_rnn_layer``, which asks ``at::GradMode::is_enabled()``.
    """
    steps, batch, inputs = input.shape
    hidden_size = hx_.shape[-1]
    kept = None
    if torch.is_grad_enabled():
        nbytes = lstm_workspace(steps, batch, inputs, hidden_size, input.element_size())
        kept = input.new_empty((nbytes,), dtype=torch.uint8)
    return input.new_empty((steps, batch, hidden_size)), like(hx_), like(cx_), kept


@_layer.workspace("cpu")
def workspace(
    machine: Host, input: Tensor, hx_: Tensor, cx_: Tensor, outputs: tuple[Tensor | None, ...]
) -> int | Workspace:
    """The sum of both biases, both weights reordered, and the scratchpad.

    brgemm is for bfloat16, and for float32 where no backward follows.
    """
    steps, batch, inputs = input.shape
    hidden = hx_.shape[-1]
    size = input.element_size()
    trains = outputs[3] is not None
    brgemm = size != _FLOAT or not trains
    copies = sum(contiguous_copy(tensor) for tensor in (input, hx_, cx_))
    weights = sum(_forward_weight(rows, hidden, size, brgemm) for rows in (inputs, hidden))
    bias = 4 * hidden * size
    if trains:
        scratchpad = _scratchpad(steps, batch, hidden, size, backward=False)
    else:
        scratchpad = _inference_scratchpad(steps, batch, inputs, hidden, size)
    if brgemm:
        merged = _merges(steps, batch, brgemm)
        scratchpad += _brgemm_forward(machine.threads, inputs, hidden, merged)
    return by_onednn(machine, input.dtype, copies + bias + weights + scratchpad)


@_layer_backward.meta("cpu")
def gradients(
    input: Tensor, weight1: Tensor, weight2: Tensor, hx_: Tensor, cx_tmp: Tensor
) -> tuple[Tensor, ...]:
    """Gradients in float, of each bias by itself."""
    bias = weight1[:, 0]  # without biases, weights stand in their place
    differentiated = (input, weight1, weight2, bias, bias, hx_, cx_tmp)
    return tuple(like(tensor).float() for tensor in differentiated)


@_layer_backward.workspace("cpu")
def backward_workspace(
    machine: Host,
    input: Tensor,
    hx_: Tensor,
    cx_tmp: Tensor,
    output: Tensor,
    hy_: Tensor,
    cy_: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
) -> int | Workspace:
    """Gradients made dense, weights in the backward's order, their gradients in rows of gates.

    The second bias gradient is a copy of the first, made when everything else is freed.
    """
    steps, batch, inputs = input.shape
    hidden = hx_.shape[-1]
    size = input.element_size()
    pairs = ((grad_output, output), (grad_hy, hy_), (grad_cy, cy_))
    copies = sum(
        dense_bytes(result) if gradient is None else contiguous_copy(gradient)
        for gradient, result in pairs
    )
    copies += sum(contiguous_copy(tensor) for tensor in (input, hx_, cx_tmp))
    if size != _FLOAT:
        copies += sum(result.numel() * _FLOAT for _, result in pairs)
    weights = _backward_weight(inputs, hidden, size) + _backward_weight(hidden, hidden, size)
    gradients = _gradient_of_weight(inputs, hidden) + _gradient_of_weight(hidden, hidden)
    bias = 4 * hidden * size
    scratchpad = _scratchpad(steps, batch, hidden, size, backward=True)
    if size != _FLOAT:
        scratchpad += _brgemm_backward(machine.threads, batch, inputs, hidden, size)
    taken = copies + bias + weights + gradients + scratchpad
    return by_onednn(machine, input.dtype, taken)
