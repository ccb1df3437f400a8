"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import ConvolutionSettings
from pytest_torchmem.operators.convolution.cpu import uses_onednn
from pytest_torchmem.operators.geometry import laid_out, like, suggested_format
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import REFERENCE

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _convolution_shape(input: Tensor, weight: Tensor, settings: ConvolutionSettings) -> Tensor:
    dims = weight.dim() - 2
    result: Tensor = torch.ops.aten.convolution(
        input,
        weight,
        None,
        list(settings.stride),
        list(settings.padding),
        list(settings.dilation),
        settings.transposed,
        list(settings.output_padding) if settings.transposed else [0] * dims,
        settings.groups,
    )
    return result


@operator("aten::convolution").meta()
def convolution(input: Tensor, weight: Tensor, settings: ConvolutionSettings) -> Tensor:
    """Channels last where either operand is; native/ConvUtils.h,
    cudnn_conv_suggest_memory_format. ``meta`` does not know that it stands for a device.
    """
    result = _convolution_shape(input, weight, settings)
    return _as_operands(result, input, weight)


@operator("aten::convolution").meta("cpu")
def convolution_on_cpu(input: Tensor, weight: Tensor, settings: ConvolutionSettings) -> Tensor:
    """Channels last where either operand is; native/ConvUtils.h, mkldnn_conv_use_channels_last.

    ATen's own kernels of three dimensions know no channels last.
    """
    result = _convolution_shape(input, weight, settings)
    native = input.dim() == 5 and not uses_onednn(REFERENCE, input, weight, settings)
    if not native or result.numel() == 0:
        return _as_operands(result, input, weight)
    if settings.transposed and settings.groups == 1 and input.numel() > result.numel():
        return _in_storage_of(input, result)
    return laid_out(result, torch.contiguous_format)


def _as_operands(result: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """Return ``result`` in channels last where an operand suggests it, else contiguous."""
    wanted = _CHANNELS_LAST.get(input.dim())
    if wanted is None or result.numel() == 0:
        return result
    suggested = wanted in (suggested_format(input), suggested_format(weight))
    return laid_out(result, wanted if suggested else torch.contiguous_format)


def _in_storage_of(input: Tensor, result: Tensor) -> Tensor:
    """Return ``result`` on as many bytes as ``input`` has.

    native/NaiveConvolutionTranspose3d.cpp, ``slow_conv_transpose3d_cpu``, makes its output like its
    input and then changes the shape, which never makes a storage smaller.
    """
    storage = torch.empty(input.numel(), dtype=result.dtype, device=result.device)
    return storage[: result.numel()].view(result.shape)


@operator("aten::convolution_backward").meta("cpu")
def convolution_backward_on_cpu(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    settings: ConvolutionSettings,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """ATen's own kernels of three dimensions know no channels last."""
    results = torch.ops.aten.convolution_backward(
        grad_output, input, weight, bias_sizes, *settings, output_mask
    )
    if input.dim() != 5 or uses_onednn(REFERENCE, input, weight, settings):
        return tuple(results)
    return tuple(result if result is None else like(result) for result in results)


@operator("aten::cudnn_convolution").meta()
def cudnn_convolution(
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """native/cudnn/ConvShared.cpp."""
    return convolution(
        input, weight, ConvolutionSettings(stride, padding, dilation, False, [0], groups)
    )


@operator("aten::cudnn_convolution_transpose").meta()
def cudnn_convolution_transpose(
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """native/cudnn/ConvShared.cpp."""
    return convolution(
        input, weight, ConvolutionSettings(stride, padding, dilation, True, output_padding, groups)
    )


@operator("aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu").meta()
def cudnn_convolution_relu(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """native/cudnn/ConvShared.cpp."""
    return convolution(
        input, weight, ConvolutionSettings(stride, padding, dilation, False, [0], groups)
    )


@operator("aten::_slow_conv2d_forward", "aten::slow_conv3d_forward").meta()
def slow_convolution(
    input: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp."""
    settings = ConvolutionSettings(stride, padding, [1] * len(kernel_size))
    return _convolution_shape(input, weight, settings)


@operator("aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d").meta()
@operator("aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d").meta()
def dilated_convolution(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """native/NaiveDilatedConvolution.cpp, cuda/DepthwiseConv2d.cu: shapes tell the groups."""
    groups = input.shape[1] // weight.shape[1]
    settings = ConvolutionSettings(stride, padding, dilation, groups=groups)
    return _convolution_shape(input, weight, settings)


@operator("aten::slow_conv_transpose3d").meta()
def slow_convolution_transpose(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    output_padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
) -> Tensor:
    """native/NaiveConvolutionTranspose3d.cpp."""
    settings = ConvolutionSettings(stride, padding, dilation, True, output_padding)
    return _convolution_shape(input, weight, settings)


@operator("aten::_slow_conv2d_backward.output_mask").meta()
def slow_convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """native/ConvolutionMM2d.cpp."""
    results = (like(input), like(weight), like(grad_output, (weight.shape[0],)))
    return tuple(
        result if wanted else None for result, wanted in zip(results, output_mask, strict=True)
    )
