"""Pooling and interpolation: copies into the suggested memory format; exact.

native/cuda/UpSample*.cu, DilatedMaxPool2d.cu, AveragePool2d.cu, Adaptive*Pooling*.cu,
GridSampler.cu and native/cudnn/GridSampler.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    Outputs,
    contiguous_copy,
    dense_bytes,
    suggested_format,
)
from pytest_torchmem.operators.workspace import workspace
from pytest_torchmem.targets.gpus import Gpu

_NEAREST_2D = ("aten::upsample_nearest2d", "aten::_upsample_nearest_exact2d")
_DENSE = (
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "avg_pool3d",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "adaptive_max_pool3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


@workspace(
    "aten::avg_pool2d",
    "aten::max_pool2d_with_indices",
    "aten::max_pool3d_with_indices",
    "aten::_adaptive_avg_pool2d",
    device="cuda",
)
def in_its_format(
    gpu: Gpu, outputs: Outputs, input: Tensor, *arguments: object, **options: object
) -> int:
    """A copy of an input that is dense in no format."""
    return contiguous_copy(input, suggested_format(input))


@workspace(
    *(f"aten::{name}" for name in _DENSE),
    *(f"aten::{name}_backward" for name in _DENSE),
    "aten::upsample_linear1d_backward",
    "aten::upsample_bicubic2d_backward",
    "aten::upsample_nearest3d_backward",
    "aten::_upsample_nearest_exact3d_backward",
    "aten::_adaptive_avg_pool3d",
    device="cuda",
)
def made_dense(
    gpu: Gpu, outputs: Outputs, input: Tensor, *arguments: object, **options: object
) -> int:
    """A dense copy of what is read: the input, or the gradient."""
    return contiguous_copy(input)


@workspace("aten::roll", device="cuda")
def roll(
    gpu: Gpu, outputs: Tensor, input: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> int:
    """A dense copy; of several dimensions one after the other, the result of each but the last.

    TensorTransformations.cu, ``roll_cuda``; native/TensorTransformations.h, ``roll_common``.
    """
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 1 else contiguous_copy(input)


@workspace(
    "aten::upsample_nearest3d",
    "aten::_upsample_nearest_exact3d",
    "aten::upsample_trilinear3d_backward",
    device="cuda",
)
def made_dense_and_copied(
    gpu: Gpu, outputs: Tensor, input: Tensor, *arguments: object, **options: object
) -> tuple[int, ...]:
    """A dense copy of what is read, and a dense result before it is copied to where it belongs.

    UpSampleNearest3d.cu, ``upsample_nearest3d_out_cuda_template``; UpSampleTrilinear3d.cu,
    ``upsample_trilinear3d_backward_out_cuda_template``.
    """
    return (contiguous_copy(outputs), contiguous_copy(input))


@workspace("aten::max_unpool2d", "aten::max_unpool3d", device="cuda")
def max_unpool(
    gpu: Gpu, outputs: Tensor, input: Tensor, indices: Tensor, *arguments: object
) -> tuple[int, ...]:
    """Dense copies of values and indices; MaxUnpooling.cu."""
    return (contiguous_copy(input), contiguous_copy(indices))


@workspace(*_NEAREST_2D, *(f"{name}_backward" for name in _NEAREST_2D), device="cuda")
def nearest(
    gpu: Gpu, outputs: Tensor, input: Tensor, *arguments: object, **options: object
) -> tuple[int, ...]:
    """A copy of what is read; UpSampleNearest2d.cu."""
    return _interpolated(outputs, input, 4)


@workspace("aten::upsample_bilinear2d", device="cuda")
def bilinear(
    gpu: Gpu, outputs: Tensor, input: Tensor, *arguments: object, **options: object
) -> int:
    """A copy where channels last are written; else the input is read as it lies.

    UpSampleBilinear2d.cu, ``upsample_bilinear2d_out_cuda_template``.
    """
    if not _by_channel_last(outputs, input, 16):
        return 0
    return contiguous_copy(input, torch.channels_last)


@workspace("aten::upsample_bilinear2d_backward", device="cuda")
def bilinear_backward(
    gpu: Gpu, outputs: Tensor, grad_output: Tensor, *arguments: object, **options: object
) -> tuple[int, ...]:
    """A copy of the gradient; ``upsample_bilinear2d_backward_out_cuda_template``."""
    return _interpolated(outputs, grad_output, 4)


def _interpolated(outputs: Tensor, input: Tensor, least_channels: int) -> tuple[int, ...]:
    """A copy of what is read, and a dense result before it is copied to where it belongs."""
    if outputs.shape == input.shape:
        return ()
    if _by_channel_last(outputs, input, least_channels):
        return (contiguous_copy(input, torch.channels_last),)
    return (contiguous_copy(outputs), contiguous_copy(input))


def _by_channel_last(outputs: Tensor, input: Tensor, least_channels: int) -> bool:
    """Whether a kernel for channels last is worth its while."""
    return (
        suggested_format(input) == torch.channels_last
        and input.shape[1] >= least_channels
        and outputs.is_contiguous(memory_format=torch.channels_last)
        and outputs.shape != input.shape
    )


@workspace("aten::adaptive_max_pool2d", device="cuda")
def adaptive_max_pool2d(
    gpu: Gpu, outputs: tuple[Tensor, Tensor], input: Tensor, *rest: object
) -> tuple[int, ...]:
    """A dense input, and dense results before they are copied to where they belong.

    AdaptiveMaxPooling2d.cu, ``adaptive_max_pool2d_out_cuda``.
    """
    copy = contiguous_copy(input) if input.dim() == 4 else 0
    return (copy, *map(contiguous_copy, outputs))


@workspace("aten::adaptive_max_pool2d_backward", device="cuda")
def adaptive_max_pool2d_backward(
    gpu: Gpu, outputs: Tensor, grad_output: Tensor, input: Tensor, indices: Tensor
) -> tuple[int, ...]:
    """Dense gradients and indices; ``adaptive_max_pool2d_backward_out_cuda``."""
    return tuple(map(contiguous_copy, (grad_output, indices, outputs)))


@workspace("aten::max_pool3d_with_indices_backward", device="cuda")
def max_pool3d_backward(
    gpu: Gpu,
    outputs: Tensor,
    grad_output: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> tuple[int, ...]:
    """Gradient and indices in the input's format; DilatedMaxPool3d.cu."""
    wanted = suggested_format(input)
    return tuple(contiguous_copy(found, wanted) for found in (grad_output, indices))


