"""Normalisation: layer, RMS, group and batch.

native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cu and Normalization.cuh;
cuDNN's batch norm asks cuDNN, native/cudnn/BatchNorm.cpp.
"""

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
from pytest_torchmem.operators.reduction.cuda_buffers import sum_buffers
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.rounding import ceil_div
from pytest_torchmem.operators.workspace import Workspace, unknown
from pytest_torchmem.targets.gpus import Gpu

_INT = 4


@operator("aten::native_layer_norm").workspace("cuda")
def layer_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[int, ...]:
    """Dense copies; exact, ``layer_norm_cuda``."""
    return (contiguous_copy(input), contiguous_copy(weight), contiguous_copy(bias))


@operator("aten::_fused_rms_norm").workspace("cuda")
def rms_norm(input: Tensor, weight: Tensor | None = None) -> tuple[int, ...]:
    """Dense copies; exact, ``_fused_rms_norm_cuda``."""
    return (contiguous_copy(input), contiguous_copy(weight))


@operator("aten::native_layer_norm_backward").workspace("cuda")
def layer_norm_backward(
    machine: Gpu,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[int, ...]:
    """Dense copies and partial gradients; exact, ``LayerNormBackwardKernelImplInternal``."""
    gamma, beta = output_mask[1] and weight is not None, output_mask[2] and bias is not None
    partial = _partial_gradients(machine, input, normalized_shape, weight, gamma + beta)
    return (*_copies(grad_out, input, weight), *partial)


@operator("aten::_fused_rms_norm_backward").workspace("cuda")
def rms_norm_backward(
    machine: Gpu,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[int, ...]:
    """As layer norm's, without beta; exact, ``_fused_rms_norm_backward_cuda``."""
    gamma = output_mask[1] and weight is not None
    partial = _partial_gradients(machine, input, normalized_shape, weight, int(gamma))
    return (*_copies(grad_out, input, weight), *partial)


def _copies(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(map(contiguous_copy, tensors))


def _partial_gradients(
    gpu: Gpu, input: Tensor, shape: Sequence[int], weight: Tensor | None, number: int
) -> tuple[int, ...]:
    """Of many short rows, a partial sum for every 32 of them, summed by a reduction into a tensor
    that takes the place of the one made before.

    ``LaunchGammaBetaBackwardCUDAKernel``.
    """
    columns = math.prod(shape)
    rows = input.numel() // columns if columns else 0
    few = rows <= 64 * 1024 or columns // 32 >= gpu.multiprocessors // 2
    if weight is None or not number or few:
        return ()
    blocks = min(32 * 1024 // ceil_div(columns, 32), ceil_div(rows, 32))
    partial = blocks * columns * weight.element_size()
    buffers = sum_buffers(gpu, (blocks, columns), 0, weight.dtype)
    return (*[partial] * number, dense_bytes(weight), *buffers)


@operator("aten::native_group_norm").workspace("cuda")
def group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int
) -> tuple[int, ...]:
    """A scale and a shift for every channel of every image where a channel has several pixels.

    Exact, group_norm_kernel.cu, ``GroupNormKernelImplInternal``.
    """
    copies = _copies(input, weight, bias)
    if HxW == 1 or (weight is None and bias is None):
        return copies
    scale = N * C * accumulation_type(input.dtype).itemsize
    return (*copies, scale, scale)


@operator("aten::native_group_norm_backward").workspace("cuda")
def group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[int, ...]:
    """Sums of every channel of every image, and coefficients of the input's gradient.

    Exact, group_norm_kernel.cu, ``GroupNormBackwardKernelImplInternal`` and
    ``GroupNorm1dBackward``.
    """
    size = accumulation_type(input.dtype).itemsize
    each = N * C * size
    groups = N * group * size
    copies = _copies(grad_out, input)
    if HxW == 1:
        return (*copies, each, each, *[groups] * 2 * output_mask[0])
    coefficients = (groups, groups, each if weight is not None else 0) if output_mask[0] else ()
    return (*copies, each, each, *coefficients)


@operator("aten::native_batch_norm", "aten::_native_batch_norm_legit").workspace("cuda")
def batch_norm(input: Tensor, training: bool) -> tuple[int, ...]:
    """Channels last in training: partial results of blocks; else nothing. Exact,
    Normalization.cuh, ``batch_norm_stats_channels_last_cuda_template``.
    """
    return _staging(input, 4) if training and _by_channel_last(input) else ()


@operator("aten::_batch_norm_with_update").workspace("cuda")
def batch_norm_with_update(
    outputs: tuple[Tensor, ...], input: Tensor
) -> Workspace | tuple[int, ...]:
    """As ``native_batch_norm`` in training; through cuDNN where it takes it."""
    if outputs[3].numel() or _cudnn_takes(input):
        return unknown()
    return _staging(input, 4) if _by_channel_last(input) else ()


@operator("aten::native_batch_norm_backward").workspace("cuda")
def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    save_invstd: Tensor | None,
    train: bool,
    output_mask: Sequence[bool],
) -> tuple[int, ...]:
    """Channels last: sums of channels and of blocks, and the statistics that cuDNN does not save in
    evaluation; else what does not lie as (batch, channels, pixels) is copied. Exact,
    Normalization.cu, ``batch_norm_backward_cuda``.
    """
    reduces = train or output_mask[1] or output_mask[2]
    last = _by_channel_last(input)
    if reduces and output_mask[0] and not last:
        return (_pixels_copy(input), _pixels_copy(grad_out))
    each = input.shape[1] * accumulation_type(input.dtype).itemsize
    statistics = each if save_invstd is not None and not save_invstd.numel() else 0
    if not reduces:
        return (statistics,)
    staging = _staging(input, 2) if last and _by_channel_last(grad_out) else ()
    return (statistics, each, each, *staging)


def _pixels_copy(tensor: Tensor) -> int:
    """Bytes that ``reshape((batch, channels, -1))`` copies: 0 where a view will do."""
    merged = zip(tensor.shape[2:-1], tensor.stride()[2:-1], strict=True)
    inner = zip(tensor.shape[3:], tensor.stride()[3:], strict=True)
    for (size, stride), (next_size, next_stride) in zip(merged, inner, strict=True):
        if size != 1 and next_size != 1 and stride != next_size * next_stride:
            return dense_bytes(tensor)
    return 0


@operator("aten::batch_norm_backward").workspace("cuda")
def either_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    save_var: Tensor | None,
    update: bool,
    output_mask: Sequence[bool],
    reserve: Tensor,
) -> Workspace | tuple[int, ...]:
    """The one of cuDNN or ATen's own, as the forward was; Normalization.cu,
    ``_new_batch_norm_backward_cuda``.
    """
    if reserve.numel() or _cudnn_takes(input):
        return unknown()
    return batch_norm_backward(grad_out, input, save_var, update, output_mask)


def _cudnn_takes(input: Tensor) -> bool:
    """``_select_batch_norm_backend``, of what the arguments say."""
    return input.dim() > 2 and input.dtype != torch.bfloat16


def _by_channel_last(tensor: Tensor) -> bool:
    """``batch_norm_use_channels_last_kernels``: also (batch, channels)."""
    return is_channels_last(tensor) or (
        tensor.is_contiguous() and tensor.numel() == tensor.shape[0] * tensor.shape[1]
    )


def _staging(input: Tensor, copies: int) -> tuple[int, ...]:
    """Blocks' partial results and semaphores; ``flexible_launch_configs``."""
    channels = input.shape[1]
    rows = input.numel() // channels if channels else 0
    width = min(_last_power(channels), 32)
    height = min(_last_power(ceil_div(rows, 16)), 512 // width)
    if width * height != 512:
        width = min(_last_power(channels), 512 // height)
    across = ceil_div(channels, width)
    down = min(ceil_div(rows, height * 16), 128)
    if down < 8:
        return ()
    size = accumulation_type(input.dtype).itemsize
    return (copies * channels * down * size, across * _INT)


def _last_power(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 1


@operator("aten::cudnn_batch_norm").workspace("cuda")
def cudnn_batch_norm(input: Tensor) -> Workspace:
    """A copy in the suggested format, cuDNN's workspace and the reserve that is kept for backward.

    ``cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize`` and
    ``cudnnGetBatchNormalizationTrainingExReserveSpaceSize``; BatchNorm.cpp.
    """
    return unknown(contiguous_copy(input, suggested_format(input)))


@operator("aten::cudnn_batch_norm_backward").workspace("cuda")
def cudnn_batch_norm_backward(input: Tensor, grad_output: Tensor) -> Workspace:
    """A copy of the gradient in the input's format, and cuDNN's workspace; BatchNorm.cpp."""
    memory_format = suggested_format(input)
    return unknown(contiguous_copy(grad_output, memory_format))


@operator("aten::native_dropout").workspace("cuda")
def native_dropout() -> int:
    """Nothing: mask and result are outputs; native/cuda/Dropout.cu, exact."""
    return 0


@operator("aten::native_dropout_backward").workspace("cuda")
def native_dropout_backward() -> int:
    """Nothing: one kernel; native/cuda/Dropout.cu, ``masked_scale_kernel``, exact."""
    return 0
