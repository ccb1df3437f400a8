"""The flat buffer in which cuDNN takes a layer's weights; native/cudnn/RNN.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall, Trace
from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.storages import storage_address, tensor_on

RELU, TANH, LSTM, GRU = range(4)
"""``cudnnRNNMode_t``."""
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}


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
