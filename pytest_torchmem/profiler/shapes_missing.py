"""Geometry of outputs that torch does not know on ``meta``, or knows wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_torchmem.profiler.workspace.cpu.recurrent import lstm_workspace

MetaFunction = Callable[..., Any]
_F = TypeVar("_F", bound=MetaFunction)

META_FUNCTIONS: dict[str, MetaFunction] = {}
"""By operator, ``"aten::geqrf"`` for every overload: arguments on ``meta`` to outputs on ``meta``."""


def meta(*operators: str) -> Callable[[_F], _F]:
    """Register the geometry of ``operators``; ``ValueError`` where one has a function already."""

    def register(function: _F) -> _F:
        for operator in operators:
            if operator in META_FUNCTIONS:
                raise ValueError(f"{operator} already has a function for its geometry")
            META_FUNCTIONS[operator] = function
        return function

    return register


@meta("aten::mkldnn_rnn_layer")
def lstm_layer(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last output is what oneDNN keeps for a backward, in inference too; native/mkldnn/RNN.cpp."""
    steps, batch, inputs = input.shape
    nbytes = lstm_workspace(steps, batch, inputs, hidden_size, input.element_size())
    return (
        input.new_empty((steps, batch, hidden_size)),
        torch.empty_like(hx, memory_format=torch.contiguous_format),
        torch.empty_like(cx, memory_format=torch.contiguous_format),
        input.new_empty((nbytes,), dtype=torch.uint8),
    )
