"""Recurrent layers on a GPU: one call of cuDNN for all layers and steps where it takes them.

native/RNN.cpp (``use_cudnn``), native/cudnn/RNN.cpp (``_cudnn_impl``). Without cuDNN
(``torch.backends.cudnn.enabled = False``, bfloat16 before sm80) the layers run step by step
(``FullLayer``, ``FullBidirectionalLayer``, ``PackedLayer``, ``ReversedPackedLayer``,
``apply_layer_stack``): each step has its own product with the weights, where the CPU has one for
all, and the cells of LSTM and GRU are fused (native/cuda/RNN.cu).

Packed sequences: the steps of padded ones, without their padding; native/PackedSequence.cpp.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall, LayerSettings
from pytest_torchmem.operators.elementwise import sum_buffers
from pytest_torchmem.operators.recurrent import cudnn
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.operators.workspace import (
    ALL,
    Made,
    Outputs,
    Request,
    contiguous_copy,
    like,
    passing,
)
from pytest_torchmem.targets.gpus import Gpu

_aten: Any = torch.ops.aten
_GRU_WORKSPACE = 5
"""``GRU_WORKSPACE_MULTIPLIER``."""

# The workspace is made before the states, and kept as an output for the backward.
_lstm = operator("aten::_thnn_fused_lstm_cell", order={"cuda": (2, 0, 1)})
_gru = operator("aten::_thnn_fused_gru_cell", order={"cuda": (1, 0)})
_gru_backward = operator("aten::_thnn_fused_gru_cell_backward")

Hidden = tuple[Tensor, ...]
"""A cell's state: ``(h,)``, or ``(h, c)`` of an LSTM."""


class Weights(NamedTuple):
    """One direction's weights in one layer; ``CellParams``."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
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


@operator("aten::lstm_cell", "aten::gru_cell").path("cuda")
def fused_cell(
    call: CompositeCall, input: Tensor, hx: Tensor | list[Tensor], weights: Weights
) -> Any:
    """``_thnn_fused_lstm_cell``, ``_thnn_fused_gru_cell``, of batches."""
    if input.dim() != 2 or input.numel() == 0:
        return call()
    if isinstance(hx, Tensor):
        return gru_cell(input, (hx,), weights)[0]
    return lstm_cell(input, tuple(hx), weights)


@_lstm.meta("cuda")
def states_and_workspace(input_gates: Tensor, cx: Tensor) -> tuple[Tensor, ...]:
    """``_thnn_fused_lstm_cell_cuda``; torch's own function for ``meta`` wants biases."""
    return like(cx), like(cx), like(input_gates)


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
def sums_of_biases(machine: Gpu, outputs: Outputs, has_bias: bool) -> tuple[Request, ...]:
    """The sums that are the gradients of the biases, one after the other."""
    gates = outputs[0]
    if not has_bias or gates is None:
        return ()
    summed = passing(*sum_buffers(machine, gates.shape, 0, gates.dtype))
    return (*map(Made, range(4)), *summed, Made(4), *summed)


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
    ends = list(accumulate(batch_sizes))

    def run(
        cell: Cell, rows: Tensor, initial: Hidden, weights: Weights, reverse: bool
    ) -> tuple[Tensor, Hidden]:
        outputs, finished = [], []
        steps = list(zip(ends, batch_sizes, strict=True))[:: -1 if reverse else 1]
        last = steps[0][1]
        hidden = _slice(initial, 0, last) if reverse else initial
        for end, size in steps:
            if size < last:  # forward: sequences end
                finished.append(_slice(hidden, size, last))
                hidden = _slice(hidden, 0, size)
            elif size > last:  # in reverse: they begin
                hidden = _joined(hidden, _slice(initial, last, size))
            last = size
            hidden = cell(rows.narrow(0, end - size, size), hidden, weights)
            outputs.append(hidden[0])
        if reverse:
            return torch.cat(outputs[::-1], 0), hidden
        return torch.cat(outputs, 0), _joined(hidden, *reversed(finished))

    return run


def _slice(hidden: Hidden, start: int, end: int) -> Hidden:
    return tuple(part.narrow(0, start, end - start) for part in hidden)


def _joined(*parts: Hidden) -> Hidden:
    return tuple(torch.cat(part, 0) for part in zip(*parts, strict=True))


