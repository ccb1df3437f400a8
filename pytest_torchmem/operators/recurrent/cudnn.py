"""cuDNN's recurrent layers: one call for all layers and steps, and what cuDNN takes for it.

native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward_input``, ``_cudnn_rnn_backward_weight``)
asks ``cudnnGetRNNTempSpaceSizes`` for the workspace and for the reserve, an output that the
backward needs. Weights lie in one flat buffer.

cuDNN tells these sizes on a GPU alone. The formulas give to the byte what cuDNN 9.19.0 told on an
H100, for layers of all settings (tests/operators/test_recurrent_space.py), and what was published
of an LSTM of cuDNN 9 (jax, tests/rnn_test.py, ``test_struct_encoding_determinism``). No formula is
documented: what a buffer is for is a guess. On other GPUs the sizes are estimates.

Values of these layers and cells are computed by the operators of the CPU.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.activations import gradients_of, plainly
from pytest_torchmem.operators.calls import CompositeCall, RecurrentSettings, Trace
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    ALL,
    Buffer,
    Made,
    Request,
    Workspace,
    contiguous_copy,
    dense_bytes,
    estimate,
    like,
    passing,
    told,
)
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.step.generators import current_generator, drawing_from, state_of
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.tensors import bytes_of, storage_address, tensor_on

RELU, TANH, LSTM, GRU = range(4)
"""``cudnnRNNMode_t``."""
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
_KEPT_GATES = {**GATES, GRU: 6}
"""What the backward needs of a step, in hidden sizes; besides that of an LSTM its cell state."""
_SMALL = {RELU: (384, 256), TANH: (384, 256), LSTM: (192, 128), GRU: (192, 128)}
"""The largest hidden sizes of forward and backward; ``use_rnn_persist_small_h``."""
_ALIGNED = 32
"""Bytes: each buffer begins at a multiple of this."""
_HEADER = 256
_PRODUCTS = 8 * 1024**2
"""Bytes for the matrix products of a layer and direction."""
_PERSISTENT = 2432
"""Elements for each of the hidden size, of a persistent backward of few steps."""


class Algorithm(Enum):
    """``cudnnRNNAlgo_t``, as far as ATen asks for it."""

    STANDARD = auto()
    SMALL = auto()
    PERSISTENT = auto()


def extent(input: Tensor, settings: RecurrentSettings) -> tuple[int, int, int]:
    """Return the longest sequence, the largest batch, and the steps of all sequences."""
    if settings.batch_sizes:
        return len(settings.batch_sizes), settings.batch_sizes[0], input.shape[0]
    steps, batch = (input.transpose(0, 1) if settings.transposes else input).shape[:2]
    return steps, batch, steps * batch


def reserve(input: Tensor, settings: RecurrentSettings) -> int:
    """Return what the backward needs of a training forward; in bytes."""
    steps, batch, rows = extent(input, settings)
    between = (settings.num_layers - 1) * settings.directions
    every = settings.num_layers * settings.directions * rows
    kept = [_KEPT_GATES[settings.mode] * every, between * rows]
    kept += [every] * ((settings.mode == LSTM) + bool(settings.proj_size))
    parts = [settings.hidden_size * one for one in kept] + [settings.proj_size * every]
    mask = -(-steps * batch * settings.directions * _output_size(settings) // 8)
    masks = between * _part(mask) if settings.dropout else 0
    return _HEADER + masks + sum(_part(one * input.element_size()) for one in parts)


def temporary_space(
    machine: Gpu,
    input: Tensor,
    weight: Sequence[Tensor],
    settings: RecurrentSettings,
    backward: bool = False,
) -> int:
    """Return what a call takes while it runs; in bytes. In training all phases are provided for."""
    chosen = algorithm(machine, input, settings, backward)
    given = input, sum(one.numel() for one in weight if one.dim() > 1), settings
    phases = _phases(*given, small=chosen is not Algorithm.STANDARD)[: 1 + settings.train]
    _, batch, rows = extent(input, settings)
    if settings.train and chosen is Algorithm.PERSISTENT:  # another backward, which few steps take
        more = GATES[settings.mode] * rows, 2 * batch, _PERSISTENT
        longest = _phases(*given, small=False)[1]
        phases = (*phases, [*longest, *(settings.hidden_size * one for one in more)])
    layers = settings.num_layers * settings.directions
    lengths = 0 if settings.batch_sizes else _part(8 * batch)
    sizes = (sum(_part(one * input.element_size()) for one in phase) for phase in phases)
    return _HEADER + _PRODUCTS * layers + lengths + max(sizes)


def _phases(
    input: Tensor, weights: int, settings: RecurrentSettings, small: bool
) -> tuple[list[int], ...]:
    """Return the elements of each of cuDNN's buffers: those of the forward, and of the backward."""
    (steps, batch, rows), width = extent(input, settings), input.shape[-1]
    hidden, output, both = settings.hidden_size, _output_size(settings), settings.bidirectional
    gates, is_lstm = GATES[settings.mode], settings.mode == LSTM
    directions, layers = settings.directions, settings.num_layers
    whole, state = rows * hidden, layers * directions * batch * hidden
    always = [weights, *[2 * state] * ((small or both) + is_lstm)]
    if settings.proj_size:
        always.append(directions * whole)
    copies = []
    if not settings.batch_sizes:  # of input, output, and states before and after
        copies = [rows * width, directions * rows * output]
        copies += 2 * [layers * directions * batch * output] + 2 * is_lstm * [state]
    forward = [
        *always,
        *copies,
        4 * whole if both else whole * bool(settings.train and settings.dropout),
    ]
    if small:
        forward += [directions * gates * whole, 4 * gates * whole, state * both]
    else:
        part = 2 * whole if both else min(rows, 256 * batch) * hidden
        forward += [gates * part, gates * state]
    backward = [*always, *copies, *copies, directions**2 * rows * max(width, hidden)]
    if small or both:
        backward.append(directions * whole * min(layers, 2))
    else:
        backward.append(min(rows, _steps_at_once(layers, steps, batch) * batch) * hidden)
    if small:
        backward += [_KEPT_GATES[settings.mode] * whole, 8 * whole]
    if both or not small:
        backward.append(state)
    return forward, backward


