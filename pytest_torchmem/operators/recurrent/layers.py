"""Recurrent layers on a GPU: one call of cuDNN for all layers and steps where it takes them.

native/RNN.cpp (``use_cudnn``), native/cudnn/RNN.cpp (``_cudnn_impl``). Without cuDNN
(``torch.backends.cudnn.enabled = False``, bfloat16 before sm80) the layers run step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import LayerSettings
from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.recurrent.cells import gru_cell, lstm_cell, simple_cell
from pytest_torchmem.operators.recurrent.cudnn import (
    DROPOUT_STATE,
    weight_buffer,
    weight_elements,
)
from pytest_torchmem.operators.recurrent.steps import run_layers
from pytest_torchmem.operators.recurrent.temporary_space import GRU, LSTM, RELU, TANH
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.gpus import Gpu

_NATIVE_CELLS = {
    RELU: simple_cell(torch.relu),
    TANH: simple_cell(torch.tanh),
    LSTM: lstm_cell,
    GRU: gru_cell,
}


def uses_cudnn(gpu: Gpu, tensor: Tensor) -> bool:
    """Return whether cuDNN takes a layer with this input; native/RNN.cpp, ``use_cudnn``."""
    if not torch.backends.cudnn.enabled or tensor.numel() == 0:
        return False
    if tensor.dtype is torch.bfloat16:
        return gpu.capability >= (8, 0)
    return tensor.dtype in (torch.float32, torch.float64, torch.float16)


def _run(
    call: CompositeCall,
    input: Tensor,
    batch_sizes: Sequence[int],
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    settings: LayerSettings,
    batch_first: bool,
) -> Any:
    """Call ``_cudnn_rnn`` as ``_cudnn_impl`` does."""
    hidden_size, projection = hx.size(2), 0
    if cx is not None and cx.size(2) != hx.size(2):
        hidden_size, projection = cx.size(2), hx.size(2)
    stride = (4 if settings.has_biases else 2) + (projection != 0)
    elements = weight_elements(settings.params, stride, mode, hidden_size)
    if settings.train and settings.dropout > 0:
        maker = torch.ops.aten._cudnn_init_dropout_state.default
        call.trace.keep(DROPOUT_STATE, maker)
    return torch.ops.aten._cudnn_rnn.default(
        input,
        settings.params,
        stride,
        weight_buffer(call.trace, settings.params, elements),
        hx,
        cx,
        mode,
        hidden_size,
        projection,
        settings.num_layers,
        batch_first,
        settings.dropout,
        settings.train,
        settings.bidirectional,
        batch_sizes,
        None,
    )


def _layer(mode: int) -> Callable[..., Any]:
    def layer(
        machine: Gpu,
        call: CompositeCall,
        hx: Tensor | list[Tensor],
        settings: LayerSettings,
        input: Tensor | None = None,
        batch_first: bool = False,
        data: Tensor | None = None,
        batch_sizes: Tensor | None = None,
    ) -> Any:
        """``_cudnn_rnn`` where cuDNN takes it, else step by step; native/RNN.cpp, ``lstm``, …

        Padded sequences are ``input``; packed ones are ``data``, with ``batch_sizes``.
        """
        rows = input if data is None else data
        if rows is None or rows.numel() == 0:
            return call()
        states = [hx] if isinstance(hx, Tensor) else hx
        sizes = None if batch_sizes is None else batch_sizes.tolist()
        if not uses_cudnn(machine, rows):
            return run_layers(_NATIVE_CELLS[mode], rows, states, settings, batch_first, sizes)
        cell = states[1] if mode == LSTM else None
        outputs = _run(call, rows, sizes or (), states[0], cell, mode, settings, batch_first)
        return outputs[: 1 + len(states)]

    return layer


for _name, _mode in (("lstm", LSTM), ("gru", GRU), ("rnn_tanh", TANH), ("rnn_relu", RELU)):
    operator(f"aten::{_name}.input", f"aten::{_name}.data").path("cuda")(_layer(_mode))
