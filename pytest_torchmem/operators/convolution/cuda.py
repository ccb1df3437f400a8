"""Convolutions: copies into one memory format, and a plan that cuDNN alone knows the size of.

native/Convolution.cpp (``_select_conv_backend``, ``_convolution``, ``convolution_backward``),
native/cudnn/ConvShared.cpp and Conv_v8.cpp (``run_conv_plan``); the native kernels are
DepthwiseConv2d.cu, ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu and
NaiveDilatedConvolution.cu. What cuDNN takes is unknown: its plan's workspace has no limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import ConvolutionSettings
from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    suggested_format,
)
from pytest_torchmem.operators.libraries.cublas import blas_buffer
from pytest_torchmem.operators.reduction.cuda import sum_buffers
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, bounded, unknown
from pytest_torchmem.targets.gpus import Gpu

_CUDNN_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def memory_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the format that both are brought into; ``cudnn_conv_suggest_memory_format``."""
    if input.dtype == torch.float64 or weight.dtype == torch.float64:
        return torch.contiguous_format
    for tensor in (input, weight):
        found = suggested_format(tensor)
        if found != torch.contiguous_format:
            return found
    return torch.contiguous_format


def uses_cudnn(input: Tensor) -> bool:
    """``ConvParams::use_cudnn``, of a build with cuDNN."""
    return torch.backends.cudnn.enabled and input.dtype in _CUDNN_TYPES


def is_native_depthwise(
    input: Tensor, weight: Tensor, settings: ConvolutionSettings
) -> bool | None:
    """Whether ATen's own kernel takes a depthwise convolution; None where cuDNN may.

    ``is_depthwise``, ``use_cudnn_depthwise``: channels last goes to cuDNN, and of float16 what
    ``check_cudnn_depthwise_workload_with_filter`` accepts. One of a single dimension is taken for
    one of two.
    """
    channels = input.shape[1]
    if settings.transposed or not settings.groups == channels > 1 or weight.shape[0] % channels:
        return False
    if not uses_cudnn(input):
        return True
    if memory_format(input, weight) != torch.contiguous_format:
        return False
    flat = input.dim() < 5 and set(settings.dilation) == {1}
    return None if input.dtype == torch.float16 and flat and channels >= 32 else True


@operator("aten::convolution", "aten::_convolution").workspace("cuda")
def convolution(
    machine: Gpu,
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    settings: ConvolutionSettings,
) -> Workspace | tuple[int, ...]:
    """Copies and cuDNN's workspace; of a depthwise one with ATen's kernel copies alone, exactly.

    ``cudnn_convolution``, ``conv_depthwise2d_cuda``, ``slow_conv2d_forward``.
    """
    if not input.numel() or not outputs.numel():
        return ()
    native = is_native_depthwise(input, weight, settings)
    if native:
        return (contiguous_copy(input), contiguous_copy(weight))
    if not uses_cudnn(input):
        return _columns(machine, input, weight, outputs, settings)
    wanted = memory_format(input, weight)
    return unknown(contiguous_copy(input, wanted), contiguous_copy(weight, wanted))


@operator("aten::convolution_backward").workspace("cuda")
def convolution_backward(
    machine: Gpu,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    settings: ConvolutionSettings,
    output_mask: Sequence[bool],
) -> Workspace | tuple[int, ...]:
    """Copies and cuDNN's workspace, then the sum of the bias's gradient.

    ``cudnn_convolution_backward``, ``conv_depthwise2d_backward_cuda_out``,
    ``slow_conv2d_backward``.
    """
    if not input.numel() or not grad_output.numel():
        return ()
    bias: tuple[int, ...] = ()
    if output_mask[2]:
        dims = (0, *range(2, grad_output.dim()))
        bias = sum_buffers(
            machine, grad_output.shape, dims, grad_output.dtype, grad_output.stride()
        )
    native = is_native_depthwise(input, weight, settings)
    if native:
        copies = tuple(map(contiguous_copy, (grad_output, input, weight)))
        return max(copies, bias, key=sum)
    if not uses_cudnn(input):
        columns = _columns(machine, input, weight, grad_output, settings)
        return Workspace(max(columns.requests, bias, key=sum), columns.confidence, columns.kept)
    wanted = memory_format(input, weight)
    copies = tuple(contiguous_copy(found, wanted) for found in (grad_output, input, weight))
    return unknown(*max(copies, bias, key=sum))


def _columns(
    gpu: Gpu, input: Tensor, weight: Tensor, output: Tensor, settings: ConvolutionSettings
) -> Workspace:
    """The columns of one image, and a product; ConvolutionMM2d.cu, ``slow_conv2d_forward``.

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
    found = bounded(columns, *copies)
    return Workspace(found.requests, found.confidence, (blas_buffer(gpu),))


@operator(
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::cudnn_convolution_relu",
    "aten::cudnn_convolution_add_relu",
).workspace("cuda")
def cudnn_convolution(input: Tensor, weight: Tensor) -> Workspace:
    """Copies into one format, and cuDNN's workspace; ConvShared.cpp."""
    wanted = memory_format(input, weight)
    return unknown(contiguous_copy(input, wanted), contiguous_copy(weight, wanted))
