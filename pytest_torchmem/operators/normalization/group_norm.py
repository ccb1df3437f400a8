"""Group normalization; native/group_norm.cpp, native/cuda/group_norm_kernel.cu."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.geometry import (
    accumulation_type,
    asked_for,
    contiguous_copy,
    laid_out,
    like,
    suggested_format,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.tensors import saved_by

_forward = operator("aten::native_group_norm")
_backward = operator("aten::native_group_norm_backward")


@operator("aten::group_norm").path("cuda")
def group_norm(call: CompositeCall, input: Tensor) -> Any:
    """Of contiguous input, also where it is channels-last; native/group_norm.cpp, group_norm.

    What is normalised, and kept for the backward, is a contiguous copy. torch 2.14 has a kernel for
    channels-last instead.
    """
    if input.is_contiguous():
        return call()
    with call.trace.working():
        copies = _group_norm_copies()
    if not copies:
        return call()
    return call.of(input.contiguous(), *call.args[1:], **call.kwargs)


@cache
def _group_norm_copies() -> bool:
    """Return whether the composite itself makes its input contiguous; ``meta`` is no CPU either."""
    with torch.inference_mode(False), torch.enable_grad():
        image = torch.empty((1, 2, 2, 2), device="meta", requires_grad=True)
        turned = image.contiguous(memory_format=torch.channels_last)
        node: Any = torch.group_norm(turned, 1).grad_fn
    return bool(saved_by(node, "input").is_contiguous())


class GroupNorm(NamedTuple):
    """What a group norm and its backward have in common, by the names of their arguments."""

    input: Tensor
    weight: Tensor | None
    N: int
    C: int
    HxW: int
    group: int
    bias: Tensor | None = None

    def of_channels(self) -> int:
        """Bytes of a number for every channel of every image, in the type that is added up in."""
        return self.N * self.C * accumulation_type(self.input.dtype).itemsize


@_forward.meta()
def outputs(norm: GroupNorm) -> tuple[Tensor, ...]:
    """In the type of the input, the statistics in that of the parameters; native/group_norm.cpp,
    native_group_norm, and native/cpu/mixed_data_type.h, param_scalar_type.
    """
    input, given = norm.input, (norm.weight, norm.bias)
    dtype = next((one for one in given if one is not None), input).dtype
    # On CUDA a composite makes channels-last input contiguous before, where it has to be.
    statistics = (input.new_empty((norm.N, norm.group), dtype=dtype) for _ in range(2))
    return (laid_out(input, suggested_format(input)), *statistics)


@_backward.meta()
def gradients(
    input: Tensor, weight: Tensor | None, C: int, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """In the types of input and parameters; native_group_norm_backward."""
    of = weight if weight is not None else input
    made = laid_out(input, suggested_format(input)), like(of, (C,)), like(of, (C,))
    return asked_for(made, output_mask)


@_forward.workspace("cpu")
def forward_on_cpu(norm: GroupNorm) -> int:
    """Contiguous copies of what is not (before torch 2.14 ``group_norm`` makes them), and of
    channels last sums and squares per channel; native/group_norm.cpp, native_group_norm, and
    native/cpu/group_norm_kernel.cpp, GroupNormKernelImplChannelsLastInternal.
    """
    input = norm.input
    if input.numel() == 0:
        return 0
    layout = suggested_format(input)
    copies = contiguous_copy(input, layout)
    copies += contiguous_copy(norm.weight) + contiguous_copy(norm.bias)
    if input.is_contiguous() or layout == torch.contiguous_format:
        return copies
    return copies + 2 * norm.of_channels()


@_forward.workspace("cuda")
def forward_on_cuda(outputs: Sequence[Tensor], norm: GroupNorm) -> tuple[int, ...]:
    """Statistics in the type that they are added up in, and a scale and a shift for every channel
    of every image where a channel has several pixels.

    Exact, group_norm_kernel.cu, ``GroupNormKernelImplInternal``; before torch 2.13 statistics are
    kept in the type of the outputs alone.
    """
    dtype = accumulation_type(norm.input.dtype)
    statistics = outputs[1:] if TORCH_VERSION >= (2, 13) else ()
    copies = (
        *map(contiguous_copy, (norm.input, norm.weight, norm.bias)),
        *(converted(statistic, dtype) for statistic in statistics),
    )
    if norm.HxW == 1 or norm.weight is norm.bias is None:
        return copies
    return (*copies, norm.of_channels(), norm.of_channels())


@_backward.workspace("cpu")
def backward_on_cpu(grad_out: Tensor, mean: Tensor, rstd: Tensor, norm: GroupNorm) -> int:
    """Contiguous copies of what is not (before torch 2.14 the derivative's formula makes them), and
    ``ds`` and ``db`` of every channel; native/group_norm.cpp, native_group_norm_backward, and
    native/cpu/group_norm_kernel.cpp, GroupNormBackwardKernelImplInternal.
    """
    input = norm.input
    if input.numel() == 0:
        return 0
    layout = suggested_format(input)
    copies = sum(contiguous_copy(tensor, layout) for tensor in (grad_out, input))
    copies += sum(contiguous_copy(tensor) for tensor in (mean, rstd, norm.weight))
    return copies + 2 * norm.of_channels()


@_backward.workspace("cuda")
def backward_on_cuda(
    grad_out: Tensor, norm: GroupNorm, output_mask: Sequence[bool]
) -> tuple[int, ...]:
    """Sums of every channel of every image, and coefficients of the input's gradient.

    Exact, group_norm_kernel.cu, ``GroupNormBackwardKernelImplInternal`` and
    ``GroupNorm1dBackward``.
    """
    each = norm.of_channels()
    groups = norm.N * norm.group * accumulation_type(norm.input.dtype).itemsize
    copies = (contiguous_copy(grad_out), contiguous_copy(norm.input))
    if norm.HxW == 1:
        return (*copies, each, each, *[groups] * 2 * output_mask[0])
    scaled = each if norm.weight is not None else 0
    coefficients = (groups, groups, scaled) if output_mask[0] else ()
    return (*copies, each, each, *coefficients)
