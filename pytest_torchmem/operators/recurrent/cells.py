"""The cells of recurrent layers: on CUDA those of LSTM and GRU are fused; native/RNN.cpp,
native/cuda/RNN.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.geometry import Outputs, like
from pytest_torchmem.operators.reduction.cuda_buffers import sum_buffers
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.gpus import Gpu

_aten: Any = torch.ops.aten
_GRU_WORKSPACE = 5
"""``GRU_WORKSPACE_MULTIPLIER``."""

# The workspace is made before the states, and kept as an output for the backward.
operator("aten::_thnn_fused_lstm_cell", order={"cuda": (2, 0, 1)})
_gru = operator("aten::_thnn_fused_gru_cell", order={"cuda": (1, 0)})
_gru_backward = operator("aten::_thnn_fused_gru_cell_backward")


Hidden = tuple[Tensor, ...]
"""A cell's state: ``(h,)``, or ``(h, c)`` of an LSTM."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One direction's weights in one layer; ``CellParams``."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None = None


Cell = Callable[[Tensor, Hidden, Weights], Hidden]


def lstm_cell(input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
    """``LSTMCell`` on CUDA, with the projection of its output where there is one."""
    from_input = torch.matmul(input, weights.w_ih.t())
    from_hidden = torch.matmul(hidden[0], weights.w_hh.t())
    h, c = _aten._thnn_fused_lstm_cell.default(
        from_input, from_hidden, hidden[1], weights.b_ih, weights.b_hh
    )[:2]
    return (h if weights.w_hr is None else torch.matmul(h, weights.w_hr.t())), c


def gru_cell(input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
    """``GRUCell`` on CUDA."""
    from_input = torch.matmul(input, weights.w_ih.t())
    from_hidden = torch.matmul(hidden[0], weights.w_hh.t())
    return (
        _aten._thnn_fused_gru_cell.default(
            from_input, from_hidden, hidden[0], weights.b_ih, weights.b_hh
        )[0],
    )


def simple_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    """Return ``SimpleCell`` with ``torch.tanh`` or ``torch.relu``; the same on every device."""

    def cell(input: Tensor, hidden: Hidden, weights: Weights) -> Hidden:
        total = functional.linear(hidden[0], weights.w_hh, weights.b_hh)
        from_input = functional.linear(input, weights.w_ih, weights.b_ih)
        result = activation(total.add_(from_input))
        del from_input, total  # in C++ both last to the end of the expression
        return (result,)

    return cell


def _fused(cell: Cell) -> Callable[..., Any]:
    def fused(
        call: CompositeCall,
        input: Tensor,
        hx: Tensor | list[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        """``_thnn_fused_lstm_cell``, ``_thnn_fused_gru_cell``, of batches."""
        if input.dim() != 2 or input.numel() == 0:
            return call()
        hidden = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        states = cell(input, hidden, Weights(w_ih, w_hh, b_ih, b_hh))
        return states[0] if isinstance(hx, Tensor) else states

    return fused


operator("aten::lstm_cell").path("cuda")(_fused(lstm_cell))
operator("aten::gru_cell").path("cuda")(_fused(gru_cell))


@_gru.meta("cuda")
def state_and_workspace(hx: Tensor) -> tuple[Tensor, Tensor]:
    """``_thnn_fused_gru_cell_cuda``."""
    return like(hx), hx.new_empty((hx.size(0), hx.size(1) * _GRU_WORKSPACE))


@_gru_backward.meta("cuda")
def gradients(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """``_thnn_fused_gru_cell_backward_cuda``."""
    gates = workspace.size(1) // _GRU_WORKSPACE * 3
    shape = (workspace.size(0), gates)
    products = (workspace.new_empty(shape) for _ in range(2))
    biases = (workspace.new_empty((gates,)) if has_bias else None for _ in range(2))
    return (*products, like(grad_hy), *biases)


@_gru_backward.workspace("cuda")
def sums_of_biases(machine: Gpu, outputs: Outputs, has_bias: bool) -> tuple[int, ...]:
    """The sums that are the gradients of the biases, one after the other."""
    gates = outputs[0]
    if not has_bias or gates is None:
        return ()
    return sum_buffers(machine, gates.shape, 0, gates.dtype)
