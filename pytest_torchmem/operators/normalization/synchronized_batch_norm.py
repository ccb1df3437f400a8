"""The parts of batch normalization over several processes; native/cuda/Normalization.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.registry import operator


@operator("aten::batch_norm_stats", "aten::batch_norm_update_stats").meta()
def batch_norm_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu: float for 16-bit inputs."""
    dtype = torch.float32 if input.dtype.itemsize == 2 else input.dtype
    shape = (input.shape[1],)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


@operator("aten::batch_norm_elemt").meta()
def batch_norm_apply(input: Tensor) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)


@operator("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts").meta()
def batch_norm_gather(mean: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu."""
    return like(mean, mean.shape[1:]), like(mean, mean.shape[1:])


@operator("aten::batch_norm_backward_reduce").meta()
def batch_norm_backward_reduce(
    mean: Tensor, weight: Tensor | None, input_g: bool, weight_g: bool, bias_g: bool
) -> tuple[Tensor | None, ...]:
    """native/cuda/Normalization.cu."""
    parameter = mean if weight is None else weight
    return (
        like(mean) if input_g else None,
        like(mean) if input_g else None,
        like(parameter) if weight_g else None,
        like(parameter) if bias_g else None,
    )


@operator("aten::batch_norm_backward_elemt").meta()
def batch_norm_backward_apply(input: Tensor) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)