_LAYERS: Mapping[str, tuple[int, Cell]] = {
    "rnn_relu": (cudnn.RELU, simple_cell(torch.relu)),
    "rnn_tanh": (cudnn.TANH, simple_cell(torch.tanh)),
    "lstm": (cudnn.LSTM, lstm_cell),
    "gru": (cudnn.GRU, gru_cell),
}
"""Layers by the names of their operators: what they are to cuDNN, and their cells without it."""


def uses_cudnn(gpu: Gpu, tensor: Tensor) -> bool:
    """Return whether cuDNN takes a layer with this input; native/RNN.cpp, ``use_cudnn``."""
    if not torch.backends.cudnn.enabled or tensor.numel() == 0:
        return False
    if tensor.dtype is torch.bfloat16:
        return gpu.capability >= (8, 0)
    return tensor.dtype in (torch.float32, torch.float64, torch.float16)


@operator(*(f"aten::{name}.{kind}" for name in _LAYERS for kind in ("input", "data"))).path("cuda")
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
    mode, cell = _LAYERS[call.overload.overloadpacket.__name__]
    rows = input if data is None else data
    if rows is None or rows.numel() == 0:
        return call()
    states = [hx] if isinstance(hx, Tensor) else hx
    sizes = None if batch_sizes is None else batch_sizes.tolist()
    if not uses_cudnn(machine, rows):
        return run_layers(cell, rows, states, settings, batch_first, sizes)
    h, c = states[0], states[1] if mode == cudnn.LSTM else None
    hidden_size = (h if c is None else c).size(2)
    projection = h.size(2) if h.size(2) != hidden_size else 0
    stride = (4 if settings.has_biases else 2) + (projection != 0)
    if settings.train and settings.dropout > 0:
        call.trace.keep(cudnn.dropout_state(machine), _aten._cudnn_init_dropout_state.default)
    params, of_cell = settings.params, (mode, hidden_size)
    elements = cudnn.weight_elements(params, stride, *of_cell)
    buffer = cudnn.weight_buffer(call.trace, params, elements)
    network = *of_cell, projection, settings.num_layers, batch_first, settings.dropout
    rest = settings.train, settings.bidirectional, sizes or (), None
    outputs = _aten._cudnn_rnn.default(rows, params, stride, buffer, h, c, *network, *rest)
    return outputs[: 1 + len(states)]


# Registered for every backend, and reading and writing data all the same. Lengths and the number of
# sequences for each step are on the host, and decide how many rows there are.
_pack = operator(
    "aten::_pack_padded_sequence",
    kind=OperatorKind.LEAF,
    across_devices=True,
    data_dependent=True,
    decided_by=(1,),
    host_outputs={"cpu": (1,), "cuda": (1,)},
    of_host="lengths",
    elsewhere="'lengths' argument should be a 1D CPU int64 tensor, but got 1D {device} Long tensor",
)
operator("aten::_pack_padded_sequence_backward", across_devices=True)


@_pack.workspace("cpu")
def parts_and_lengths(
    outputs: tuple[Tensor, Tensor], input: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[int, ...]:
    """Dense copies of the parts, and of the lengths."""
    parts = _copies(input, outputs[1].tolist(), batch_first)
    return (contiguous_copy(lengths), *parts)


@_pack.workspace("cuda")
def parts(outputs: tuple[Tensor, Tensor], input: Tensor, batch_first: bool) -> tuple[Request, ...]:
    """Dense copies of the parts; the lengths are the host's. Exact."""
    return (*_copies(input, outputs[1].tolist(), batch_first), ALL)


def _copies(input: Tensor, batch_sizes: Sequence[int], batch_first: bool) -> tuple[int, ...]:
    """Bytes of the dense copies of the parts that a padded sequence is packed from.

    The steps of one batch size are one part, and all parts are kept until they are joined.
    ``input`` is (steps, batch, ...), or (batch, steps, ...) where the batch is first;
    ``batch_sizes`` has a number of sequences for every step.
    """
    steps = input.transpose(0, 1) if batch_first else input
    copies, begin = [], 0
    for size, run in groupby(batch_sizes):
        end = begin + sum(1 for _ in run)
        copies.append(contiguous_copy(steps[begin:end, :size]))
        begin = end
    return tuple(copies)


@operator("aten::_pad_packed_sequence").path("cuda")
def pad_packed_sequence(call: CompositeCall) -> Any:
    """The lengths it returns are on the host."""
    padded, lengths = call()
    return padded, lengths.cpu()
