"""cuDNN's batch normalization, and when it is taken; native/cudnn/BatchNorm.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.geometry import contiguous_copy, suggested_format
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, unknown

_CUDNN_INDEX = 1
#: cuDNN's spatial persistent mode takes at most this many images (native/Normalization.cpp).
_LARGEST_TRAINING_BATCH = 880801
_LARGEST_EVALUATION_BATCH = 65535

# The backward needs an output of the forward whose size cuDNN alone decides.
_forward = operator(
    "aten::cudnn_batch_norm", library_output=3, also_writes=("running_mean", "running_var")
)
_backward = operator("aten::cudnn_batch_norm_backward", not_in_key=("reserveSpace",))


def cudnn_takes(input: Tensor) -> bool:
    """``_select_batch_norm_backend``, of what the arguments say."""
    return input.dim() > 2 and input.dtype != torch.bfloat16


@operator("aten::_batch_norm_impl_index").path("cuda")
def batch_norm_impl_index(
    call: CompositeCall,
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
    """CuDNN where it can; native/Normalization.cpp, ``_select_batch_norm_backend``."""
    if weight is None or bias is None or not cudnn_enabled or not torch.backends.cudnn.enabled:
        return call()
    if input.numel() == 0:
        return call()
    has_statistics = running_mean is not None and running_var is not None
    usable = (
        input.dtype != torch.bfloat16
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and weight.dtype != torch.bfloat16
        and input.dim() >= 3
        and input.numel() < 2**31 - 1
        and (training or has_statistics)
        and (has_statistics or (running_mean is None and running_var is None))
        and (
            (training and input.size(0) <= _LARGEST_TRAINING_BATCH)
            or (not training and input.size(0) <= _LARGEST_EVALUATION_BATCH)
        )
    )
    if not usable:
        return call()
    output, save_mean, save_variance, reserve = torch.ops.aten.cudnn_batch_norm.default(
        input.contiguous(memory_format=suggested_format(input)),
        weight.contiguous(),
        bias.contiguous(),
        None if running_mean is None else running_mean.contiguous(),
        None if running_var is None else running_var.contiguous(),
        training,
        momentum,
        eps,
    )
    return output, save_mean, save_variance, reserve, _CUDNN_INDEX


@_forward.workspace("cuda")
def workspace(input: Tensor) -> Workspace:
    """A copy in the suggested format, cuDNN's workspace and the reserve that is kept for backward.

    ``cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize`` and
    ``cudnnGetBatchNormalizationTrainingExReserveSpaceSize``.
    """
    return unknown(contiguous_copy(input, suggested_format(input)))


@_backward.workspace("cuda")
def backward_workspace(input: Tensor, grad_output: Tensor) -> Workspace:
    """A copy of the gradient in the input's format, and cuDNN's workspace."""
    return unknown(contiguous_copy(grad_output, suggested_format(input)))


@_forward.values()
def forward_values(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[Any, ...]:
    """As ATen's own; the reserve is nobody's to read."""
    statistics = (running_mean, running_var, training, exponential_average_factor, epsilon)
    return (*torch.native_batch_norm(input, weight, bias, *statistics), None)


@_backward.values()
def backward_values(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
) -> Any:
    """As ATen's own: what is saved of the variance is its reciprocal root in both."""
    statistics = (running_mean, running_var, save_mean, save_var, True, epsilon)
    mask = [True, True, True]
    return torch.ops.aten.native_batch_norm_backward.default(
        grad_output, input, weight, *statistics, mask
    )
