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


def _distinct(elements: Tensor, with_places: bool) -> tuple[Tensor, Tensor | None]:
    """``_unique`` of a vector in which nothing comes twice, which only values would tell."""
    in_order = elements.sort()
    values = torch.empty_like(elements)
    places = torch.empty((elements.numel(),), dtype=torch.int64) if with_places else None
    del in_order
    return values, places


@operator("aten::isin.Tensor_Tensor").decomposition("cpu")
def isin(elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False) -> Tensor:
    """native/TensorCompare.cpp, isin_Tensor_Tensor_out: few are compared one by one, many are
    sorted together.
    """
    result = torch.empty(elements.shape, dtype=torch.bool)
    if test_elements.numel() < int(10.0 * elements.numel() ** 0.145) or not elements.numel():
        return result
    flat, tested = elements.reshape(-1), test_elements.reshape(-1)
    places = None
    if not assume_unique:
        flat, places = _distinct(flat, True)
        tested, _ = _distinct(tested, False)
    together = torch.cat([flat, tested])
    del flat, tested
    in_order = together.sort(stable=True)
    repeated = torch.empty(together.shape, dtype=torch.bool)
    repeated[:-1].copy_(in_order[0][1:] == in_order[0][:-1])
    found = torch.empty_like(repeated)
    found.index_copy_(0, in_order[1], repeated)
    if places is not None:
        result.copy_(found[places].view_as(result))
    return result
