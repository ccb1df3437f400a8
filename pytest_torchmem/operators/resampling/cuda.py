"""Pooling and interpolation: copies into the suggested memory format; exact.

native/cuda/UpSample*.cu, DilatedMaxPool2d.cu, AveragePool2d.cu, Adaptive*Pooling*.cu,
GridSampler.cu and native/cudnn/GridSampler.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    dense_bytes,
    suggested_format,
)
from pytest_torchmem.operators.registry import operator

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


@operator(
    "aten::avg_pool2d",
    "aten::max_pool2d_with_indices",
    "aten::max_pool3d_with_indices",
    "aten::_adaptive_avg_pool2d",
).workspace("cuda")
def in_its_format(input: Tensor) -> int:
    """A copy of an input that is dense in no format."""
    return contiguous_copy(input, suggested_format(input))


@operator(
    *(f"aten::{name}" for name in _DENSE),
    *(f"aten::{name}_backward" for name in _DENSE),
    "aten::upsample_linear1d_backward",
    "aten::upsample_bicubic2d_backward",
    "aten::upsample_nearest3d_backward",
    "aten::_upsample_nearest_exact3d_backward",
    "aten::_adaptive_avg_pool3d",
).workspace("cuda")
def made_dense(tensors: list[Tensor]) -> int:
    """A dense copy of what is read: the input, or the gradient."""
    return contiguous_copy(tensors[0])


@operator("aten::roll").workspace("cuda")
def roll(input: Tensor, dims: Sequence[int] = ()) -> int:
    """A dense copy; of several dimensions one after the other, the result of each but the last.

    TensorTransformations.cu, ``roll_cuda``; native/TensorTransformations.h, ``roll_common``.
    """
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 1 else contiguous_copy(input)


@operator(
    "aten::upsample_nearest3d",
    "aten::_upsample_nearest_exact3d",
    "aten::upsample_trilinear3d_backward",
).workspace("cuda")
def made_dense_and_copied(outputs: Tensor, tensors: list[Tensor]) -> tuple[int, ...]:
    """A dense copy of what is read, and a dense result before it is copied to where it belongs.

    UpSampleNearest3d.cu, ``upsample_nearest3d_out_cuda_template``; UpSampleTrilinear3d.cu,
    ``upsample_trilinear3d_backward_out_cuda_template``.
    """
    return (contiguous_copy(outputs), contiguous_copy(tensors[0]))


@operator("aten::max_unpool2d", "aten::max_unpool3d").workspace("cuda")
def max_unpool(input: Tensor, indices: Tensor) -> tuple[int, ...]:
    """Dense copies of values and indices; MaxUnpooling.cu."""
    return (contiguous_copy(input), contiguous_copy(indices))


@operator(*_NEAREST_2D, *(f"{name}_backward" for name in _NEAREST_2D)).workspace("cuda")
def nearest(outputs: Tensor, tensors: list[Tensor]) -> tuple[int, ...]:
    """A copy of what is read; UpSampleNearest2d.cu."""
    return _interpolated(outputs, tensors[0], 4)


@operator("aten::upsample_bilinear2d").workspace("cuda")
def bilinear(outputs: Tensor, input: Tensor) -> int:
    """A copy where channels last are written; else the input is read as it lies.

    UpSampleBilinear2d.cu, ``upsample_bilinear2d_out_cuda_template``.
    """
    if not _by_channel_last(outputs, input, 16):
        return 0
    return contiguous_copy(input, torch.channels_last)


@operator("aten::upsample_bilinear2d_backward").workspace("cuda")
def bilinear_backward(outputs: Tensor, grad_output: Tensor) -> tuple[int, ...]:
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


@operator("aten::adaptive_max_pool2d").workspace("cuda")
def adaptive_max_pool2d(outputs: tuple[Tensor, Tensor], input: Tensor) -> tuple[int, ...]:
    """A dense input, and dense results before they are copied to where they belong.

    AdaptiveMaxPooling2d.cu, ``adaptive_max_pool2d_out_cuda``.
    """
    copy = contiguous_copy(input) if input.dim() == 4 else 0
    return (copy, *map(contiguous_copy, outputs))


@operator("aten::adaptive_max_pool2d_backward").workspace("cuda")
def adaptive_max_pool2d_backward(
    outputs: Tensor, grad_output: Tensor, indices: Tensor
) -> tuple[int, ...]:
    """Dense gradients and indices; ``adaptive_max_pool2d_backward_out_cuda``."""
    return tuple(map(contiguous_copy, (grad_output, indices, outputs)))


@operator("aten::max_pool3d_with_indices_backward").workspace("cuda")
def max_pool3d_backward(grad_output: Tensor, input: Tensor, indices: Tensor) -> tuple[int, ...]:
    """Gradient and indices in the input's format; DilatedMaxPool3d.cu."""
    wanted = suggested_format(input)
    return tuple(contiguous_copy(found, wanted) for found in (grad_output, indices))


@operator("aten::max_pool2d_with_indices_backward").workspace("cuda")
def max_pool2d_backward(grad_output: Tensor, input: Tensor, indices: Tensor) -> tuple[int, ...]:
    """Gradient, input and indices in the input's format; DilatedMaxPool2d.cu."""
    wanted = suggested_format(input)
    return tuple(contiguous_copy(found, wanted) for found in (grad_output, input, indices))


@operator("aten::avg_pool2d_backward").workspace("cuda")
def avg_pool2d_backward(grad_output: Tensor, input: Tensor) -> tuple[int, ...]:
    """Gradient and input in the input's format; AveragePool2d.cu."""
    wanted = suggested_format(input)
    return (contiguous_copy(grad_output, wanted), contiguous_copy(input, wanted))


@operator("aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward").workspace(
    "cuda"
)
def adaptive_average_backward(grad_output: Tensor, input: Tensor) -> int:
    """A dense gradient, but for images with channels last, of which it is read as it lies.

    AdaptiveAveragePooling.cu and AdaptiveAveragePooling3d.cu.
    """
    last = suggested_format(input) == torch.channels_last
    return 0 if last else contiguous_copy(grad_output)


@operator(
    "aten::grid_sampler_2d",
    "aten::grid_sampler_3d",
    "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward",
).workspace("cuda")
def grid_sampler() -> int:
    """Nothing: tensors are read as they lie; GridSampler.cu."""
    return 0


@operator(
    "aten::cudnn_grid_sampler",
    "aten::cudnn_grid_sampler_backward",
    "aten::cudnn_affine_grid_generator",
    "aten::cudnn_affine_grid_generator_backward",
).workspace("cuda")
def cudnn_grid_sampler(tensors: list[Tensor]) -> tuple[int, ...]:
    """Dense copies; native/cudnn/GridSampler.cpp."""
    return tuple(map(contiguous_copy, tensors))


@operator("aten::unfold_backward").workspace("cuda")
def unfold_backward(input_sizes: Sequence[int], dim: int, size: int, step: int) -> int:
    """An index of every position where windows overlap; native/UnfoldBackward.h."""
    if step >= size:
        return 0
    return torch.int64.itemsize * (input_sizes[dim] if input_sizes else 1)
