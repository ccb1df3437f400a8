"""Gathering, scattering and counting elements."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.profiler.bodies import body
from pytest_torchmem.profiler.devices.host import Host


@body("aten::index_reduce_")
def index_reduce_(
    machine: Host,
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


@body("aten::index_reduce")
def index_reduce(
    machine: Host,
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """As in place, on a copy."""
    result = torch.empty_like(self)
    return index_reduce_(machine, result, dim, index, source, reduce, include_self=include_self)
