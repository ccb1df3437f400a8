"""What cuDNN takes for a recurrent layer: bounds of ``cudnnGetRNNTempSpaceSizes``.

cuDNN tells these sizes on a GPU alone. Its documentation says what they depend on: the network,
whether it is trained, the longest sequence and the batch, so a packed sequence counts as if it were
padded. The formulas give the published sizes to the byte (tests/operators/test_recurrent_space.py):
LSTM and GRU of cuDNN 6 or 7 (pytorch#2895, whose batch and steps follow from two of its four
sizes), an LSTM of cuDNN 9 (jax, tests/rnn_test.py, ``test_struct_encoding_determinism``). What
these do not cover is assumed at its largest: other cells, float32 states of a layer in half
precision, projections, both directions, and a forward without training, which can need no more than
one with it.

cuDNN's recurrent layers: one call for all layers and steps.

native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward_input``, ``_cudnn_rnn_backward_weight``)
asks ``cudnnGetRNNTempSpaceSizes`` for the workspace and for the reserve, an output that the
backward needs; ``temporary_space.py`` bounds its answers. Weights lie in one flat buffer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall, RecurrentSettings, Trace
from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes, like
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Buffer, Workspace, bounded
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.torch_private.tensors.storages import storage_address, tensor_on

RELU, TANH, LSTM, GRU = range(4)
"""``cudnnRNNMode_t``."""
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
#: What is kept for every step of a layer, in hidden sizes.
_KEPT = {RELU: 2, TANH: 2, LSTM: 5, GRU: 6}
_ALIGNED = 64
"""Bytes: each part begins at a multiple of this."""
_PRODUCTS = 8 * 1024**2
"""Bytes for cuBLAS, which cuDNN 6 and 7 did not take."""


def extent(input: Tensor, settings: RecurrentSettings) -> tuple[int, int]:
    """Return the longest sequence and the largest batch."""
    if settings.batch_sizes:
        return len(settings.batch_sizes), settings.batch_sizes[0]
    steps, batch = (input.transpose(0, 1) if settings.transposes else input).shape[:2]
    return steps, batch


def reserve(input: Tensor, settings: RecurrentSettings) -> int:
    """Return what the backward needs of a training forward, at most; in bytes."""
    steps, batch = extent(input, settings)
    size, directions = input.element_size(), settings.directions
    kept = _KEPT[settings.mode] + bool(settings.proj_size)
    if settings.mode == LSTM and size < 4:
        kept += 1
    cells = _part(steps * batch * settings.hidden_size * size)
    between = _part(steps * batch * _output_size(settings) * size)
    masks = 2 if settings.dropout else 1
    return directions * (
        settings.num_layers * kept * cells + (settings.num_layers - 1) * masks * between
    )


def temporary_space(input: Tensor, weight: Sequence[Tensor], settings: RecurrentSettings) -> int:
    """Return what every call takes while it runs, at most; in bytes.

    Weights in another order, and for each layer and direction three times the gates, less one.
    """
    steps, batch = extent(input, settings)
    size, layers = input.element_size(), settings.num_layers * settings.directions
    of_step = _part(batch * settings.hidden_size * max(size, 4))
    taken = _PRODUCTS + layers * (3 * GATES[settings.mode] - 1) * of_step
    taken += sum(_part(one.numel() * size) for one in weight if one.dim() > 1)
    if settings.proj_size:
        taken += layers * of_step
    if settings.directions > 1:
        widest = max(input.shape[-1], 2 * _output_size(settings))
        taken += 2 * _part(steps * batch * widest * size)
    return taken if settings.train else taken + reserve(input, settings)


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

    Weights that were there before the step have been through ``Module.to``, which flattens them.
    """
    first = params[0]
    address = storage_address(first)
    if all(storage_address(param) == address for param in params[1:]):
        with trace.working():
            storage = first.untyped_storage()
            return tensor_on(storage, first.dtype, (elements,), (1,), 0)
    return first.detach() if trace.made_before_step(first) else None


