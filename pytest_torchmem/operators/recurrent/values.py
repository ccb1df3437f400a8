"""Values of cuda's recurrent layers and cells, computed by the operators of the CPU."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import RecurrentSettings
from pytest_torchmem.operators.derivatives import gradients_of, run_plainly
from pytest_torchmem.operators.recurrent.cudnn import GRU, LSTM, RELU, TANH, Gradients, Layer
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.step.generators import current_generator, drawing_from, state_of
from pytest_torchmem.torch_private.tensors import bytes_of

_LAYERS: dict[int, Any] = {RELU: torch.rnn_relu, TANH: torch.rnn_tanh, GRU: torch.gru}


def _layers(layer: Layer, settings: RecurrentSettings, random_state: Tensor) -> tuple[Any, ...]:
    """Run all layers; the forward and its backward drop the same, by the generator's state."""
    input, weights, stride, hx, cx = layer
    hidden: Any = hx if settings.mode != LSTM else (hx, cx)
    rest = (
        list(weights),
        stride in (4, 5),
        settings.num_layers,
        settings.dropout,
        settings.train,
        settings.bidirectional,
    )
    run = torch.lstm if settings.mode == LSTM else _LAYERS[settings.mode]
    with drawing_from(random_state) if random_state.numel() else nullcontext():
        if settings.batch_sizes:
            return tuple(run(input, torch.tensor(list(settings.batch_sizes)), hidden, *rest))
        return tuple(run(input, hidden, *rest, settings.batch_first))


@operator("aten::_cudnn_rnn").values()
def forward(layer: Layer, settings: RecurrentSettings) -> tuple[Any, ...]:
    """Output and states; the generator's state stands where cuDNN keeps what it needs."""
    drops = settings.dropout and settings.train
    state = state_of(current_generator()) if drops else torch.empty(0, dtype=torch.uint8)
    found = run_plainly(_layers, layer, settings, state)
    return (*found, *[None] * (3 - len(found)), state, None)


@operator("aten::_cudnn_rnn_backward").values()
def backward(
    layer: Layer, given: Gradients, settings: RecurrentSettings, reserve: Tensor
) -> tuple[Any, ...]:
    """Gradients of input, states and weights."""
    drops = settings.dropout and settings.train
    kept = bytes_of(reserve.untyped_storage())
    state = kept[: state_of(current_generator()).numel() if drops else 0].clone()

    def run(input: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor) -> tuple[Any, ...]:
        return _layers(Layer(input, weights, layer.weight_stride0, hx, cx), settings, state)

    found = gradients_of(run, [layer.input, layer.hx, layer.cx, *layer.weight], given)
    return (*found[:3], found[3:])


class Gates(NamedTuple):
    """What a fused cell is given beside its state, by the names of the schemas' arguments."""

    input_gates: Tensor
    hidden_gates: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None


def _lstm(given: Gates, cx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = given.input_gates + given.hidden_gates
    if given.input_bias is not None and given.hidden_bias is not None:
        gates = gates + given.input_bias + given.hidden_bias
    enter, forget, cell, leave = gates.chunk(4, 1)
    enter, forget, leave = enter.sigmoid(), forget.sigmoid(), leave.sigmoid()
    cell = cell.tanh()
    cy = forget * cx + enter * cell
    return leave * cy.tanh(), cy, torch.cat([enter, forget, cell, leave], 1)


@operator("aten::_thnn_fused_lstm_cell").values()
def lstm_cell(gates: Gates, cx: Tensor) -> Any:
    """Both states, and the gates as the backward needs them; native/cuda/RNN.cu."""
    return run_plainly(_lstm, gates, cx)


@operator("aten::_thnn_fused_lstm_cell_backward_impl").values()
def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Any, ...]:
    """Gradients of the gates, of the cell state and of the biases; ``lstm_cell_backward``."""
    enter, forget, cell, leave = workspace.chunk(4, 1)
    grad_h = torch.zeros_like(cx) if grad_hy is None else grad_hy
    total = grad_h * leave * (1 - cy.tanh() ** 2)
    if grad_cy is not None:
        total = total + grad_cy
    gates = torch.cat(
        [
            total * cell * enter * (1 - enter),
            total * cx * forget * (1 - forget),
            total * enter * (1 - cell**2),
            grad_h * cy.tanh() * leave * (1 - leave),
        ],
        1,
    )
    return gates, total * forget, gates.sum(0) if has_bias else None


def _gru(given: Gates, hx: Tensor) -> tuple[Tensor, Tensor]:
    input_gates, hidden_gates, input_bias, hidden_bias = given
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    from_input, from_hidden = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    reset = (from_input[0] + from_hidden[0]).sigmoid()
    update = (from_input[1] + from_hidden[1]).sigmoid()
    new = (from_input[2] + reset * from_hidden[2]).tanh()
    workspace = torch.cat([reset, update, new, hx, from_hidden[2]], 1)
    return new + update * (hx - new), workspace


@operator("aten::_thnn_fused_gru_cell").values()
def gru_cell(gates: Gates, hx: Tensor) -> Any:
    """The state, and what the backward needs; native/cuda/RNN.cu."""
    return run_plainly(_gru, gates, hx)


@operator("aten::_thnn_fused_gru_cell_backward").values()
def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients of both products, of the state and of the biases; ``gru_cell_backward``."""
    reset, update, new, hx, from_hidden = workspace.chunk(5, 1)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_new = grad_hy * (1 - update) * (1 - new**2)
    grad_reset = grad_new * from_hidden * reset * (1 - reset)
    of_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    of_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = [of_input.sum(0), of_hidden.sum(0)] if has_bias else [None, None]
    return of_input, of_hidden, grad_hy * update, *biases
