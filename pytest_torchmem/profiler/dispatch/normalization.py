"""Normalisation: cuDNN's batch norm, and the fused RMS norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.catalogue import Gpu
from pytest_torchmem.profiler.dispatch.registry import Composite, cuda_kernel

_CUDNN_INDEX = 1
#: cuDNN's spatial persistent mode takes at most this many images (native/Normalization.cpp).
_LARGEST_TRAINING_BATCH = 880801
_LARGEST_EVALUATION_BATCH = 65535


@cuda_kernel("aten::_batch_norm_impl_index")
def batch_norm_impl_index(
    gpu: Gpu,
    composite: Composite,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """CuDNN where it can; native/Normalization.cpp, _select_batch_norm_backend."""
    if weight is None or bias is None or not cudnn_enabled or not torch.backends.cudnn.enabled:
        return composite()
    has_statistics = running_mean is not None and running_var is not None
    usable = (
        input.dtype != torch.bfloat16
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and weight.dtype != torch.bfloat16
        and input.dim() >= 3
        and input.numel() < 2**31
        and (training or has_statistics)
        and (has_statistics or (running_mean is None and running_var is None))
        and (
            (training and input.size(0) <= _LARGEST_TRAINING_BATCH)
            or (not training and input.size(0) <= _LARGEST_EVALUATION_BATCH)
        )
    )
    if not usable:
        return composite()
    layout = _suggested_format(input)
    output, save_mean, save_variance, reserve = torch.ops.aten.cudnn_batch_norm.default(
        input.contiguous(memory_format=layout),
        weight.contiguous(),
        bias.contiguous(),
        None if running_mean is None else running_mean.contiguous(),
        None if running_var is None else running_var.contiguous(),
        training,
        momentum,
        eps,
    )
    return output, save_mean, save_variance, reserve, _CUDNN_INDEX


def _suggested_format(tensor: Tensor) -> torch.memory_format:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        if not tensor.is_contiguous():
            return torch.channels_last
    elif (
        tensor.dim() == 5
        and tensor.is_contiguous(memory_format=torch.channels_last_3d)
        and not tensor.is_contiguous()
    ):
        return torch.channels_last_3d
    return torch.contiguous_format
