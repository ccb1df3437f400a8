"""Gathering, scattering and counting elements."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator


@operator("aten::index_reduce_").decomposition("cpu")
def index_reduce_(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """A mean counts what it adds up; native/TensorAdvancedIndexing.cpp,
    index_reduce_func_impl.
    """
    if reduce == "mean":
        counts = torch.ones_like(self) if include_self else torch.zeros_like(self)
        counts.index_add_(dim, index, torch.ones_like(source))
        counts.masked_fill_(counts == 0, 1)
        if self.is_floating_point():
            self.div_(counts)
    return self


@operator("aten::index_reduce").decomposition("cpu")
def index_reduce(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """As in place, on a copy; native/TensorAdvancedIndexing.cpp, index_reduce_cpu_out."""
    result = torch.empty_like(self)
    return index_reduce_(result, dim, index, source, reduce, include_self=include_self)