def _steps_at_once(layers: int, steps: int, batch: int) -> int:
    """How many steps the backward of one direction has in memory between two layers."""
    if layers == 1:
        return steps
    few = 8 if steps >= 128 else 4 if batch <= 96 else 2
    chunk = 32 if batch == 1 else 16 if batch <= 8 else 8 if batch <= 16 else few
    return min(steps, layers * chunk + max(chunk, 8))


def algorithm(gpu: Gpu, input: Tensor, settings: RecurrentSettings, backward: bool) -> Algorithm:
    """Return the one that ATen asks for; ``get_algo``. For bfloat16 cuDNN takes what the standard
    one does, whichever it is asked for.
    """
    is_plain = not settings.proj_size and not settings.batch_sizes
    if not is_plain or input.dtype not in (torch.float32, torch.float16):
        return Algorithm.STANDARD
    if settings.hidden_size <= _SMALL[settings.mode][backward]:
        return Algorithm.SMALL
    persists = input.dtype is torch.float16 and _persists(gpu, input, settings)
    return Algorithm.PERSISTENT if persists else Algorithm.STANDARD


def _persists(machine: Gpu, input: Tensor, settings: RecurrentSettings) -> bool:
    """``use_persist_common_heuristics`` and ``use_persist_device_heuristics``."""
    (steps, batch, _), (major, minor) = extent(input, settings), machine.capability
    mode, hidden = settings.mode, settings.hidden_size
    if settings.num_layers > 1 or settings.bidirectional:
        return False
    if hidden > 1024 or hidden % 128 or input.shape[-1] % 128:
        return False
    if major == 7:
        is_liked = batch == 8 or (batch % 16 == 0 and batch not in (80, 112))
        most = ((40, 128), (20, 96), (10, 32))
        return minor != 5 and is_liked and any(steps >= n and batch <= m for n, m in most)
    if major < 8 or minor == 6 or machine.multiprocessors < 98 or mode == GRU:
        return False
    return batch % 8 == 0 and batch <= 128 and (mode == LSTM or batch < 96 or hidden < 896)


def _output_size(settings: RecurrentSettings) -> int:
    return settings.proj_size or settings.hidden_size


