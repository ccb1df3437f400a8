"""Batch, layer and group normalization on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    accumulation_type,
    contiguous_copy,
    dense_bytes,
    is_channels_last,
    suggested_format,
)
from pytest_torchmem.operators.reduction.cpu_buffers import sum_workspace
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

Mask = Sequence[bool]


def _per_channel(input: Tensor) -> bool:
    """Whether the kernels walk channels innermost: channels last, or one element per channel."""
    if input.is_contiguous():
        return input.numel() == input.shape[0] * input.shape[1]
    return is_channels_last(input)


@operator("aten::native_batch_norm", "aten::_batch_norm_with_update").workspace("cpu")
def batch_norm(
    machine: Host,
    outputs: Sequence[Tensor],
    input: Tensor,
    weight: Tensor | None,
    training: bool = True,
) -> int:
    """Statistics and the fused scale and shift; native/Normalization.cpp,
    batch_norm_cpu_update_stats_template and batch_norm_cpu_transform_input_template.

    Exact on 2.13 for dense inputs, up to 12 bytes of scalars off for others.
    """
    return _batch_norm(machine, outputs[1], input, training, weight is None)


@operator("aten::_native_batch_norm_legit").workspace("cpu")
def batch_norm_legit(
    machine: Host,
    outputs: Sequence[Tensor],
    input: Tensor,
    weight: Tensor | None,
    training: bool,
) -> int:
    """The same kernel as native_batch_norm, with running statistics or without."""
    return _batch_norm(machine, outputs[1], input, training, weight is None)


def _batch_norm(
    machine: Host, save_mean: Tensor, input: Tensor, training: bool, no_weight: bool
) -> int:
    if input.numel() == 0:
        return 0
    channels = input.shape[1]
    parameter = channels * save_mean.element_size()
    accumulated = channels * accumulation_type(input.dtype).itemsize
    if not (input.is_contiguous() or is_channels_last(input)):
        if not training:
            return 3 * parameter
        if accumulated == channels * input.element_size():
            return 2 * save_mean.element_size() * no_weight
        mean = dense_bytes(input, accumulation_type(input.dtype)) - parameter
        return mean + (0 if parameter == accumulated else accumulated)
    if not training:
        return 2 * accumulated
    by_thread = 0
    if _per_channel(input) and input.numel() // channels > machine.threads:
        by_thread = machine.threads * accumulated
    return max(2 * parameter + by_thread, 2 * accumulated)


@operator("aten::native_batch_norm_backward").workspace("cpu")
def batch_norm_backward(
    machine: Host,
    outputs: Sequence[Tensor | None],
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    train: bool,
    output_mask: Mask,
) -> int:
    """Where everything is dense the gradient of the input is allocated twice and the first freed;
    channels last adds sums per thread. native/Normalization.cpp, batch_norm_backward_cpu_template;
    native/cpu/batch_norm_kernel.cpp, batch_norm_cpu_backward_channels_last_impl.
    """
    if input.numel() == 0:
        return 0
    channels = input.shape[1]
    both_contiguous = input.is_contiguous() and grad_out.is_contiguous()
    if not both_contiguous and not (is_channels_last(input) and is_channels_last(grad_out)):
        dims = (0, *range(2, input.dim()))
        summed = sum_workspace(machine, grad_out, grad_out.dtype, channels, dims)
        return channels * input.element_size() + summed
    first = dense_bytes(outputs[0]) if output_mask[0] else 0
    if not _per_channel(input):
        return first
    accumulated = channels * accumulation_type(input.dtype).itemsize
    parts = (weight is None) + (not train) if accumulated == channels * input.element_size() else 3
    return max(first, (parts + 2 * machine.threads) * accumulated)


@operator("aten::batch_norm_backward").workspace("cpu")
def batch_norm_with_update_backward(
    machine: Host,
    outputs: Sequence[Tensor | None],
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    update: bool,
    output_mask: Mask,
) -> int:
    """The same kernel as native_batch_norm_backward, with a reserve that the CPU ignores."""
    return batch_norm_backward(machine, outputs, grad_out, input, weight, update, output_mask)


@operator("aten::native_layer_norm").workspace("cpu")
def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> int:
    """Contiguous copies of what is not; native/layer_norm.cpp, layer_norm_cpu."""
    return contiguous_copy(input) + contiguous_copy(weight) + contiguous_copy(bias)


@operator("aten::native_layer_norm_backward").workspace("cpu")
def layer_norm_backward(
    machine: Host,
    outputs: Sequence[Tensor | None],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
) -> int:
    """Contiguous copies, and sums of gamma and beta per thread; native/layer_norm.cpp and
    native/cpu/layer_norm_kernel.cpp, LayerNormBackwardKernelImplInternal.
    """
    copies = contiguous_copy(input) + contiguous_copy(weight)
    if input.numel() == 0:
        return copies
    copies += contiguous_copy(grad_out)
    if outputs[1] is None and outputs[2] is None:
        return copies
    columns = math.prod(normalized_shape)
    return copies + 2 * machine.threads * columns * input.element_size()


@operator("aten::native_group_norm").workspace("cpu")
def group_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int) -> int:
    """Contiguous copies of what is not (before torch 2.15 ``group_norm`` makes them), and of
    channels last sums and squares per channel; native/group_norm.cpp, native_group_norm, and
    native/cpu/group_norm_kernel.cpp, GroupNormKernelImplChannelsLastInternal.
    """
    if input.numel() == 0:
        return 0
    layout = suggested_format(input)
    copies = contiguous_copy(input, layout) + contiguous_copy(weight) + contiguous_copy(bias)
    if input.is_contiguous() or layout == torch.contiguous_format:
        return copies
    return copies + 2 * N * C * accumulation_type(input.dtype).itemsize


@operator("aten::native_group_norm_backward").workspace("cpu")
def group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
) -> int:
    """Contiguous copies of what is not (before torch 2.15 the derivative's formula makes them), and
    ``ds`` and ``db`` of every channel; native/group_norm.cpp, native_group_norm_backward, and
    native/cpu/group_norm_kernel.cpp, GroupNormBackwardKernelImplInternal.
    """
    if input.numel() == 0:
        return 0
    layout = suggested_format(input)
    copies = sum(contiguous_copy(tensor, layout) for tensor in (grad_out, input))
    copies += sum(contiguous_copy(tensor) for tensor in (mean, rstd, weight))
    return copies + 2 * N * C * accumulation_type(input.dtype).itemsize
