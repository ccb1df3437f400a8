"""Batch norm over several processes: what ``nn.SyncBatchNorm`` calls on the GPU.

torch/nn/modules/_functions.py, ``SyncBatchNorm``; native/cuda/Normalization.cu.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import like, lying_alike
from pytest_torchmem.operators.normalization.batch_norm import (
    is_channels_innermost_on_cuda,
    staging,
)
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import Workspace, unknown

_statistics = operator("aten::batch_norm_stats", "aten::batch_norm_update_stats")
_reduce = operator("aten::batch_norm_backward_reduce")


@_statistics.workspace("cuda")
def statistics_workspace(input: Tensor) -> Workspace | tuple[int, ...]:
    """As the forward in training; native/cuda/Normalization.cu, ``batch_norm_mean_var``."""
    if is_channels_innermost_on_cuda(input):
        return staging(input, 4)
    return () if input.is_contiguous() else unknown()


@_reduce.workspace("cuda")
def reduce_workspace(grad_out: Tensor, input: Tensor) -> Workspace | tuple[int, ...]:
    """Sums of blocks where both are channels last; native/cuda/Normalization.cu,
    ``batch_norm_backward_reduce_cuda``.
    """
    if is_channels_innermost_on_cuda(input) and is_channels_innermost_on_cuda(grad_out):
        return staging(input, 2)
    return () if input.is_contiguous() and grad_out.is_contiguous() else unknown()


operator(
    *aten("batch_norm_gather_stats_with_counts batch_norm_elemt batch_norm_backward_elemt"),
    source="native/cuda/Normalization.cu",
    takes_nothing=frozenset({"cuda"}),
)


@_statistics.meta()
def batch_norm_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu: float for 16-bit inputs."""
    dtype = torch.float32 if input.dtype.itemsize == 2 else input.dtype
    shape = (input.shape[1],)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


@operator("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts").meta()
def batch_norm_gather(mean: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu."""
    return like(mean, mean.shape[1:]), like(mean, mean.shape[1:])


class Reduced(NamedTuple):
    """What is asked of sums over the batch, by the names of the schema's arguments."""

    mean: Tensor
    weight: Tensor | None
    input_g: bool
    weight_g: bool
    bias_g: bool

    def wanted(self, *sums: Tensor) -> tuple[Tensor | None, ...]:
        """Return those of two ``sums`` and of two gradients of parameters that are asked for."""
        masks = (self.input_g, self.input_g, self.weight_g, self.bias_g)
        return tuple(one if asked else None for one, asked in zip(sums, masks, strict=True))

    @property
    def parameter(self) -> Tensor:
        """What gradients of parameters are like."""
        return self.mean if self.weight is None else self.weight


@_reduce.meta()
def batch_norm_backward_reduce(reduced: Reduced) -> tuple[Tensor | None, ...]:
    """native/cuda/Normalization.cu."""
    mean, parameter = reduced.mean, reduced.parameter
    return reduced.wanted(like(mean), like(mean), like(parameter), like(parameter))


@operator("aten::batch_norm_elemt", "aten::batch_norm_backward_elemt").meta()
def batch_norm_apply(input: Tensor) -> Tensor:
    """native/cuda/Normalization.cu."""
    return lying_alike(input)


def _along(input: Tensor, one: Tensor) -> Tensor:
    return one.view(1, -1, *[1] * (input.dim() - 2))


def _but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


@operator("aten::batch_norm_stats").values("cuda")
def statistics(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Means and inverse deviations of the channels, in float for 16-bit inputs."""
    input = input.float() if input.dtype.itemsize == 2 else input
    variance, mean = torch.var_mean(input, _but_channels(input), correction=0)
    return mean, (variance + eps).rsqrt()


@operator("aten::batch_norm_gather_stats_with_counts").values("cuda")
def gathered(
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Those of all processes together, whose running ones are moved on;
    ``batch_norm_reduce_statistics_kernel``.
    """
    counts = counts.to(mean.dtype).view(-1, 1)
    total = counts.sum()
    whole = (mean * counts).sum(0) / total
    squares = (((1 / invstd).square() - eps + (mean - whole).square()) * counts).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = (squares / (total - 1)).to(running_var.dtype)
        running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
    return whole, (squares / total + eps).rsqrt()


@operator("aten::batch_norm_elemt").values("cuda")
def normalized(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    """The input, normalized; ``batch_norm_transform_input_kernel``."""
    found = (input.to(mean.dtype) - _along(input, mean)) * _along(input, invstd)
    if weight is not None:
        found = found * _along(input, weight)
    if bias is not None:
        found = found + _along(input, bias)
    return found.to(input.dtype)


@_reduce.values("cuda")
def reduced_values(
    grad_out: Tensor, input: Tensor, invstd: Tensor, reduced: Reduced
) -> tuple[Tensor | None, ...]:
    """Sums of the gradient, and of it times what the input is above its mean, and with these the
    gradients of the parameters; ``batch_norm_backward_reduce_kernel``.
    """
    mean, dtype = reduced.mean, reduced.parameter.dtype
    gradient = grad_out.to(mean.dtype)
    sums = gradient.sum(_but_channels(input))
    above = (gradient * (input.to(mean.dtype) - _along(input, mean))).sum(_but_channels(input))
    return reduced.wanted(sums, above, (above * invstd).to(dtype), sums.to(dtype))


@operator("aten::batch_norm_backward_elemt").values("cuda")
def gradient_of_input(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """``batch_norm_backward_elemt_kernel``; ``count`` has the rows of each process."""
    total = count.sum()
    factor = _along(input, sum_dy_xmu / total * invstd.square())
    above = input.to(mean.dtype) - _along(input, mean)
    found = grad_out.to(mean.dtype) - _along(input, sum_dy / total) - above * factor
    found = found * _along(input, invstd)
    if weight is not None:
        found = found * _along(input, weight)
    return found.to(input.dtype)
