"""LSTM layers through oneDNN; native/mkldnn/RNN.cpp over oneDNN's src/cpu/rnn.

Its sizes follow rnn_utils.hpp (``set_workspace_sizes``, ``get_good_ld``), rnn_utils.cpp
(``set_offsets``) and, for the brgemm kernels of bfloat16, src/cpu/x64/rnn/rnn_brgemm_utils.cpp.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    FLOAT,
    Workspace,
    booked,
    by_onednn,
    ceil_div,
    contiguous_copy,
    dense_bytes,
    like,
    round_up,
)
from pytest_torchmem.targets.host import Host

_layer = operator("aten::mkldnn_rnn_layer", also_by=lambda tensors: torch.is_grad_enabled())
_layer_backward = operator("aten::mkldnn_rnn_layer_backward")

_PAGE = 4096
_BOOKS = 4632
"""A page to align the scratchpad, and oneDNN's arrays of pointers to weights."""


def _rows(count: int, width: int, element_size: int) -> int:
    """``get_good_ld``: bytes of rows of whole cache lines, and never a multiple of 256 elements."""
    line = 64 // element_size
    leading = round_up(width, line)
    return count * (leading + line if leading % 256 == 0 else leading) * element_size


def _in_pages(*sizes: int) -> int:
    """``set_offsets``: every buffer begins on a page."""
    offset = 0
    for size in sizes:
        offset = round_up(offset, _PAGE) + size
    return offset


class _Lstm(NamedTuple):
    """Sizes of a layer, that of an element in bytes."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    size: int
    trains: bool = True

    @property
    def brgemm(self) -> bool:
        """Whether brgemm multiplies: bfloat16, and float32 where no backward follows."""
        return self.size != FLOAT or not self.trains

    @property
    def merges(self) -> bool:
        """Whether a forward multiplies the inputs of all steps at once: lone sequences, and small
        batches where another kernel than brgemm does it.
        """
        return self.batch == 1 and self.steps > 1 if self.brgemm else self.batch < 128

    @property
    def cells(self) -> int:
        """Elements of the states of the cells of all steps, and before the first one."""
        return 2 * (self.steps + 1) * self.batch * self.hidden

    def states(self, size: int) -> int:
        """Bytes of the states of all steps, of the layer and of the cell before it."""
        return 2 * _rows((self.steps + 1) * self.batch, max(self.inputs, self.hidden), size)

    def workspace(self) -> int:
        """Bytes of what a training forward hands to the backward: the fourth output."""
        steps, size = self.steps * self.batch, self.size
        gates, projected = _rows(steps, 4 * self.hidden, size), _rows(steps, self.hidden, size)
        states, gradients = self.states(size), self.states(FLOAT)
        cells = self.cells * size, gradients, gradients, self.cells * FLOAT
        return _in_pages(gates, projected, states, 0, *cells, 0)

    def scratchpad(self, backward: bool = False) -> int:
        """Gates before their activation, of all steps where they are merged, as those of a backward
        in float32 always are; without training, states in place of gradients.
        """
        gate = self.size if backward else FLOAT
        merged = gate == FLOAT if backward else self.merges
        gates = _rows(self.batch * (self.steps if merged else 1), 4 * self.hidden, gate)
        parts = [gates, _rows(self.batch, self.hidden, self.size)]
        if self.trains:
            parts += [_rows(self.batch, self.hidden, FLOAT)]
        else:
            parts = [self.states(self.size), self.cells * self.size, *parts]
        return _in_pages(*parts, 0) + _BOOKS + 8 * self.size


def _lstm(input: Tensor, hx_: Tensor, trains: bool = True) -> _Lstm:
    steps, batch, inputs = input.shape
    return _Lstm(steps, batch, inputs, hx_.shape[-1], input.element_size(), trains)


_ELEMENT = 40
"""Bytes that describe one product of a batch, ``brgemm_batch_element_t``."""

_COLUMNS = 32
"""Gates of one block of a weight."""


def _brgemm_backward(threads: int, lstm: _Lstm) -> int:
    """Lists of products of four gates; for the weights' gradient gates in blocks, states turned."""
    _, batch, inputs, hidden, size, _ = lstm
    depth = round_up(batch, 2) * size
    turned = inputs, hidden
    if batch == 1:
        rows = max(inputs, hidden)
        if inputs == hidden:
            rows = _rows_of_block(threads, hidden, ceil_div(4 * hidden, _COLUMNS))
        turned = threads * min(rows, inputs), threads * min(rows, hidden)
    lists, blocks = 5 * threads * _ELEMENT, threads * depth * _COLUMNS
    return booked(lists, blocks, *(states * depth for states in turned))


