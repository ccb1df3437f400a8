"""Normalisation: cuDNN's batch norm, and the fused RMS norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.autograd import saved_by
from pytest_torchmem.torch_private.keys import below_autograd

_CUDNN_INDEX = 1
#: cuDNN's spatial persistent mode takes at most this many images (native/Normalization.cpp).
_LARGEST_TRAINING_BATCH = 880801
_LARGEST_EVALUATION_BATCH = 65535


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
    """CuDNN where it can; native/Normalization.cpp, _select_batch_norm_backend."""
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


@operator("aten::group_norm").path("cuda")
def group_norm(
    call: CompositeCall,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Of contiguous input, also where it is channels-last; native/group_norm.cpp, group_norm.

    What is normalised, and kept for the backward, is a contiguous copy. torch 2.15 has a kernel for
    channels-last instead.
    """
    if input.is_contiguous():
        return call()
    with call.trace.working():
        copies = _group_norm_copies()
    if not copies:
        return call()
    return call.of(input.contiguous(), num_groups, weight, bias, eps, cudnn_enabled)


@cache
def _group_norm_copies() -> bool:
    """Return whether the composite itself makes its input contiguous; ``meta`` is no CPU either."""
    with torch.inference_mode(False), torch.enable_grad():
        image = torch.empty((1, 2, 2, 2), device="meta", requires_grad=True)
        turned = image.contiguous(memory_format=torch.channels_last)
        node: Any = torch.group_norm(turned, 1).grad_fn
    return bool(saved_by(node, "input").is_contiguous())


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


@operator("aten::rms_norm").path("cuda")
def rms_norm(
    call: CompositeCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """The fused kernel, but for channels-last and complex input, or a weight of another dtype.

    native/layer_norm.cpp, ``rms_norm_symint``.
    """
    plain = _suggested_format(input) is torch.contiguous_format and not input.is_complex()
    if not plain or (weight is not None and weight.dtype != input.dtype):
        return call()
    return torch.ops.aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


class _FusedRmsNorm(torch.autograd.Function):
    """The gradient that derivatives.yaml gives ``_fused_rms_norm`` on CUDA only."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> Any:
        with below_autograd():
            output, rstd = torch.ops.aten._fused_rms_norm.default(
                input, normalized_shape, weight, eps
            )
        ctx.normalized_shape = normalized_shape
        ctx.save_for_backward(input, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return output, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        if grad is None:
            return None, None, None, None
        input, weight, rstd = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        grad_input, grad_weight = torch.ops.aten._fused_rms_norm_backward.default(
            grad, input, ctx.normalized_shape, rstd, weight, mask
        )
        return grad_input, None, grad_weight, None


@operator("aten::_fused_rms_norm", kernel_on=frozenset({"cuda"})).path("cuda")
def fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Any:
    """native/cuda/layer_norm_kernel.cu, ``_fused_rms_norm_cuda``, with its gradient."""
    return cast(Any, _FusedRmsNorm).apply(input, normalized_shape, weight, eps)
