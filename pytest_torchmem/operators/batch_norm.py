"""Batch normalization, ATen's own and cuDNN's.

CPU: native/Normalization.cpp, native/cpu/batch_norm_kernel.cpp. CUDA: native/cuda/Normalization.cu
and Normalization.cuh, exact. Each has one kernel behind several operators.

native/cudnn/BatchNorm.cpp asks cuDNN for the sizes of a workspace and of a reserve, which it tells
on a GPU alone. Both are nothing for what is not channels last: «this API will function exactly like
the non-extended function» (documentation of ``cudnnBatchNormalizationForwardTrainingEx``), which
has neither. Channels last have bounds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.elementwise import last_power, sum_workspace
from pytest_torchmem.operators.reduction import moments
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    ALL,
    INT,
    Made,
    Request,
    Workspace,
    accumulation_type,
    asked_for,
    bounded,
    ceil_div,
    contiguous_copy,
    dense_bytes,
    is_channels_last,
    laid_out,
    like,
    lying_alike,
    passing,
    suggested_format,
    unknown,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_CUDNN_INDEX = 1
#: cuDNN's spatial persistent mode takes at most this many images (native/Normalization.cpp).
_LARGEST_TRAINING_BATCH = 880801
_LARGEST_EVALUATION_BATCH = 65535

# The backward needs an output of the forward whose size cuDNN alone decides.
_cudnn = operator(
    "aten::cudnn_batch_norm",
    library_output=3,
    also_writes=("running_mean", "running_var"),
    order={"cuda": (0, 3, 1, 2)},
)
operator(
    "native_batch_norm batch_norm_update_stats batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
    also_writes=("running_mean", "running_var"),
)
_cudnn_backward = operator("aten::cudnn_batch_norm_backward", not_in_key=("reserveSpace",))


class BatchNorm(NamedTuple):
    """What batch norms have in common, by the names of their schemas' arguments."""

    input: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    training: bool = True

    @property
    def statistics(self) -> tuple[Tensor | None, Tensor | None]:
        """The running ones."""
        return self.running_mean, self.running_var


def cudnn_takes(norm: BatchNorm) -> bool:
    """``_select_batch_norm_backend`` of what has a bias; native/Normalization.cpp."""
    input, weight = norm.input, norm.weight
    if weight is None or not torch.backends.cudnn.enabled:
        return False
    missing = sum(one is None for one in norm.statistics)
    most = _LARGEST_TRAINING_BATCH if norm.training else _LARGEST_EVALUATION_BATCH
    return (
        torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and input.dim() >= 3
        and input.numel() < 2**31 - 1
        and (not missing or (norm.training and missing == 2))
        and input.size(0) <= most
    )


@operator("aten::_batch_norm_impl_index").path("cuda")
def batch_norm_impl_index(
    call: CompositeCall, norm: BatchNorm, momentum: float, eps: float, cudnn_enabled: bool
) -> Any:
    """CuDNN where it can; native/Normalization.cpp."""
    input, weight, bias = norm.input, norm.weight, norm.bias
    if input.numel() == 0 and input.dim() > 1:
        # Statistics in the type that a GPU accumulates in, and a result with a gradient.
        dtype = accumulation_type(input.dtype)
        empty = input.new_empty((0,), dtype=torch.uint8)
        mean, deviation = (input.new_empty((input.shape[1],), dtype=dtype) for _ in range(2))
        result = input.clone()
        result = result if weight is None else result * weight[0]
        return result if bias is None else result + bias[0], mean, deviation, empty, 0
    taken = cudnn_takes(norm)
    if weight is None or bias is None or not cudnn_enabled or not taken:
        return call()
    dense = input.contiguous(memory_format=suggested_format(input)), weight.contiguous()
    rest = (one if one is None else one.contiguous() for one in (bias, *norm.statistics))
    output, save_mean, save_variance, reserve = torch.ops.aten.cudnn_batch_norm.default(
        *dense, *rest, norm.training, momentum, eps
    )
    return output, save_mean, save_variance, reserve, _CUDNN_INDEX


