"""ATen's own convolutions, by columns and matrix products.

native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveConvolutionTranspose2d.cpp and 3d.cpp,
NaiveDilatedConvolution.cpp, and their kin in native/cuda/; groups are computed one after the other
(native/Convolution.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.convolution.choice import Convolution
from pytest_torchmem.operators.geometry import beyond, contiguous_copy, dense_bytes
from pytest_torchmem.operators.libraries.cublas import blas_buffer
from pytest_torchmem.operators.workspace import Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu

_FLOAT = 4


def _columns(call: Convolution, result: Tensor) -> int:
    """Bytes of the columns of one image, and one group where groups are computed apart."""
    taps = math.prod(call.weight.shape[2:])
    if call.transposed:
        rows, pixels = call.weight.shape[1], call.input.shape[2:]
    else:
        rows, pixels = call.weight.shape[1], result.shape[2:]
        rows *= 1 if _is_apart(call) else call.groups
    return int(rows * taps * math.prod(pixels)) * call.input.element_size()


def _is_pointwise(call: Convolution) -> bool:
    """One pixel, no stride and no padding: the image is its own columns."""
    return (
        math.prod(call.weight.shape[2:]) == 1
        and all(step == 1 for step in call.stride)
        and not any(call.padding)
        and (call.groups == 1 or _is_apart(call))
    )


def _is_apart(call: Convolution) -> bool:
    """Whether groups are computed one after the other; a kernel for volumes knows of groups."""
    return call.groups > 1 and (call.dims < 3 or call.transposed or _is_dilated(call))


def _is_dilated(call: Convolution) -> bool:
    return any(gap != 1 for gap in call.dilation)


def forward(call: Convolution, output: Tensor) -> int:
    """Bytes of a forward beyond its output: contiguous operands, and columns of the whole batch,
    of one image where volumes are transposed or where kernels are dilated.
    """
    columns, batch, layout = _columns(call, output), call.input.shape[0], call.memory_format
    copies = contiguous_copy(call.input, layout) + contiguous_copy(call.weight, layout)
    if call.transposed:
        columns *= batch if call.dims < 3 else 1
        if call.dims == 3:
            if call.bias:
                columns += math.prod(output.shape[2:]) * output.element_size()
            groups = call.groups if _is_apart(call) else 1
            columns = max(columns, dense_bytes(call.input) // groups)  # until the output is there
    elif _is_pointwise(call) and not _is_dilated(call):
        columns = 0
    elif not _is_dilated(call):
        columns *= batch
    if _is_apart(call):
        apart = dense_bytes(call.input) // call.groups if batch > 1 else 0
        return copies + max(dense_bytes(output), apart + columns)
    return copies + columns


def _summed_bias(call: Convolution, grad_output: Tensor) -> int:
    """Bytes of the sum of one group's gradient, in float where it goes over several images, before
    the gradient of its weight is made.
    """
    apart = call.transposed and call.dims < 3 and grad_output.shape[0] > 1
    if not apart or grad_output.element_size() >= _FLOAT:
        return 0
    elements = grad_output.numel() + grad_output.shape[1]
    return (elements * _FLOAT - dense_bytes(call.weight)) // call.groups


def backward(call: Convolution, grad_output: Tensor, returned: int, mask: Sequence[bool]) -> int:
    """Bytes of a backward beyond the gradients: the input's gradient from its columns, then the
    weight's from the input's columns.
    """
    columns, batch, layout = _columns(call, grad_output), call.input.shape[0], call.memory_format
    gradient = contiguous_copy(grad_output, layout)
    input, weight = contiguous_copy(call.input, layout), contiguous_copy(call.weight, layout)
    dilated = _is_dilated(call) and not call.transposed
    pointwise = _is_pointwise(call) and not _is_dilated(call)
    summed = grad_output.shape[1] * grad_output.element_size() if mask[2] else 0
    bias = summed if dilated else 0
    together = dilated or (call.dims < 3 and not call.transposed)
    volumes_turned = call.transposed and call.dims == 3
    if not (mask[0] or mask[1] or volumes_turned or _is_apart(call)):
        # The others sum the gradient as it is.
        return weight + (input + gradient + bias if dilated else 0)
    if not call.transposed and not dilated:
        columns = 0 if pointwise and call.dims < 3 else columns * batch
    elif call.transposed and pointwise:
        columns = 0
    if _is_apart(call):
        apart = gradient // call.groups
        operands = (dense_bytes(grad_output) + dense_bytes(call.input)) // call.groups
        if layout != torch.contiguous_format:
            apart += operands
        elif batch > 1:
            apart = operands
        taken = max(columns, _summed_bias(call, grad_output) if mask[2] else 0)
        return input + weight + max(returned, apart + taken)
    if together:
        if dilated or mask[1]:
            return gradient + columns + bias + weight + input
        # Columns of the input's gradient are of ``new[]``, not of the allocator; the bias's
        # gradient is summed when the kernel is done.
        return weight + max(0, gradient - summed)
    first = dense_bytes(call.input) if mask[0] else 0
    from_input = 0 if pointwise and not call.transposed else columns
    requests = [weight + gradient + (input if volumes_turned else 0)]
    if mask[0]:
        requests += [first + columns, -columns]
    if mask[1] or (mask[2] and volumes_turned):
        requests += [returned - first + (0 if volumes_turned else input) + from_input]
    elif mask[2]:
        requests += [-gradient, returned - first]
    return beyond(returned, requests)


def on_cuda(
    gpu: Gpu,
    input: Tensor,
    weight: Tensor,
    output: Tensor,
    settings: ConvolutionSettings,
    line: int,
    bias: tuple[int, ...] = (),
) -> Workspace:
    """The columns of one image, and a product, or the sum of the bias's gradient; native/cuda/
    ConvolutionMM2d.cu.

    A limit: kernels of one pixel need none, and groups are convolved one after the other, each with
    its own part of the input, made dense.
    """
    groups, transposed = settings.groups, settings.transposed
    taps = math.prod(weight.shape[2:])
    wide = (weight.shape[1] if transposed else input.shape[1] // groups) * taps
    pixels = math.prod((input if transposed else output).shape[2:])
    columns = wide * pixels * input.element_size()
    parts = input.numel() // groups * input.element_size() if groups > 1 else 0
    copies = (contiguous_copy(input), contiguous_copy(weight), parts)
    found = bounded(line, *max((columns, *copies), bias, key=sum))
    return Workspace(found.requests, found.confidence, (blas_buffer(gpu),))
