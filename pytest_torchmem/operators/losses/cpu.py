"""Losses and dropout on the CPU: the loss of every element, before they are added up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.reduction.cpu import mean_workspace, partial_results
from pytest_torchmem.operators.workspace import workspace
from pytest_torchmem.targets.host import Host

_SCALAR = 8
_NONE, _MEAN = 0, 1


@workspace("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", device="cpu")
def elementwise_loss(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    target: Tensor,
    reduction: int = _MEAN,
    *parameters: float,
) -> int:
    """All elements' losses, and what dividing by their number takes; native/Loss.cpp."""
    if reduction == _NONE:
        return 0
    whole = dense_bytes(input)
    if reduction != _MEAN:
        return whole + partial_results(machine, input.numel(), 1, input.element_size())
    return whole + mean_workspace(machine, input, input.dtype, 1)


@workspace("aten::native_dropout_backward", device="cpu")
def native_dropout_backward(
    machine: Host, outputs: Tensor, grad_output: Tensor, mask: Tensor, scale: float
) -> int:
    """The mask as numbers, then scaled; native/Dropout.cpp, native_dropout_backward."""
    return mask.numel() * grad_output.element_size() + _SCALAR + grad_output.element_size()


@workspace("aten::_ctc_loss_backward", device="cpu")
def ctc_loss_backward(
    machine: Host,
    outputs: Tensor,
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int] | Tensor,
    target_lengths: Sequence[int] | Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> int:
    """``log_beta``, as large as ``log_alpha``; native/LossCTC.cpp."""
    return dense_bytes(log_alpha)


@workspace("aten::nll_loss2d_forward", device="cpu")
def nll_loss2d(machine: Host, outputs: object, input: Tensor, *arguments: object) -> int:
    """A dense copy of the scores; native/NLLLoss2d.cpp."""
    reduction = arguments[2] if len(arguments) > 2 else _MEAN
    return 0 if reduction == _NONE else contiguous_copy(input)
