"""Pooling and interpolation: copies into the suggested memory format; exact.

native/cuda/UpSample*.cu, DilatedMaxPool2d.cu, AveragePool2d.cu, Adaptive*Pooling*.cu,
GridSampler.cu and native/cudnn/GridSampler.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.profiler.devices.catalogue import Gpu
from pytest_torchmem.profiler.workspace import workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import (
    Outputs,
    contiguous_copy,
    suggested_format,
)

_BY_FORMAT = (
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_bilinear2d",
)
_DENSE = (
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "avg_pool3d",
    "max_pool3d_with_indices",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "adaptive_max_pool3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
)


@workspace(
    *(f"aten::{name}" for name in _BY_FORMAT),
    *(f"aten::{name}_backward" for name in _BY_FORMAT),
    "aten::avg_pool2d",
    "aten::max_pool2d_with_indices",
    "aten::adaptive_max_pool2d",
    "aten::_adaptive_avg_pool2d",
    device="cuda",
)
def in_its_format(
    gpu: Gpu, outputs: Outputs, input: Tensor, *arguments: object, **options: object
) -> int:
    """A copy of what is read where it is dense in no format: the input, or the gradient."""
    return contiguous_copy(input, suggested_format(input))


@workspace(
    *(f"aten::{name}" for name in _DENSE),
    *(f"aten::{name}_backward" for name in _DENSE),
    "aten::_adaptive_avg_pool3d",
    "aten::im2col",
    "aten::col2im",
    "aten::roll",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
    device="cuda",
)
def made_dense(
    gpu: Gpu, outputs: Outputs, input: Tensor, *arguments: object, **options: object
) -> int:
    """A dense copy of what is read: the input, or the gradient.

    Im2Col.cu, Col2Im.cu, MaxUnpooling.cu and TensorTransformations.cu (``roll_cuda``) too.
    """
    return contiguous_copy(input)


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


@workspace(
    "aten::avg_pool2d_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::_adaptive_avg_pool2d_backward",
    "aten::_adaptive_avg_pool3d_backward",
    device="cuda",
)
def pool_backward(
    gpu: Gpu, outputs: Tensor, grad_output: Tensor, input: Tensor, *rest: object
) -> tuple[int, ...]:
    """Gradient and input in the input's format."""
    wanted = suggested_format(input)
    return (contiguous_copy(grad_output, wanted), contiguous_copy(input, wanted))


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
