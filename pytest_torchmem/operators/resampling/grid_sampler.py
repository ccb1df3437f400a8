"""Sampling at the points of a grid, and grids of affine transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.formats import CONTIGUOUS, copied, made_like
from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.registry import Kind, aten, operator

_BILINEAR = _ZEROS = 0
_MOST_CHANNELS = 1024
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)

operator("aten::grid_sampler_2d_backward").workspace("cpu")(  # native/GridSampler.cpp
    copied(grad_output=CONTIGUOUS)
)
# Registered for every backend, and reading and writing data all the same.
operator(
    *aten("_grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward"), kind=Kind.LEAF
)


@operator("aten::grid_sampler").path("cuda")
def grid_sampler(
    call: CompositeCall,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Any:
    """CuDNN for bilinear sampling with zeros around; native/GridSampler.cpp, grid_sampler."""
    if (
        align_corners
        and (interpolation_mode, padding_mode) == (_BILINEAR, _ZEROS)
        and torch.backends.cudnn.enabled
        and input.dim() == grid.dim() == 4
        and input.size(1) <= _MOST_CHANNELS
        and all(_acceptable(tensor) for tensor in (input, grid))
    ):
        return torch.ops.aten.cudnn_grid_sampler.default(input, grid)
    return call()


def _acceptable(tensor: Tensor) -> bool:
    """``cudnn_is_acceptable`` and ``canUse32BitIndexMath``."""
    return tensor.dtype in _CUDNN_DTYPES and 0 < tensor.numel() < 2**31


sampler = operator("aten::cudnn_grid_sampler", source="native/cudnn/GridSampler.cpp")
sampler_backward = operator(
    "aten::cudnn_grid_sampler_backward", source="native/cudnn/GridSampler.cpp"
)
sampler_backward.meta("cuda")(made_like(self=CONTIGUOUS, grid=CONTIGUOUS))
sampler.workspace("cuda")(copied(self=CONTIGUOUS, grid=CONTIGUOUS))
sampler_backward.workspace("cuda")(copied(self=CONTIGUOUS, grid=CONTIGUOUS, grad_output=CONTIGUOUS))


@sampler.meta("cuda")
def sampled(input: Tensor, grid: Tensor) -> Tensor:
    """``cudnn_grid_sampler_forward``."""
    return input.new_empty((input.size(0), input.size(1), grid.size(1), grid.size(2)))


affine_grid = operator(
    "aten::cudnn_affine_grid_generator", source="native/cudnn/AffineGridGenerator.cpp"
)
affine_grid_backward = operator(
    "aten::cudnn_affine_grid_generator_backward", source="native/cudnn/AffineGridGenerator.cpp"
)
affine_grid.workspace("cuda")(copied(theta=CONTIGUOUS))
affine_grid_backward.workspace("cuda")(copied(grad=CONTIGUOUS))


@affine_grid.meta()
def grid_points(theta: Tensor, N: int, H: int, W: int) -> Tensor:
    """``cudnn_affine_grid_generator_forward``."""
    return like(theta, (N, H, W, 2))


@affine_grid_backward.meta()
def affine_gradient(grad: Tensor, N: int) -> Tensor:
    """``cudnn_affine_grid_generator_backward``."""
    return like(grad, (N, 2, 3))


@sampler.values()
def sampled_values(input: Tensor, grid: Tensor) -> Any:
    """Bilinear, with zeros around and aligned corners, which is all that cuDNN does."""
    return torch.ops.aten.grid_sampler_2d.default(input, grid, 0, 0, True)


@sampler_backward.values()
def sampled_gradients(input: Tensor, grid: Tensor, grad_output: Tensor) -> Any:
    """Gradients of the input and of the grid."""
    return torch.ops.aten.grid_sampler_2d_backward.default(
        grad_output, input, grid, 0, 0, True, [True, True]
    )


@affine_grid.values()
def grid_values(theta: Tensor, N: int, C: int, H: int, W: int) -> Any:
    """With aligned corners."""
    return torch.ops.aten.affine_grid_generator.default(theta, [N, C, H, W], True)


@affine_grid_backward.values()
def affine_gradient_values(grad: Tensor, N: int, C: int, H: int, W: int) -> Any:
    """With aligned corners."""
    return torch.ops.aten.affine_grid_generator_backward.default(grad, [N, C, H, W], True)
