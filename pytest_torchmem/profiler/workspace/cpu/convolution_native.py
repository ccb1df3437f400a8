"""ATen's own convolutions on the CPU, by columns and matrix products.

native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveConvolutionTranspose2d.cpp and 3d.cpp,
NaiveDilatedConvolution.cpp; groups are computed one after the other (native/Convolution.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pytest_torchmem.profiler.workspace.cpu.geometry import (
    beyond,
    contiguous_copy,
    dense_bytes,
)

if TYPE_CHECKING:
    from pytest_torchmem.profiler.workspace.cpu.convolution import Convolution


def _columns(call: Convolution, result: Tensor) -> int:
    """Bytes of the columns of one image and one group."""
    taps = math.prod(call.weight.shape[2:])
    if call.transposed:
        rows, pixels = call.weight.shape[1], call.input.shape[2:]
    else:
        rows, pixels = call.weight.shape[1], result.shape[2:]
    return int(rows * taps * math.prod(pixels)) * call.input.element_size()


def _is_pointwise(call: Convolution) -> bool:
    """One pixel, no stride and no padding: the image is its own columns."""
    return (
        math.prod(call.weight.shape[2:]) == 1
        and all(step == 1 for step in call.stride)
        and not any(call.padding)
    )


def _is_dilated(call: Convolution) -> bool:
    return any(gap != 1 for gap in call.dilation)


def _format(call: Convolution) -> torch.memory_format:
    """The layout that operands are brought into: volumes are never channels last."""
    return call.memory_format if call.dims == 2 else torch.contiguous_format


def native(call: Convolution, output: Tensor) -> int:
    """Bytes of a forward beyond its output: contiguous operands, and columns of the whole batch,
    of one image where the convolution is transposed or dilated.
    """
    columns = _columns(call, output)
    layout = _format(call)
    copies = contiguous_copy(call.input, layout) + contiguous_copy(call.weight, layout)
    if call.groups > 1:
        copies += dense_bytes(output)
    if call.transposed:
        if call.dims < 3:
            return copies + columns
        ones = math.prod(output.shape[2:]) * output.element_size() if call.bias else 0
        return copies + columns + ones
    if _is_dilated(call):
        return copies + columns
    if _is_pointwise(call) and call.dims < 3:
        return copies
    return copies + call.input.shape[0] * columns


def native_backward(
    call: Convolution, grad_output: Tensor, returned: int, mask: Sequence[bool]
) -> int:
    """Bytes of a backward beyond the gradients: the input's gradient from its columns, then the
    weight's from the input's columns.
    """
    columns, layout = _columns(call, grad_output), _format(call)
    gradient = contiguous_copy(grad_output, layout)
    input, weight = contiguous_copy(call.input, layout), contiguous_copy(call.weight, layout)
    if _is_pointwise(call) and call.dims < 3:
        columns = 0
    elif not call.transposed and not _is_dilated(call):
        columns *= call.input.shape[0]
    together = call.dims < 3 and not call.transposed and not _is_dilated(call)
    if call.groups > 1:
        return gradient + input + weight + columns
    if together:
        return gradient + columns + weight + (input if mask[1] else 0)
    first = dense_bytes(call.input) if mask[0] else 0
    rest = returned - first
    requests = [gradient]
    if mask[0]:
        requests += [weight + first + columns, -columns - weight]
    if mask[1] or mask[2]:
        requests += [rest + input + columns]
    return beyond(returned, requests)
