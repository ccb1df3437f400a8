"""Recurrent layers: one cuDNN call for all layers and steps; the cells as fused kernels.

native/RNN.cpp (``use_cudnn``, the cells' ``is_cuda`` branches), native/cudnn/RNN.cpp
(``_cudnn_impl``, ``try_get_weight_buf``) and cudnn/AutocastRNN.cpp. Without cuDNN
(``torch.backends.cudnn.enabled = False``, bfloat16 before sm80) the layers run step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import LayerSettings
from pytest_torchmem.operators.calls import CompositeCall, Trace
from pytest_torchmem.operators.recurrent.native import gru_cell as native_gru_cell
from pytest_torchmem.operators.recurrent.native import lstm_cell as native_lstm_cell
from pytest_torchmem.operators.recurrent.native import run_layers, simple_cell
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Buffer
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.storages import storage_address, tensor_on

RELU, TANH, LSTM, GRU = range(4)
"""``cudnnRNNMode_t``."""
DROPOUT_STATE = Buffer("cuDNN dropout", 2 * 1024**2, process=True, confidence=Confidence.UNKNOWN)
"""The state of random numbers that a process keeps; cudnn/RNN.cpp, ``get_dropout_state``: «slightly
over 2MB». How much exactly, ``cudnnDropoutGetStatesSize`` alone knows."""
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
_aten: Any = torch.ops.aten


_NATIVE_CELLS = {
    RELU: simple_cell(torch.relu),
    TANH: simple_cell(torch.tanh),
    LSTM: native_lstm_cell,
    GRU: native_gru_cell,
}


def uses_cudnn(gpu: Gpu, tensor: Tensor) -> bool:
    """Return whether cuDNN takes a layer with this input; native/RNN.cpp, ``use_cudnn``."""
    if not torch.backends.cudnn.enabled or tensor.numel() == 0:
        return False
    if tensor.dtype is torch.bfloat16:
        return gpu.capability >= (8, 0)
    return tensor.dtype in (torch.float32, torch.float64, torch.float16)


def weight_elements(weights: Sequence[Tensor], stride: int, mode: int, hidden_size: int) -> int:
    """Return the elements of cuDNN's weight buffer, which has two biases also for a layer without.

    cudnn/RNN.cpp, ``get_num_weights``: the descriptor's bias mode is always the double one.
    """
    elements = sum(weight.numel() for weight in weights)
    has_biases = weights[2].dim() == 1 if stride > 2 else False
    if not has_biases:
        elements += len(weights) // stride * 2 * GATES[mode] * hidden_size
    return elements


def _weight_buffer(trace: Trace, params: list[Tensor], elements: int) -> Tensor | None:
    """Return the flat buffer the weights lie in, or None; ``try_get_weight_buf``.

    Weights that were there before the step have been through ``Module.to``, which flattens them.
    """
    first = params[0]
    address = storage_address(first)
    if all(storage_address(param) == address for param in params[1:]):
        with trace.working():
            storage = first.untyped_storage()
            return tensor_on(storage, first.dtype, (elements,), (1,), 0)
    return first.detach() if trace.made_before_step(first) else None


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
        maker = _aten._cudnn_init_dropout_state.default
        call.trace.keep(DROPOUT_STATE, maker)
    return _aten._cudnn_rnn.default(
        input,
        settings.params,
        stride,
        _weight_buffer(call.trace, settings.params, elements),
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


def _layer(
    mode: int,
    machine: Gpu,
    call: CompositeCall,
    input: Tensor,
    batch_sizes: Tensor | None,
    hx: Tensor | list[Tensor],
    settings: LayerSettings,
    batch_first: bool = False,
) -> Any:
    """``_cudnn_rnn`` where cuDNN takes it, else step by step; native/RNN.cpp, ``lstm``, ``gru``.

    ``batch_sizes`` are those of a packed sequence.
    """
    if input.numel() == 0:
        return call()
    states = [hx] if isinstance(hx, Tensor) else hx
    sizes = None if batch_sizes is None else batch_sizes.tolist()
    if not uses_cudnn(machine, input):
        return run_layers(_NATIVE_CELLS[mode], input, states, settings, batch_first, sizes)
    cell = states[1] if mode == LSTM else None
    outputs = _run(call, input, sizes or (), states[0], cell, mode, settings, batch_first)
    return outputs[: 1 + len(states)]


def _padded(mode: int) -> Callable[..., Any]:
    def layer(
        machine: Gpu,
        call: CompositeCall,
        input: Tensor,
        hx: Tensor | list[Tensor],
        settings: LayerSettings,
        batch_first: bool,
    ) -> Any:
        return _layer(mode, machine, call, input, None, hx, settings, batch_first)

    layer.__doc__ = "A layer of padded sequences; native/RNN.cpp."
    return layer


def _packed(mode: int) -> Callable[..., Any]:
    def layer(
        machine: Gpu,
        call: CompositeCall,
        data: Tensor,
        batch_sizes: Tensor,
        hx: Tensor | list[Tensor],
        settings: LayerSettings,
    ) -> Any:
        return _layer(mode, machine, call, data, batch_sizes, hx, settings)

    layer.__doc__ = "A layer of packed sequences; native/RNN.cpp."
    return layer


for _name, _mode in (("lstm", LSTM), ("gru", GRU), ("rnn_tanh", TANH), ("rnn_relu", RELU)):
    operator(f"aten::{_name}.input").path("cuda")(_padded(_mode))
    operator(f"aten::{_name}.data").path("cuda")(_packed(_mode))


@operator("aten::_use_cudnn_rnn_flatten_weight").path("cuda")
def use_cudnn_rnn_flatten_weight() -> bool:
    """CUDA builds come with cuDNN."""
    return True


@operator("aten::_cudnn_rnn_flatten_weight").path("cuda")
def flatten_weight(
    call: CompositeCall, weight_arr: list[Tensor], weight_stride0: int, mode: int, hidden_size: int
) -> Tensor:
    """Copy the weights into one buffer and let them lie there; ``_cudnn_rnn_flatten_weight``."""
    elements = weight_elements(weight_arr, weight_stride0, mode, hidden_size)
    buffer = torch.zeros(elements, dtype=weight_arr[0].dtype, device=weight_arr[0].device)
    views = _laid_out(call.trace, buffer, weight_arr)
    for weight, view in zip(weight_arr, views, strict=True):
        view.copy_(weight)
        weight.set_(view)  # type: ignore[call-overload]
    return buffer


@operator("aten::lstm_cell").path("cuda")
def lstm_cell(
    call: CompositeCall,
    input: Tensor,
    hx: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """``_thnn_fused_lstm_cell``; native/RNN.cpp, ``LSTMCell``."""
    if input.dim() != 2 or input.numel() == 0:
        return call()
    from_input = torch.matmul(input, w_ih.t())
    from_hidden = torch.matmul(hx[0], w_hh.t())
    return _aten._thnn_fused_lstm_cell.default(from_input, from_hidden, hx[1], b_ih, b_hh)[:2]


@operator("aten::gru_cell").path("cuda")
def gru_cell(
    call: CompositeCall,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """``_thnn_fused_gru_cell``; native/RNN.cpp, ``GRUCell``."""
    if input.dim() != 2 or input.numel() == 0:
        return call()
    from_input = torch.matmul(input, w_ih.t())
    from_hidden = torch.matmul(hx, w_hh.t())
    return _aten._thnn_fused_gru_cell.default(from_input, from_hidden, hx, b_ih, b_hh)[0]


class Casts(Protocol):
    """How autocast casts."""

    def eligible(self, value: Any) -> bool:
        """Return whether a value is ever cast."""

    def to(self, dtype: torch.dtype, value: Any) -> Any:
        """Return ``value`` cast where it is eligible."""


def autocast_rnn(
    casts: Casts,
    trace: Trace,
    input: Tensor,
    weight: list[Tensor],
    stride: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    *rest: Any,
) -> Any:
    """Run ``_cudnn_rnn`` in half precision; ``_cudnn_rnn_cast_reflatten``.

    Always float16, whatever the region's dtype is. The cast weights are not kept in autocast's
    cache: they are copied into a new flat buffer at every call.
    """
    half = torch.float16
    if weight[0].dtype is not half and casts.eligible(weight[0]):
        elements = weight_elements(weight, stride, mode, hidden_size)
        buffer = torch.zeros(elements, dtype=half, device=weight[0].device)
        views = _laid_out(trace, buffer, weight)
        for view, one in zip(views, weight, strict=True):
            view.copy_(one)
        weight = views
    return _aten._cudnn_rnn.default(
        casts.to(half, input),
        weight,
        stride,
        buffer,
        casts.to(half, hx),
        casts.to(half, cx),
        mode,
        hidden_size,
        *rest,
    )


def _laid_out(trace: Trace, buffer: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the weights' shapes, one behind the other in ``buffer``.

    As ``get_parameters`` makes them they are not views to autograd.
    """
    offset = 0
    made = []
    storage = buffer.untyped_storage()
    with trace.working():
        for weight in weights:
            shape = tuple(weight.shape)
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            made.append(tensor_on(storage, buffer.dtype, shape, stride, offset))
            offset += weight.numel()
    return made


@operator("aten::_pad_packed_sequence").path("cuda")
def pad_packed_sequence(call: CompositeCall) -> Any:
    """The lengths it returns are on the host; native/PackedSequence.cpp."""
    padded, lengths = call()
    return padded, lengths.cpu()