def _rows_of_block(threads: int, rows: int, blocks: int) -> int:
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
        return 0 if rows == 1 else _rows(rows, 4 * hidden, FLOAT)
    return round_up(rows, FLOAT // element_size) * 4 * round_up(hidden, 32) * element_size


def _gradient_of_weight(rows: int, hidden: int) -> int:
    """Rows of gates in float; of a lone row, nothing beyond it (``memory_desc_wrapper::size``)."""
    return 4 * hidden * FLOAT if rows == 1 else _rows(rows, 4 * hidden, FLOAT)


def _backward_weight(rows: int, hidden: int, element_size: int) -> int:
    """A weight of the backward pass, which may take it as it is."""
    if element_size == FLOAT:
        turned = _rows(4 * hidden, rows, FLOAT)
        return 0 if turned == 4 * hidden * rows * FLOAT else turned
    return round_up(rows, 32) * 4 * round_up(hidden, 2) * element_size


@_layer.meta("cpu")
def outputs_and_workspace(
    input: Tensor, hx_: Tensor, cx_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The last output is what oneDNN keeps for a backward, where gradients are enabled;
    ``mkldnn_rnn_layer``, which asks ``at::GradMode::is_enabled()``.
    """
    kept = None
    if torch.is_grad_enabled():
        nbytes = _lstm(input, hx_).workspace()
        kept = input.new_empty((nbytes,), dtype=torch.uint8)
    return input.new_empty((*input.shape[:2], hx_.shape[-1])), like(hx_), like(cx_), kept


@_layer.workspace("cpu")
def workspace(
    machine: Host, input: Tensor, hx_: Tensor, cx_: Tensor, outputs: tuple[Tensor | None, ...]
) -> int | Workspace:
    """The sum of both biases, both weights reordered, and the scratchpad."""
    size, hidden = input.element_size(), hx_.shape[-1]
    lstm = _lstm(input, hx_, outputs[3] is not None)
    copies = sum(contiguous_copy(tensor) for tensor in (input, hx_, cx_))
    weights = sum(
        _forward_weight(rows, hidden, size, lstm.brgemm) for rows in (lstm.inputs, hidden)
    )
    scratchpad = lstm.scratchpad()
    if lstm.brgemm:
        # Lists of products; twice as many where both weights are multiplied at once.
        both = lstm.inputs == lstm.hidden and not lstm.merges
        scratchpad += booked((4 if both else 2) * machine.threads * _ELEMENT)
    return by_onednn(machine, input.dtype, copies + 4 * hidden * size + weights + scratchpad)


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
    """Gradients made dense, weights in the backward's order, their gradients in rows of gates. The
    second bias gradient is a copy of the first, made when everything else is freed.
    """
    size, hidden = input.element_size(), hx_.shape[-1]
    lstm = _lstm(input, hx_)
    pairs = ((grad_output, output), (grad_hy, hy_), (grad_cy, cy_))
    copies = sum(
        dense_bytes(result) if gradient is None else contiguous_copy(gradient)
        for gradient, result in pairs
    )
    copies += sum(contiguous_copy(tensor) for tensor in (input, hx_, cx_tmp))
    if size != FLOAT:
        copies += sum(result.numel() * FLOAT for _, result in pairs)
    weights = sum(
        _backward_weight(rows, hidden, size) + _gradient_of_weight(rows, hidden)
        for rows in (lstm.inputs, hidden)
    )
    scratchpad = lstm.scratchpad(backward=True)
    if lstm.brgemm:
        scratchpad += _brgemm_backward(machine.threads, lstm)
    return by_onednn(machine, input.dtype, copies + 4 * hidden * size + weights + scratchpad)
