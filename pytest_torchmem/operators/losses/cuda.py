"""Losses: every element's loss before they are added up, and what is copied to be read.

native/Loss.cpp, native/cuda/Loss.cu, NLLLoss2d.cu, LossCTC.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.operators.geometry import (
    Outputs,
    contiguous_copy,
    dense_bytes,
)
from pytest_torchmem.operators.reduction.cuda import sum_buffers
from pytest_torchmem.operators.workspace import Workspace, unknown, workspace
from pytest_torchmem.targets.gpus import Gpu

_NONE, _MEAN = 0, 1
_LONG = 8


@workspace("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", device="cuda")
def elementwise_loss(
    gpu: Gpu,
    outputs: Tensor,
    input: Tensor,
    target: Tensor,
    reduction: int = _MEAN,
    *parameters: float,
    **named: float,
) -> tuple[int, ...]:
    """All elements' losses, and the reduction of them; exact, native/Loss.cpp."""
    if reduction == _NONE:
        return ()
    return (dense_bytes(input), *sum_buffers(gpu, (input.numel(),), None, input.dtype))


@workspace("aten::binary_cross_entropy", device="cuda")
def binary_cross_entropy(
    gpu: Gpu,
    outputs: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> tuple[int, ...]:
    """A number and its reduction: all elements' losses are the output, which is then resized.

    Exact, Loss.cu, ``binary_cross_entropy_out_cuda``.
    """
    if reduction == _NONE:
        return ()
    number = input.element_size()
    return (number, *sum_buffers(gpu, (input.numel(),), None, input.dtype))


@workspace("aten::nll_loss_forward", "aten::nll_loss_backward", device="cuda")
def nll_loss(gpu: Gpu, outputs: Outputs, *arguments: object) -> tuple[int, ...]:
    """Dense copies of all it reads; exact, Loss.cu, ``nll_loss_forward_out_cuda_template``."""
    tensors = [found for found in arguments if isinstance(found, Tensor)]
    return tuple(map(contiguous_copy, tensors))


@workspace("aten::nll_loss2d_forward", device="cuda")
def nll_loss2d(
    gpu: Gpu, outputs: Outputs, input: Tensor, target: Tensor, weight: Tensor | None, *rest: int
) -> tuple[int, ...]:
    """Dense copies; exact, NLLLoss2d.cu, ``nll_loss2d_forward_out_cuda_template``."""
    if rest and rest[0] == _NONE:
        return (contiguous_copy(weight),)
    return (contiguous_copy(input), contiguous_copy(target), contiguous_copy(weight))


@workspace("aten::nll_loss2d_backward", device="cuda")
def nll_loss2d_backward(
    gpu: Gpu,
    outputs: Tensor,
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *rest: object,
) -> tuple[int, ...]:
    """Dense copies; exact, NLLLoss2d.cu, ``nll_loss2d_backward_out_cuda_template``."""
    return (contiguous_copy(target), contiguous_copy(weight))


@workspace("aten::_ctc_loss", device="cuda")
def ctc_loss(
    gpu: Gpu,
    outputs: Outputs,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int] | Tensor,
    *rest: object,
) -> tuple[int, ...]:
    """Lengths and offsets on the device; exact, LossCTC.cu, ``ctc_loss_gpu_template``."""
    lengths = log_probs.shape[1] * _LONG
    return (contiguous_copy(log_probs), contiguous_copy(targets), lengths, lengths, lengths)


@workspace("aten::_ctc_loss_backward", device="cuda")
def ctc_loss_backward(
    gpu: Gpu,
    outputs: Tensor,
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int] | Tensor,
    target_lengths: Sequence[int] | Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    *rest: object,
) -> tuple[int, ...]:
    """``log_beta``, as large as ``log_alpha``, and the lengths; exact, LossCTC.cu,
    ``ctc_loss_backward_gpu_template``.
    """
    lengths = log_probs.shape[1] * _LONG
    return (dense_bytes(log_alpha), lengths, lengths, lengths)


@workspace("aten::_cudnn_ctc_loss", device="cuda")
def cudnn_ctc_loss(gpu: Gpu, outputs: Outputs, *arguments: object, **options: object) -> Workspace:
    """``cudnnGetCTCLossWorkspaceSize``, which cuDNN alone knows; native/cudnn/LossCTC.cpp."""
    return unknown()
