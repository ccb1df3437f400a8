"""Recurrent layers on a GPU where cuDNN does not take them: a cell's kernels, step by step.

native/RNN.cpp: ``FullLayer``, ``FullBidirectionalLayer``, ``PackedLayer``, ``ReversedPackedLayer``,
``apply_layer_stack``. On the CPU the input's product with the weights is one for all steps; here
each step has its own, and LSTM and GRU cells are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import LayerSettings
from pytest_torchmem.operators.recurrent.cells import Cell, Hidden, Weights


def run_layers(
    cell: Cell,
    input: Tensor,
    states: Sequence[Tensor],
    settings: LayerSettings,
    batch_first: bool = False,
    batch_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """Return the output and the final states of a whole recurrent layer.

    ``input`` is (steps, batch, features), batch and steps exchanged with ``batch_first``, or the
    rows of a packed sequence; ``states`` are of (layers * directions, batch, size).
    """
    layers, directions = settings.num_layers, 2 if settings.bidirectional else 1
    if batch_first:
        input = input.transpose(0, 1)
    hiddens = list(zip(*(state.unbind(0) for state in states), strict=True))
    weights = _gather(settings.params, settings.has_biases, layers * directions)
    final: list[Hidden] = []
    for layer in range(layers):
        outputs = []
        steps: Any = input.unbind(0) if batch_sizes is None else input
        for direction in range(directions):
            index = layer * directions + direction
            run = _over_steps if batch_sizes is None else _over_rows(batch_sizes)
            output, hidden = run(cell, steps, hiddens[index], weights[index], direction == 1)
            outputs.append(output)
            final.append(hidden)
        input = torch.cat(outputs, -1) if settings.bidirectional else outputs[0]
        del output, outputs, steps
        if settings.dropout and settings.train and layer < layers - 1:
            input = torch.dropout(input, settings.dropout, True)
    if batch_first:
        input = input.transpose(0, 1)
    return input, *(torch.stack(parts, 0) for parts in zip(*final, strict=True))


def _gather(params: Sequence[Tensor], has_biases: bool, count: int) -> list[Weights]:
    """``gather_params``."""
    stride = len(params) // count
    found = []
    for start in range(0, len(params), stride):
        w_ih, w_hh, *rest = params[start : start + stride]
        b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
        found.append(Weights(w_ih, w_hh, b_ih, b_hh, rest[0] if rest else None))
    return found


def _over_steps(
    cell: Cell, steps: Sequence[Tensor], hidden: Hidden, weights: Weights, reverse: bool
) -> tuple[Tensor, Hidden]:
    """``FullLayer``, and the second half of ``FullBidirectionalLayer``."""
    outputs = []
    for step in reversed(steps) if reverse else steps:
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0])
    return torch.stack(outputs[::-1] if reverse else outputs, 0), hidden


def _over_rows(batch_sizes: Sequence[int]) -> Callable[..., tuple[Tensor, Hidden]]:
    """``PackedLayer`` and ``ReversedPackedLayer``: as many sequences as last to each step."""
    offsets = [sum(batch_sizes[:step]) for step in range(len(batch_sizes))]

    def forward(
        cell: Cell, rows: Tensor, hidden: Hidden, weights: Weights, reverse: bool
    ) -> tuple[Tensor, Hidden]:
        if reverse:
            return backward(cell, rows, hidden, weights)
        outputs, finished = [], []
        last = batch_sizes[0]
        for offset, size in zip(offsets, batch_sizes, strict=True):
            if size < last:
                finished.append(_slice(hidden, size, last))
                hidden = _slice(hidden, 0, size)
            last = size
            hidden = cell(rows.narrow(0, offset, size), hidden, weights)
            outputs.append(hidden[0])
        finished.append(hidden)
        parts = zip(*reversed(finished), strict=True)
        return torch.cat(outputs, 0), tuple(torch.cat(part, 0) for part in parts)

    def backward(
        cell: Cell, rows: Tensor, initial: Hidden, weights: Weights
    ) -> tuple[Tensor, Hidden]:
        outputs = []
        last = batch_sizes[-1]
        hidden = _slice(initial, 0, last)
        for offset, size in zip(reversed(offsets), reversed(batch_sizes), strict=True):
            if size > last:
                more = _slice(initial, last, size)
                hidden = tuple(torch.cat(pair, 0) for pair in zip(hidden, more, strict=True))
            last = size
            hidden = cell(rows.narrow(0, offset, size), hidden, weights)
            outputs.append(hidden[0])
        return torch.cat(outputs[::-1], 0), hidden

    return forward


def _slice(hidden: Hidden, start: int, end: int) -> Hidden:
    return tuple(part.narrow(0, start, end - start) for part in hidden)
