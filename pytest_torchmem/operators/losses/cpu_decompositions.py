"""Losses: that of every element first, then their mean; native/Loss.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.cpu_bodies import body
from pytest_torchmem.targets.host import Host

_MEAN, _SUM = 1, 2


@body("aten::binary_cross_entropy")
def binary_cross_entropy(
    machine: Host,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """binary_cross_entropy_out_cpu: a reduced loss keeps the storage of all elements."""
    loss = torch.empty_like(self)
    if weight is not None:
        loss.mul_(weight)
    if reduction in (_MEAN, _SUM):
        reduced = loss.mean() if reduction == _MEAN else loss.sum()
        loss.resize_(()).copy_(reduced)
    return loss


@body("aten::binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    machine: Host,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """binary_cross_entropy_backward_out_cpu."""
    result = torch.empty_like(self)
    if weight is not None:
        result.mul_(weight)
    if reduction == _MEAN:
        result.div_(self.numel())
    return result
