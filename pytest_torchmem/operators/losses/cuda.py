"""Losses: every element's loss before they are added up, and what is copied to be read.

native/Loss.cpp, native/cuda/Loss.cu, NLLLoss2d.cu, LossCTC.cu.
"""

from __future__ import annotations

from torch import Tensor

from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    dense_bytes,
)
from pytest_torchmem.operators.reduction.cuda_buffers import sum_buffers
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, unknown
from pytest_torchmem.targets.gpus import Gpu

_NONE, _MEAN = 0, 1
_LONG = 8


@operator("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss").workspace("cuda")
def elementwise_loss(machine: Gpu, input: Tensor, reduction: int = _MEAN) -> tuple[int, ...]:
    """All elements' losses, and the reduction of them; exact, native/Loss.cpp."""
    if reduction == _NONE:
        return ()
    return (dense_bytes(input), *sum_buffers(machine, (input.numel(),), None, input.dtype))


@operator("aten::binary_cross_entropy").workspace("cuda")
def binary_cross_entropy(machine: Gpu, input: Tensor, reduction: int = _MEAN) -> tuple[int, ...]:
    """A number and its reduction: all elements' losses are the output, which is then resized.

    Exact, Loss.cu, ``binary_cross_entropy_out_cuda``.
    """
    if reduction == _NONE:
        return ()
    number = input.element_size()
    return (number, *sum_buffers(machine, (input.numel(),), None, input.dtype))


@operator("aten::nll_loss_forward", "aten::nll_loss_backward").workspace("cuda")
def nll_loss(tensors: list[Tensor]) -> tuple[int, ...]:
    """Dense copies of all it reads; exact, Loss.cu, ``nll_loss_forward_out_cuda_template``."""
    return tuple(map(contiguous_copy, tensors))


@operator("aten::nll_loss2d_forward").workspace("cuda")
def nll_loss2d(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> tuple[int, ...]:
    """Dense copies; exact, NLLLoss2d.cu, ``nll_loss2d_forward_out_cuda_template``."""
    if reduction == _NONE:
        return (contiguous_copy(weight),)
    return (contiguous_copy(input), contiguous_copy(target), contiguous_copy(weight))


@operator("aten::nll_loss2d_backward").workspace("cuda")
def nll_loss2d_backward(target: Tensor, weight: Tensor | None) -> tuple[int, ...]:
    """Dense copies; exact, NLLLoss2d.cu, ``nll_loss2d_backward_out_cuda_template``."""
    return (contiguous_copy(target), contiguous_copy(weight))


@operator("aten::_ctc_loss").workspace("cuda")
def ctc_loss(log_probs: Tensor, targets: Tensor) -> tuple[int, ...]:
    """Lengths and offsets on the device; exact, LossCTC.cu, ``ctc_loss_gpu_template``."""
    lengths = log_probs.shape[1] * _LONG
    return (contiguous_copy(log_probs), contiguous_copy(targets), lengths, lengths, lengths)


@operator("aten::_ctc_loss_backward").workspace("cuda")
def ctc_loss_backward(log_probs: Tensor, log_alpha: Tensor) -> tuple[int, ...]:
    """``log_beta``, as large as ``log_alpha``, and the lengths; exact, LossCTC.cu,
    ``ctc_loss_backward_gpu_template``.
    """
    lengths = log_probs.shape[1] * _LONG
    return (dense_bytes(log_alpha), lengths, lengths, lengths)


@operator("aten::_cudnn_ctc_loss").workspace("cuda")
def cudnn_ctc_loss() -> Workspace:
    """``cudnnGetCTCLossWorkspaceSize``, which cuDNN alone knows; native/cudnn/LossCTC.cpp."""
    return unknown()
