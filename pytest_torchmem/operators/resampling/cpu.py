"""Interpolation on the CPU; native/cpu/UpSampleKernel.cpp and UpSampleMoreKernel.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, is_channels_last
from pytest_torchmem.operators.registry import operator

_INDEX = 8
"""Bytes of an index in a table."""


def _tables(output: Tensor, points: int) -> int:
    """For every position along every dimension: the indices of its points and their weights;
    upsample_generic_Nd_kernel_impl.
    """
    return points * (_INDEX + output.element_size()) * sum(output.shape[2:])


def _through_channels_last(output: Tensor, input: Tensor) -> bool:
    """``_use_vectorized_kernel_cond_2d`` and ``_3d``: channels last, or small images."""
    if is_channels_last(input) and input.shape[1] > 3:
        return True
    return input.dim() == 4 and output.shape[-1] + output.shape[-2] <= 128


def _upsample(points: int) -> Callable[..., int]:
    def upsample(outputs: Tensor, input: Tensor) -> int:
        if input.numel() == 0:
            return 0
        if input.dim() >= 4 and _through_channels_last(outputs, input):
            layout = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
            return contiguous_copy(input, layout) + contiguous_copy(outputs, layout)
        return _tables(outputs, points)

    upsample.__doc__ = "Tables of indices and weights, or channels-last copies of both sides."
    return upsample


operator(
    "aten::upsample_nearest1d",
    "aten::_upsample_nearest_exact1d",
    "aten::upsample_nearest2d",
    "aten::_upsample_nearest_exact2d",
    "aten::upsample_nearest3d",
    "aten::_upsample_nearest_exact3d",
).workspace("cpu")(_upsample(1))

operator(
    "aten::upsample_linear1d",
    "aten::upsample_bilinear2d",
    "aten::upsample_trilinear3d",
).workspace("cpu")(_upsample(2))


@operator("aten::upsample_bicubic2d").workspace("cpu")
def upsample_bicubic(outputs: Tensor, input: Tensor) -> int:
    """Tables of four points a position, whatever the layout."""
    return _tables(outputs, 4) if input.numel() else 0


def _scale(source: int, target: int, align_corners: bool, given: float | None) -> float:
    """``area_pixel_compute_scale``; native/UpSample.h."""
    if align_corners:
        return (source - 1) / (target - 1) if target > 1 else 0.0
    return 1 / given if given else source / target


def _antialias_table(scale: float, target: int, points: int, element_size: int) -> int:
    """``_compute_indices_min_size_weights_aa``: four columns of indices, and weights."""
    support = points * 0.5 * max(scale, 1.0)
    return target * (4 * _INDEX + (math.ceil(support) * 2 + 1) * element_size)


def _antialias(points: int) -> Callable[..., int]:
    def upsample(
        outputs: Tensor,
        input: Tensor,
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> int:
        batch, channels, height, width = input.shape
        rows, columns = outputs.shape[-2:]
        size = input.element_size()
        down_by = _scale(height, rows, align_corners, scales_h)
        across_by = _scale(width, columns, align_corners, scales_w)
        across = _antialias_table(across_by, columns, points, size) if columns != width else 0
        down = _antialias_table(down_by, rows, points, size) if rows != height else 0
        if across and down:
            return batch * channels * height * columns * size + max(across, down)
        return across + down

    upsample.__doc__ = "The image after the first pass, and the tables of one pass."
    return upsample


operator("aten::_upsample_bilinear2d_aa").workspace("cpu")(_antialias(2))
operator("aten::_upsample_bicubic2d_aa").workspace("cpu")(_antialias(4))