def _part(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def weight_elements(weights: Sequence[Tensor], stride: int, mode: int, hidden_size: int) -> int:
    """Return the elements of cuDNN's weight buffer, which has two biases also for a layer without.
    cudnn/RNN.cpp, ``get_num_weights``: the descriptor's bias mode is always the double one.
    """
    elements = sum(weight.numel() for weight in weights)
    has_biases = weights[2].dim() == 1 if stride > 2 else False
    if not has_biases:
        elements += len(weights) // stride * 2 * GATES[mode] * hidden_size
    return elements


def weight_buffer(trace: Trace, params: list[Tensor], elements: int) -> Tensor | None:
    """Return the flat buffer the weights lie in, or None; ``try_get_weight_buf``.

    Weights that were there before the step have been through ``Module.to``, which flattens them,
    but for bfloat16 (torch/backends/cudnn/__init__.py, ``CUDNN_TENSOR_DTYPES``).
    """
    first = params[0]
    address = storage_address(first)
    if all(storage_address(param) == address for param in params[1:]):
        with trace.working():
            storage = first.untyped_storage()
            return tensor_on(storage, first.dtype, (elements,), (1,), 0)
    is_flat = first.dtype is not torch.bfloat16 and trace.made_before_step(first)
    return first.detach() if is_flat else None


def flattened(
    trace: Trace, weights: Sequence[Tensor], stride: int, mode: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return a new flat buffer, and the copies of the weights that lie in it, one behind the other.
    As ``get_parameters`` makes them they are not views to autograd.
    """
    elements = weight_elements(weights, stride, mode, size)
    buffer = torch.zeros(elements, dtype=dtype, device=weights[0].device)
    views, storage, offset = list[Tensor](), buffer.untyped_storage(), 0
    for weight in weights:
        strides = (weight.shape[1], 1) if weight.dim() == 2 else (1,)
        with trace.working():
            views.append(tensor_on(storage, dtype, tuple(weight.shape), strides, offset))
        views[-1].copy_(weight)
        offset += weight.numel()
    return buffer, views


@operator("aten::_cudnn_rnn_flatten_weight").meta("cuda")
def flat_weight(weight_arr: Sequence[Tensor]) -> Tensor:
    """All parameters in one buffer."""
    return like(weight_arr[0], (sum(weight.numel() for weight in weight_arr),))


@operator("aten::_use_cudnn_rnn_flatten_weight").path("cuda")
def use_cudnn_rnn_flatten_weight() -> bool:
    """CUDA builds come with cuDNN."""
    return True


@operator("aten::_cudnn_rnn_flatten_weight").path("cuda")
def flatten_weight(
    call: CompositeCall, weight_arr: list[Tensor], weight_stride0: int, mode: int, hidden_size: int
) -> Tensor:
    """Copy the weights into one buffer and let them lie there; ``_cudnn_rnn_flatten_weight``."""
    dtype = weight_arr[0].dtype
    buffer, views = flattened(call.trace, weight_arr, weight_stride0, mode, hidden_size, dtype)
    for weight, view in zip(weight_arr, views, strict=True):
        weight.set_(view)  # type: ignore[call-overload]
    return buffer


def dropout_state(machine: Gpu) -> Buffer:
    """A process's random state: 24 bytes a thread were recorded; RNN.cpp, ``get_dropout_state``."""
    nbytes = 24 * machine.multiprocessors * machine.threads_per_multiprocessor
    confidence = Confidence.LIBRARY if _is_recorded(machine) else Confidence.UNKNOWN
    return Buffer("cuDNN dropout", nbytes, process=True, confidence=confidence)


def _is_recorded(machine: Gpu) -> bool:
    """Return whether cuDNN was asked on such a GPU: an H100 with 132 multiprocessors."""
    return (machine.capability, machine.multiprocessors) == ((9, 0), 132)


_rnn = operator("aten::_cudnn_rnn", library_output=3, not_in_key=("dropout_state",))
_rnn_backward = operator("aten::_cudnn_rnn_backward", not_in_key=("dropout_state", "reserve"))


class Layer(NamedTuple):
    """Tensors of ``_cudnn_rnn`` and its backward, by the names of the schemas' arguments."""

    input: Tensor
    weight: Sequence[Tensor]
    weight_stride0: int
    hx: Tensor
    cx: Tensor | None

    def weight_elements(self, settings: RecurrentSettings) -> int:
        given = self.weight, self.weight_stride0, settings.mode, settings.hidden_size
        return weight_elements(*given)


class Gradients(NamedTuple):
    """Those of a layer's outputs, None where none came."""

    grad_output: Tensor | None
    grad_hy: Tensor | None
    grad_cy: Tensor | None


@_rnn.meta("cuda")
def outputs(
    layer: Layer, weight_buf: Tensor | None, settings: RecurrentSettings
) -> tuple[Tensor, ...]:
    """Output, hidden and cell state, what is kept for the backward, the weight buffer.
    ``_cudnn_rnn``. With ``batch_first`` the output is a transposed tensor.
    """
    input, hx = layer.input, layer.hx
    hidden, layers = settings.hidden_size, settings.num_layers * settings.directions
    out = _output_size(settings)
    steps, batch, _ = extent(input, settings)
    if settings.batch_sizes:
        output = input.new_empty((input.size(0), out * settings.directions))
    else:
        output = input.new_empty((steps, batch, out * settings.directions))
        if settings.batch_first:
            output.transpose_(0, 1)
    hy = hx.new_empty((layers, batch, out))
    cy = hx.new_empty((0,) if layer.cx is None else (layers, batch, hidden))
    nbytes = reserve(input, settings) if settings.train else 0
    kept = input.new_empty((nbytes,), dtype=torch.uint8)
    if weight_buf is None:
        weight_buf = input.new_empty((layer.weight_elements(settings),))
    return output, hy, cy, kept, weight_buf


@_rnn_backward.meta("cuda")
def gradients(
    layer: Layer, settings: RecurrentSettings, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
    """Gradients of input and states, and those of the weights, which share one flat buffer.

    ``_cudnn_rnn_backward_input`` and ``_cudnn_rnn_backward_weight``. Without
    biases the weights' gradients are copied out of the buffer.
    """
    input, weight, _, hx, cx = layer
    turned = settings.transposes
    grad_input = like(input.transpose(0, 1)).transpose_(0, 1) if turned else like(input)
    grad_cx = like(cx) if cx is not None and settings.mode == LSTM else None
    grads: list[Tensor] = []
    if output_mask[3]:
        elements = layer.weight_elements(settings)
        if elements == sum(one.numel() for one in weight):
            parts = input.new_empty((elements,)).split([one.numel() for one in weight])
            grads = [part.view(one.shape) for part, one in zip(parts, weight, strict=True)]
        else:
            grads = [torch.empty_like(one) for one in weight]
    return grad_input, like(hx), grad_cx, grads


@_rnn.workspace("cuda")
def workspace(
    machine: Gpu, input: Tensor, weight: Sequence[Tensor], settings: RecurrentSettings
) -> Workspace:
    """A dense copy of the input, and cuDNN's workspace; states are dense already."""
    taken = temporary_space(machine, input, weight, settings)
    made = map(Made, (0, 1, 2, 4))  # the reserve follows cuDNN's workspace
    return _as_recorded(machine, _by_step(input, settings), *made, taken, ALL)


@_rnn_backward.workspace("cuda")
def backward_workspace(
    machine: Gpu,
    layer: Layer,
    output: Tensor,
    given: Gradients,
    settings: RecurrentSettings,
    output_mask: Sequence[bool],
) -> Workspace:
    """Zeros where no gradient came; then, each with cuDNN's workspace, dense copies for the input's
    gradient, and one of the input for the weights'.

    Without biases the weights' gradients are copied out of cuDNN's buffer.
    """
    input, weight, _, hx, cx = layer
    source, (grad_output, *grads) = _by_step(input, settings), given
    zeros = [dense_bytes(output) if grad_output is None else 0]
    copies = [source, dense_bytes(output) * settings.transposes]
    if grad_output is not None:
        copies[1] = _by_step(grad_output, settings)
    for grad, state in zip(grads, (hx, cx), strict=True):
        if state is not None:
            zeros.append(dense_bytes(state) if grad is None else 0)
            copies.append(0 if grad is None else contiguous_copy(grad))
    taken = temporary_space(machine, input, weight, settings, backward=True)
    requests = [*zeros, *passing(*copies, Made(0), Made(1), Made(2), taken)]
    if output_mask[3]:
        size = layer.weight_elements(settings) * input.element_size()
        is_copied = size != sum(map(dense_bytes, weight))
        requests += [source, *((size, taken, -taken, ALL) if is_copied else (ALL, taken))]
    return _as_recorded(machine, *requests)


def _as_recorded(machine: Gpu, *requests: Request) -> Workspace:
    return (told if _is_recorded(machine) else estimate)(*requests)


def _by_step(tensor: Tensor, settings: RecurrentSettings) -> int:
    """Bytes of the copy that lies step by step; a packed sequence always does."""
    return contiguous_copy(tensor.transpose(0, 1) if settings.transposes else tensor)


@operator(
    "aten::_cudnn_init_dropout_state",
    library_state=True,
    not_in_key=("dropout", "train", "dropout_seed", "dtype", "layout"),
).meta("cuda")
def state_of_dropout() -> Tensor:
    """Its size is that of the buffer that is kept."""
    return torch.empty((0,), dtype=torch.uint8, device="meta")


_LAYERS: dict[int, Any] = {RELU: torch.rnn_relu, TANH: torch.rnn_tanh, GRU: torch.gru}


def _layers(layer: Layer, settings: RecurrentSettings, random_state: Tensor) -> tuple[Any, ...]:
    """Run all layers; the forward and its backward drop the same, by the generator's state."""
    input, weights, stride, hx, cx = layer
    hidden: Any = hx if settings.mode != LSTM else (hx, cx)
    flags = settings.train, settings.bidirectional
    rest = list(weights), stride in (4, 5), settings.num_layers, settings.dropout, *flags
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
    with plainly():
        found = _layers(layer, settings, state)
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


@operator("aten::_thnn_fused_lstm_cell").values()
def lstm_cell(given: Gates, cx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both states, and the gates as the backward needs them; native/cuda/RNN.cu."""
    with plainly():
        gates = given.input_gates + given.hidden_gates
        if given.input_bias is not None and given.hidden_bias is not None:
            gates = gates + given.input_bias + given.hidden_bias
        enter, forget, cell, leave = gates.chunk(4, 1)
        cy = forget.sigmoid() * cx + enter.sigmoid() * cell.tanh()
        return leave.sigmoid() * cy.tanh(), cy, gates


@operator("aten::_thnn_fused_lstm_cell_backward_impl").values()
def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Any, ...]:
    """Gradients of the gates, of the cell state and of the biases, as a second derivative has them
    computed; native/RNN.cpp, ``_thnn_differentiable_lstm_cell_backward``.
    """
    bias = workspace.new_zeros(workspace.shape[1]) if has_bias else None
    given = workspace, torch.zeros_like(workspace), bias, bias, cx, cy
    backward = torch.ops.aten._thnn_differentiable_lstm_cell_backward.default
    gates, _, of_cell, of_bias, _ = backward(grad_hy, grad_cy, *given)
    return gates, of_cell, of_bias


@operator("aten::_thnn_fused_gru_cell").values()
def gru_cell(given: Gates, hx: Tensor) -> tuple[Tensor, Tensor]:
    """The state, and what the backward needs; native/cuda/RNN.cu."""
    input_gates, hidden_gates, input_bias, hidden_bias = given
    with plainly():
        if input_bias is not None and hidden_bias is not None:
            input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
        from_input, from_hidden = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
        reset, update = from_input[0] + from_hidden[0], from_input[1] + from_hidden[1]
        new = (from_input[2] + reset.sigmoid() * from_hidden[2]).tanh()
        workspace = torch.cat([reset, update, from_input[2], hx, from_hidden[2]], 1)
        return new + update.sigmoid() * (hx - new), workspace


@operator("aten::_thnn_fused_gru_cell_backward").values()
def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """Gradients of both products, of the state and of the biases;
    ``_thnn_differentiable_gru_cell_backward``.
    """
    size = workspace.shape[1] // 5
    summed, hx, of_hidden = workspace.split([3 * size, size, size], 1)
    hidden = torch.constant_pad_nd(of_hidden, (2 * size, 0))
    bias = workspace.new_zeros(3 * size) if has_bias else None
    backward = torch.ops.aten._thnn_differentiable_gru_cell_backward.default
    return backward(grad_hy, summed, hidden, hx, bias, bias)