def views_of(trace: Trace, buffer: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
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
    elements = weight_elements(weight_arr, weight_stride0, mode, hidden_size)
    buffer = torch.zeros(elements, dtype=weight_arr[0].dtype, device=weight_arr[0].device)
    views = views_of(call.trace, buffer, weight_arr)
    for weight, view in zip(weight_arr, views, strict=True):
        view.copy_(weight)
        weight.set_(view)  # type: ignore[call-overload]
    return buffer


DROPOUT_STATE = Buffer("cuDNN dropout", 2 * 1024**2, process=True, confidence=Confidence.UNKNOWN)
"""The state of random numbers that a process keeps; cudnn/RNN.cpp, ``get_dropout_state``: «slightly
over 2MB». How much exactly, ``cudnnDropoutGetStatesSize`` alone knows."""

_rnn = operator("aten::_cudnn_rnn", library_output=3, not_in_key=("dropout_state",))
_rnn_backward = operator("aten::_cudnn_rnn_backward", not_in_key=("dropout_state", "reserve"))
_dropout_state = operator(
    "aten::_cudnn_init_dropout_state",
    library_state=True,
    not_in_key=("dropout", "train", "dropout_seed", "dtype", "layout"),
)


class Layer(NamedTuple):
    """Tensors of ``_cudnn_rnn`` and its backward, by the names of the schemas' arguments."""

    input: Tensor
    weight: Sequence[Tensor]
    weight_stride0: int
    hx: Tensor
    cx: Tensor | None

    def weight_elements(self, settings: RecurrentSettings) -> int:
        """Return the elements of the weight buffer."""
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
    out = settings.proj_size or hidden
    steps, batch = extent(input, settings)
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
            buffer, offset = input.new_empty((elements,)), 0
            for one in weight:
                grads.append(buffer[offset : offset + one.numel()].view(one.shape))
                offset += one.numel()
        else:
            grads = [torch.empty_like(one) for one in weight]
    return grad_input, like(hx), grad_cx, grads


@_rnn.workspace("cuda")
def workspace(input: Tensor, weight: Sequence[Tensor], settings: RecurrentSettings) -> Workspace:
    """A dense copy of the input, and cuDNN's workspace; states are dense already."""
    taken = temporary_space(input, weight, settings)
    return bounded(_by_step(input, settings), taken)


@_rnn_backward.workspace("cuda")
def backward_workspace(
    layer: Layer,
    output: Tensor,
    given: Gradients,
    settings: RecurrentSettings,
    output_mask: Sequence[bool],
) -> Workspace:
    """Dense copies, states' gradients where none came, and cuDNN's; then the weights' gradients.

    The buffer of these is made when the copies for the input's gradient are gone.
    """
    input, weight, _, hx, cx = layer
    grad_output, grad_hy, grad_cy = given
    source = _by_step(input, settings)
    gradient = dense_bytes(output) if grad_output is None else _by_step(grad_output, settings)
    states = dense_bytes(hx) if grad_hy is None else contiguous_copy(grad_hy)
    if cx is not None:
        states += dense_bytes(cx) if grad_cy is None else contiguous_copy(grad_cy)
    later = sum(map(dense_bytes, weight)) if output_mask[3] else 0
    copies = max(source + gradient + states - later, source)
    return bounded(copies, temporary_space(input, weight, settings))


def _by_step(tensor: Tensor, settings: RecurrentSettings) -> int:
    """Bytes of the copy that lies step by step; a packed sequence always does."""
    return contiguous_copy(tensor.transpose(0, 1) if settings.transposes else tensor)


@_dropout_state.meta("cuda")
def state_of_dropout() -> Tensor:
    """8 bytes for every thread that a GPU runs at once."""
    return torch.empty((0,), dtype=torch.uint8, device="meta")


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
        views = views_of(trace, buffer, weight)
        for view, one in zip(views, weight, strict=True):
            view.copy_(one)
        weight = views
    return torch.ops.aten._cudnn_rnn.default(
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