@_cudnn.meta("cuda")
def cudnn_outputs(input: Tensor, weight: Tensor, training: bool) -> tuple[Tensor, ...]:
    """The output, statistics of the batch in training, and the reserve; ``cudnn_batch_norm``. Of
    the reserve at most: it is there for the mask of a fused ReLU, a bit for each element.
    """
    channels = input.shape[1] if training else 0
    reserve = -(-input.numel() // 8) if training and is_channels_last(input) else 0
    return (
        laid_out(input, suggested_format(input)),
        weight.new_empty((channels,)),
        weight.new_empty((channels,)),
        input.new_empty((reserve,), dtype=torch.uint8),
    )


@_cudnn.workspace("cuda")
def cudnn_workspace(machine: Gpu, input: Tensor, training: bool) -> Workspace | tuple[int, ...]:
    """A copy in the suggested format, and in training of channels last the sums of blocks. In
    evaluation cuDNN is given no workspace.
    """
    copied = contiguous_copy(input, suggested_format(input))
    return bounded(copied, _sums_of_blocks(machine, input)) if training else (copied,)


@_cudnn_backward.meta("cuda")
def cudnn_gradients(input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """That of the input in its suggested format, and two like the weight."""
    return laid_out(input, suggested_format(input)), like(weight), like(weight)


@_cudnn_backward.workspace("cuda")
def cudnn_backward_workspace(machine: Gpu, input: Tensor, grad_output: Tensor) -> Workspace:
    """A copy of the gradient in the input's format, and for channels last the sums of blocks."""
    copied = contiguous_copy(grad_output, suggested_format(input))
    return bounded(copied, _sums_of_blocks(machine, input))


def _sums_of_blocks(machine: Gpu, input: Tensor) -> int:
    """Bytes for two sums of each channel by each block, at most; none but for channels last.

    The largest workspace of all execution plans for a batch norm's graph, which cuDNN does tell
    (docs/cudnn.md), has four blocks for each multiprocessor, of at most 256 channels.
    """
    if not is_channels_last(input):
        return 0
    channels, size = input.shape[1], max(input.element_size(), 4)
    blocks = 4 * machine.multiprocessors
    return 2 * size * blocks * min(channels, 256) + 16 * channels + 1024


@_cudnn.values()
def cudnn_values(
    norm: BatchNorm, exponential_average_factor: float, epsilon: float
) -> tuple[Any, ...]:
    """As ATen's own; the reserve is nobody's to read."""
    return (*torch.native_batch_norm(*norm, exponential_average_factor, epsilon), None)


@_cudnn_backward.values()
def cudnn_backward_values(
    norm: BatchNorm,
    grad_output: Tensor,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
) -> Any:
    """As ATen's own: what is saved of the variance is its reciprocal root in both."""
    statistics = (*norm.statistics, save_mean, save_var, True, epsilon)
    return torch.ops.aten.native_batch_norm_backward.default(
        grad_output, norm.input, norm.weight, *statistics, [True, True, True]
    )


_forward = operator("aten::native_batch_norm", "aten::_native_batch_norm_legit")
_backward = operator("aten::native_batch_norm_backward", "aten::batch_norm_backward")
# What cuDNN keeps for the backward; native/cudnn/BatchNorm.cpp.
operator("_batch_norm_with_update _batch_norm_with_update_functional", library_output=3)


class BatchNormBackward(NamedTuple):
    """What both backwards have in common; one of them calls training ``update``."""

    grad_out: Tensor
    input: Tensor
    weight: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    output_mask: Sequence[bool]
    train: bool = False
    update: bool = False

    @property
    def trains(self) -> bool:
        """Whether the statistics were those of the batch."""
        return self.train or self.update


@_forward.meta("cpu")
def forward_on_cpu(norm: BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """In a dense layout; statistics in the parameters' type, none in evaluation; batch_norm_cpu."""
    input, parameters = norm.input, (norm.weight, norm.bias, *norm.statistics)
    dtype = next((one for one in parameters if one is not None), input).dtype
    statistics = input.new_empty((input.shape[1] if norm.training else 0,), dtype=dtype)
    return laid_out(input, suggested_format(input)), statistics, lying_alike(statistics)


@operator("aten::_batch_norm_with_update").meta("cpu")
def forward_with_update_on_cpu(norm: BatchNorm) -> tuple[Tensor, ...]:
    """As in training, and a reserve that is empty."""
    return *forward_on_cpu(norm), norm.input.new_empty((0,), dtype=torch.uint8)


@_forward.meta("cuda")
def forward_on_cuda(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The input's layout; statistics of every channel, in evaluation too; ``batch_norm_cuda``."""
    return lying_alike(input), *batch_norm_statistics(input)


@_forward.workspace("cpu")
@operator("aten::_batch_norm_with_update").workspace("cpu")
def forward_workspace_on_cpu(machine: Host, outputs: Sequence[Tensor], norm: BatchNorm) -> int:
    """Statistics and the fused scale and shift; batch_norm_cpu_update_stats_template and
    batch_norm_cpu_transform_input_template.

    Exact on 2.13 for dense inputs, up to 12 bytes of scalars off for others.
    """
    input, weight, training = norm.input, norm.weight, norm.training
    if input.numel() == 0:
        return 0
    channels, element_size = input.shape[1], outputs[1].element_size()
    parameter = channels * element_size
    accumulated = channels * accumulation_type(input.dtype).itemsize
    if not (input.is_contiguous() or is_channels_last(input)):
        if not training:
            return 3 * parameter
        if accumulated == channels * input.element_size():
            return 2 * element_size * (weight is None)
        mean = dense_bytes(input, accumulation_type(input.dtype)) - parameter
        return mean + (0 if parameter == accumulated else accumulated)
    if not training:
        return 2 * accumulated
    by_thread = 0
    if _is_channels_innermost_on_cpu(input) and input.numel() // channels > machine.threads:
        by_thread = machine.threads * accumulated
    return max(2 * parameter + by_thread, 2 * accumulated)


@_forward.workspace("cuda")
def forward_workspace_on_cuda(
    machine: Gpu, outputs: Sequence[Tensor], norm: BatchNorm
) -> tuple[int, ...]:
    """Channels last in training: partial results of blocks. Of what is neither that nor dense a
    variance, of bfloat16 in float, and numbers in the place of parameters;
    ``batch_norm_mean_var``, ``batch_norm_elementwise``.
    """
    input, training = norm.input, norm.training
    if input.is_contiguous() or input.is_contiguous(memory_format=torch.channels_last):
        return staging(input, 4) if training and is_channels_innermost_on_cuda(input) else ()
    one = accumulation_type(input.dtype).itemsize
    numbers = one * (norm.weight is None), one * (norm.bias is None)
    if not training:
        return numbers
    is_copied = input.dtype == torch.bfloat16  # native/ReduceOpsUtils.h, make_reduction of two
    read = lying_alike(input, dtype=torch.float32) if is_copied else input
    variance = moments(machine, outputs[1:3], read, (0, *range(2, input.dim())))
    return *passing(dense_bytes(read) * is_copied, *variance), *numbers


@operator("aten::_batch_norm_with_update").workspace("cuda")
def forward_with_update_workspace_on_cuda(
    machine: Gpu, outputs: tuple[Tensor, ...], norm: BatchNorm
) -> Workspace | tuple[int, ...]:
    """As in training; through cuDNN where it takes it."""
    if cudnn_takes(norm):
        return unknown()
    return forward_workspace_on_cuda(machine, outputs, norm)


@_backward.meta("cpu")
def backward_on_cpu(norm: BatchNormBackward) -> tuple[Tensor | None, ...]:
    """The input's layout, whatever the gradient's."""
    return _gradients(norm, suggested_format(norm.input))


@_backward.meta("cuda")
def backward_on_cuda(norm: BatchNormBackward) -> tuple[Tensor | None, ...]:
    """Channels last as the input in training, else contiguous; batch_norm_backward_cuda."""
    last = norm.trains and is_channels_last(norm.input)
    return _gradients(norm, suggested_format(norm.input) if last else torch.contiguous_format)


def _gradients(norm: BatchNormBackward, layout: torch.memory_format) -> tuple[Tensor | None, ...]:
    input = norm.input
    parameter = input.new_empty((input.shape[1],)) if norm.weight is None else norm.weight
    made = laid_out(input, layout), like(parameter), like(parameter)
    return asked_for(made, norm.output_mask)


@_forward.values("cuda")
def forward_values_on_cuda(
    norm: BatchNorm, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The CPU's kernel saves statistics in the type of the parameters, and CUDA's in float. In
    evaluation the CPU's saves none, and CUDA's those that were running; batch_norm_cuda_out.
    """
    output, mean, root = torch.native_batch_norm(*norm, momentum, eps)
    running_mean, running_var = norm.statistics
    if not norm.training and running_mean is not None and running_var is not None:
        mean, root = running_mean.clone(), (running_var + eps).rsqrt()
    if norm.input.dtype.itemsize == 2:
        return output, mean.float(), root.float()
    return output, mean, root


@operator("aten::native_batch_norm_backward").values("cuda")
def backward_values_on_cuda(
    norm: BatchNormBackward, save_mean: Tensor | None, save_invstd: Tensor | None, eps: float
) -> Any:
    """As the forward: the CPU's kernel wants statistics in the type of the parameters."""
    grad_out, input, weight, running_mean, running_var, mask, train, _ = norm
    dtype = input.dtype if weight is None else weight.dtype
    mean, root = (None if one is None else one.to(dtype) for one in (save_mean, save_invstd))
    return torch.ops.aten.native_batch_norm_backward.default(
        grad_out, input, weight, running_mean, running_var, mean, root, train, eps, mask
    )


@_backward.workspace("cpu")
def backward_workspace_on_cpu(
    machine: Host, outputs: Sequence[Tensor | None], norm: BatchNormBackward
) -> int:
    """Where everything is dense the gradient of the input is allocated twice and the first freed;
    channels last adds sums per thread; batch_norm_backward_cpu_template and
    batch_norm_cpu_backward_channels_last_impl.
    """
    input, grad_out = norm.input, norm.grad_out
    if input.numel() == 0:
        return 0
    channels = input.shape[1]
    both_contiguous = input.is_contiguous() and grad_out.is_contiguous()
    if not both_contiguous and not (is_channels_last(input) and is_channels_last(grad_out)):
        dims = (0, *range(2, input.dim()))
        summed = sum_workspace(machine, grad_out, grad_out.dtype, channels, dims)
        return channels * input.element_size() + summed
    first = dense_bytes(outputs[0]) if norm.output_mask[0] else 0
    if not _is_channels_innermost_on_cpu(input):
        return first
    accumulated = channels * accumulation_type(input.dtype).itemsize
    parts = 3
    if accumulated == channels * input.element_size():
        parts = (norm.weight is None) + (not norm.trains)
    return max(first, (parts + 2 * machine.threads) * accumulated)


@operator("aten::native_batch_norm_backward").workspace("cuda")
def backward_workspace_on_cuda(
    norm: BatchNormBackward, save_invstd: Tensor | None
) -> tuple[Request, ...]:
    """Channels last: sums of channels and of blocks, and the statistics that cuDNN does not save in
    evaluation; else what does not lie as (batch, channels, pixels) is copied;
    ``batch_norm_backward_cuda``. Of another gradient than channels last 1 stands for no weight.
    """
    grad_out, input, output_mask = norm.grad_out, norm.input, norm.output_mask
    reduces = norm.trains or output_mask[1] or output_mask[2]
    last = is_channels_innermost_on_cuda(input)
    if reduces and output_mask[0] and not last:
        return (_pixels_copy(input), _pixels_copy(grad_out), ALL)
    each = input.shape[1] * accumulation_type(input.dtype).itemsize
    statistics = each if save_invstd is not None and not save_invstd.numel() else 0
    if not reduces:
        return (statistics,)
    if last and is_channels_innermost_on_cuda(grad_out):
        return (statistics, each, each, Made(1), Made(2), *passing(*staging(input, 2)), Made(0))
    one = accumulation_type(input.dtype).itemsize if norm.weight is None and norm.trains else 0
    return (statistics, each, each, Made(1), Made(2), one, ALL)


@operator("aten::batch_norm_backward", not_in_key=("reserve",)).workspace("cuda")
def with_update_backward_workspace_on_cuda(
    norm: BatchNormBackward, save_var: Tensor | None
) -> Workspace | tuple[Request, ...]:
    """The one of cuDNN or ATen's own, as the forward was; ``_new_batch_norm_backward_cuda``."""
    if cudnn_takes(BatchNorm(norm.input, norm.weight, None, norm.running_mean, norm.running_var)):
        return unknown(contiguous_copy(norm.grad_out, suggested_format(norm.input)))
    return backward_workspace_on_cuda(norm, save_var)


def _pixels_copy(tensor: Tensor) -> int:
    """Bytes that ``reshape((batch, channels, -1))`` copies: 0 where a view will do."""
    merged = zip(tensor.shape[2:-1], tensor.stride()[2:-1], strict=True)
    inner = zip(tensor.shape[3:], tensor.stride()[3:], strict=True)
    for (size, stride), (next_size, next_stride) in zip(merged, inner, strict=True):
        if size != 1 and next_size != 1 and stride != next_size * next_stride:
            return dense_bytes(tensor)
    return 0


def _is_channels_innermost_on_cpu(tensor: Tensor) -> bool:
    """Channels last, or one element per channel; of one channel it is images that are walked."""
    if tensor.is_contiguous():
        return tensor.numel() == tensor.shape[0] * tensor.shape[1]
    return is_channels_last(tensor)


def is_channels_innermost_on_cuda(tensor: Tensor) -> bool:
    """``batch_norm_use_channels_last_kernels``: also (batch, channels)."""
    return is_channels_last(tensor) or (
        tensor.is_contiguous() and tensor.numel() == tensor.shape[0] * tensor.shape[1]
    )


def staging(input: Tensor, copies: int) -> tuple[int, ...]:
    """Blocks' partial results and semaphores; ``flexible_launch_configs``."""
    channels = input.shape[1]
    rows = input.numel() // channels if channels else 0
    width = min(last_power(channels), 32)
    height = min(last_power(ceil_div(rows, 16)), 512 // width)
    if width * height != 512:
        width = min(last_power(channels), 512 // height)
    across = ceil_div(channels, width)
    down = min(ceil_div(rows, height * 16), 128)
    if down < 8:
        return ()
    size = accumulation_type(input.dtype).itemsize
    return (copies * channels * down * size, across * INT)


# -- over several processes: what ``nn.SyncBatchNorm`` calls on the GPU ----------------------------
# torch/nn/modules/_functions.py, ``SyncBatchNorm``; native/cuda/Normalization.cu.

_statistics = operator("aten::batch_norm_stats", "aten::batch_norm_update_stats")


@_statistics.workspace("cuda")
@operator("aten::batch_norm_backward_reduce").workspace("cuda")
def sums_of_blocks(input: Tensor, grad_out: Tensor | None = None) -> Workspace | tuple[int, ...]:
    """As forward and backward in training; native/cuda/Normalization.cu, ``batch_norm_mean_var``,
    ``batch_norm_backward_reduce_cuda``.
    """
    read = [input] if grad_out is None else [input, grad_out]
    if all(map(is_channels_innermost_on_cuda, read)):
        return staging(input, 4 if grad_out is None else 2)
    return () if all(one.is_contiguous() for one in read) else unknown()


@_statistics.meta()
def batch_norm_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu: float for 16-bit inputs."""
    dtype = torch.float32 if input.dtype.itemsize == 2 else input.dtype
    shape = (input.shape[1],)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


operator("batch_norm_gather_stats batch_norm_gather_stats_with_counts").meta()(
    lambda mean: (like(mean, mean.shape[1:]), like(mean, mean.shape[1:]))
)
operator("batch_norm_elemt batch_norm_backward_elemt").meta()(lambda input: lying_alike(input))


class Reduced(NamedTuple):
    """What is asked of sums over the batch, by the names of the schema's arguments."""

    mean: Tensor
    weight: Tensor | None
    input_g: bool
    weight_g: bool
    bias_g: bool

    def wanted(self, *sums: Tensor) -> tuple[Tensor | None, ...]:
        """Return those of two ``sums`` and of two gradients of parameters that are asked for."""
        return asked_for(sums, (self.input_g, self.input_g, self.weight_g, self.bias_g))

    @property
    def parameter(self) -> Tensor:
        """What gradients of parameters are like."""
        return self.mean if self.weight is None else self.weight


@operator("aten::batch_norm_backward_reduce").meta()
def batch_norm_backward_reduce(reduced: Reduced) -> tuple[Tensor | None, ...]:
    """native/cuda/Normalization.cu."""
    mean, parameter = reduced.mean, reduced.parameter
    return reduced.wanted(like(mean), like(mean), like(parameter), like(parameter))


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
    """Of all processes, and the running ones moved on; ``batch_norm_reduce_statistics_kernel``."""
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


@operator("aten::batch_norm_backward_reduce").values("cuda")
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
