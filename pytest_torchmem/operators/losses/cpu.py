"""Losses and dropout on the CPU: the loss of every element, before they are added up."""

from __future__ import annotations

from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.reduction.cpu_buffers import mean_workspace, partial_results
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

_SCALAR = 8
_NONE, _MEAN = 0, 1


@operator("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss").workspace("cpu")
def elementwise_loss(machine: Host, input: Tensor, reduction: int = _MEAN) -> int:
    """All elements' losses, and what dividing by their number takes; native/Loss.cpp."""
    if reduction == _NONE:
        return 0
    whole = dense_bytes(input)
    if reduction != _MEAN:
        return whole + partial_results(machine, input.numel(), 1, input.element_size())
    return whole + mean_workspace(machine, input, input.dtype, 1)


@operator("aten::native_dropout_backward").workspace("cpu")
def native_dropout_backward(grad_output: Tensor, mask: Tensor) -> int:
    """The mask as numbers, then scaled; native/Dropout.cpp, native_dropout_backward."""
    return mask.numel() * grad_output.element_size() + _SCALAR + grad_output.element_size()


@operator("aten::_ctc_loss_backward").workspace("cpu")
def ctc_loss_backward(log_alpha: Tensor) -> int:
    """``log_beta``, as large as ``log_alpha``; native/LossCTC.cpp."""
    return dense_bytes(log_alpha)


@operator("aten::nll_loss2d_forward").workspace("cpu")
def nll_loss2d(input: Tensor, reduction: int) -> int:
    """A dense copy of the scores; native/NLLLoss2d.cpp."""
    return 0 if reduction == _NONE else contiguous_copy(input)