@workspace("aten::max_pool2d_with_indices_backward", device="cuda")
def max_pool2d_backward(
    gpu: Gpu,
    outputs: Tensor,
    grad_output: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> tuple[int, ...]:
    """Gradient, input and indices in the input's format; DilatedMaxPool2d.cu."""
    wanted = suggested_format(input)
    return tuple(contiguous_copy(found, wanted) for found in (grad_output, input, indices))


@workspace("aten::avg_pool2d_backward", device="cuda")
def avg_pool2d_backward(
    gpu: Gpu, outputs: Tensor, grad_output: Tensor, input: Tensor, *rest: object
) -> tuple[int, ...]:
    """Gradient and input in the input's format; AveragePool2d.cu."""
    wanted = suggested_format(input)
    return (contiguous_copy(grad_output, wanted), contiguous_copy(input, wanted))


@workspace(
    "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward", device="cuda"
)
def adaptive_average_backward(
    gpu: Gpu, outputs: Tensor, grad_output: Tensor, input: Tensor, *rest: object
) -> int:
    """A dense gradient, but for images with channels last, of which it is read as it lies.

    AdaptiveAveragePooling.cu and AdaptiveAveragePooling3d.cu.
    """
    last = suggested_format(input) == torch.channels_last
    return 0 if last else contiguous_copy(grad_output)


@workspace(
    "aten::grid_sampler_2d",
    "aten::grid_sampler_3d",
    "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward",
    device="cuda",
)
def grid_sampler(gpu: Gpu, outputs: Outputs, *arguments: object) -> int:
    """Nothing: tensors are read as they lie; GridSampler.cu."""
    return 0


@workspace(
    "aten::cudnn_grid_sampler",
    "aten::cudnn_grid_sampler_backward",
    "aten::cudnn_affine_grid_generator",
    "aten::cudnn_affine_grid_generator_backward",
    device="cuda",
)
def cudnn_grid_sampler(gpu: Gpu, outputs: Outputs, *arguments: object) -> tuple[int, ...]:
    """Dense copies; native/cudnn/GridSampler.cpp."""
    return tuple(contiguous_copy(found) for found in arguments if isinstance(found, Tensor))


@workspace("aten::unfold_backward", device="cuda")
def unfold_backward(
    gpu: Gpu,
    outputs: Tensor,
    grad: Tensor,
    input_sizes: Sequence[int],
    dim: int,
    size: int,
    step: int,
) -> int:
    """An index of every position where windows overlap; native/UnfoldBackward.h."""
    if step >= size:
        return 0
    return torch.int64.itemsize * (input_sizes[dim] if input_sizes else 1)
