"""cuDNN's batch normalization, and when it is taken; native/cudnn/BatchNorm.cpp.

ATen asks cuDNN for the sizes of a workspace and of a reserve, which it tells on a GPU alone. Both
are nothing for what is not channels last: «this API will function exactly like the non-extended
function» (documentation of ``cudnnBatchNormalizationForwardTrainingEx``), which has neither.
Channels last have bounds.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.geometry import (
    accumulation_type,
    contiguous_copy,
    is_channels_last,
    laid_out,
    suggested_format,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu

_CUDNN_INDEX = 1
#: cuDNN's spatial persistent mode takes at most this many images (native/Normalization.cpp).
_LARGEST_TRAINING_BATCH = 880801
_LARGEST_EVALUATION_BATCH = 65535

# The backward needs an output of the forward whose size cuDNN alone decides.
_forward = operator(
    "aten::cudnn_batch_norm",
    library_output=3,
    also_writes=("running_mean", "running_var"),
    order={"cuda": (0, 3, 1, 2)},
)
_backward = operator("aten::cudnn_batch_norm_backward", not_in_key=("reserveSpace",))


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
        return _of_nothing(input, weight, bias)
    taken = cudnn_takes(norm)
    if weight is None or bias is None or not cudnn_enabled or not taken:
        return call()
    output, save_mean, save_variance, reserve = torch.ops.aten.cudnn_batch_norm.default(
        input.contiguous(memory_format=suggested_format(input)),
        weight.contiguous(),
        bias.contiguous(),
        *(None if one is None else one.contiguous() for one in norm.statistics),
        norm.training,
        momentum,
        eps,
    )
    return output, save_mean, save_variance, reserve, _CUDNN_INDEX


def _of_nothing(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    """Statistics in the type that a GPU accumulates in, and a result with a gradient."""
    dtype = accumulation_type(input.dtype)
    reserve = input.new_empty((0,), dtype=torch.uint8)
    mean, deviation = (input.new_empty((input.shape[1],), dtype=dtype) for _ in range(2))
    output = input.clone()
    output = output if weight is None else output * weight[0]
    return output if bias is None else output + bias[0], mean, deviation, reserve, 0


@_forward.meta("cuda")
def outputs(input: Tensor, weight: Tensor, training: bool) -> tuple[Tensor, ...]:
    """The output, statistics of the batch in training, and the reserve; ``cudnn_batch_norm``.

    Of the reserve at most: it is there for the mask of a fused ReLU, a bit for each element.
    """
    channels = input.shape[1] if training else 0
    reserve = -(-input.numel() // 8) if training and is_channels_last(input) else 0
    return (
        laid_out(input, suggested_format(input)),
        weight.new_empty((channels,)),
        weight.new_empty((channels,)),
        input.new_empty((reserve,), dtype=torch.uint8),
    )


@_forward.workspace("cuda")
def workspace(machine: Gpu, input: Tensor, training: bool) -> Workspace | tuple[int, ...]:
    """A copy in the suggested format, and in training of channels last the sums of blocks.

    In evaluation cuDNN is given no workspace.
    """
    copied = contiguous_copy(input, suggested_format(input))
    return bounded(copied, _sums_of_blocks(machine, input)) if training else (copied,)


@_backward.meta("cuda")
def gradients(input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """That of the input in its suggested format, and two like the weight."""
    of_weight, of_bias = (weight.new_empty(weight.shape) for _ in range(2))
    return laid_out(input, suggested_format(input)), of_weight, of_bias


@_backward.workspace("cuda")
def backward_workspace(machine: Gpu, input: Tensor, grad_output: Tensor) -> Workspace:
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


@_forward.values()
def forward_values(
    norm: BatchNorm, exponential_average_factor: float, epsilon: float
) -> tuple[Any, ...]:
    """As ATen's own; the reserve is nobody's to read."""
    return (*torch.native_batch_norm(*norm, exponential_average_factor, epsilon), None)


@_backward.values()
def backward_values(
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
