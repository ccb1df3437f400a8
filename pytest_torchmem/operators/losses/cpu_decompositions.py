"""Losses: that of every element first, then their mean; native/Loss.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator

_MEAN, _SUM = 1, 2


@operator("aten::binary_cross_entropy").decomposition("cpu")
def binary_cross_entropy(
    self: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """binary_cross_entropy_out_cpu: a reduced loss keeps the storage of all elements."""
    loss = torch.empty_like(self)
    if weight is not None:
        loss.mul_(weight)
    if reduction in (_MEAN, _SUM):
        reduced = loss.mean() if reduction == _MEAN else loss.sum()
        loss.resize_(()).copy_(reduced)
    return loss


@operator("aten::binary_cross_entropy_backward").decomposition("cpu")
def binary_cross_entropy_backward(
    self: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """binary_cross_entropy_backward_out_cpu."""
    result = torch.empty_like(self)
    if weight is not None:
        result.mul_(weight)
    if reduction == _MEAN:
        result.div_(self.numel())
    return result
