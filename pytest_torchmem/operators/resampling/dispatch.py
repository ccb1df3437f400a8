"""Sampling and pooling that look at the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import operator

_BILINEAR = _ZEROS = 0
_MOST_CHANNELS = 1024
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)


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


@operator("aten::max_pool1d").path("cuda")
def max_pool1d(call: CompositeCall) -> Any:
    """With indices, also where no gradient is needed; native/MaxPooling.cpp, max_pool1d."""
    return torch.ops.aten.max_pool1d_with_indices.default(*call.args, **call.kwargs)[0]


def _acceptable(tensor: Tensor) -> bool:
    """``cudnn_is_acceptable`` and ``canUse32BitIndexMath``."""
    return tensor.dtype in _CUDNN_DTYPES and 0 < tensor.numel() < 2**31
