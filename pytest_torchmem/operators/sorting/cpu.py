"""Sorting and order statistics on the CPU; native/Sorting.cpp, native/cpu/SortingKernel.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    dense_bytes,
    output_bytes,
    transpose_scratch,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

_INDEX = 8


@operator("aten::sort").workspace("cpu")
def sort(input: Tensor, dim: int = -1) -> int:
    """Keys and indices of one row, moved together; sort_stable_kernel.

    Rows that other threads sort are not seen by the allocator's observer.
    """
    if input.dim() == 0 or input.numel() == 0:
        return 0
    size = int(input.shape[dim])
    return size * _INDEX if size > 1 else 0


@operator("aten::kthvalue").workspace("cpu")
def kthvalue(input: Tensor) -> int:
    """A copy of the values and their indices, to be partitioned; kthvalue_out_impl_cpu."""
    if input.dim() == 0:
        return 0
    return dense_bytes(input) + input.numel() * _INDEX


@operator("aten::median", "aten::nanmedian").workspace("cpu")
def median(input: Tensor, dim: int | None = None) -> int:
    """Over everything a clone; over a dimension a copy unless it is dense along it already."""
    if dim is None:
        return dense_bytes(input) + transpose_scratch(input)
    if input.dim() == 0:
        return 0
    rows = input.transpose(dim, -1)
    copied = contiguous_copy(rows)
    return copied + transpose_scratch(rows) if copied else 0


def _distinct(machine: Host, outputs: Sequence[Tensor], input: Tensor, counts: bool) -> int:
    if input.dtype == torch.bool or not input.numel():
        return 0
    elements, copied = input.numel(), contiguous_copy(input)
    in_order = copied + dense_bytes(input) + elements * _INDEX
    sorting = elements * _INDEX - output_bytes(outputs)
    places = (outputs[0].numel() + 1) * _INDEX if counts else 0
    return in_order + max(sorting, places, 0)


@operator("aten::_unique2").workspace("cpu")
def unique(
    machine: Host, outputs: Sequence[Tensor], input: Tensor, return_counts: bool = False
) -> int:
    """All elements in order and where they were, then where each distinct one begins;
    native/Unique.cpp, unique_cpu_sorted_template.
    """
    return _distinct(machine, outputs, input, return_counts)


@operator("aten::_unique").workspace("cpu")
def unique_without_counts(machine: Host, outputs: Sequence[Tensor], input: Tensor) -> int:
    """The same kernel as _unique2."""
    return _distinct(machine, outputs, input, False)


@operator("aten::unique_dim").workspace("cpu")
def unique_slices(input: Tensor, dim: int) -> int:
    """Slices as rows, and the rows in order; native/Unique.cpp, _unique_dim_cpu_template."""
    return contiguous_copy(input.movedim(dim, 0)) + dense_bytes(input)


@operator("aten::unique_consecutive").workspace("cpu")
def unique_consecutive(input: Tensor, dim: int | None = None) -> int:
    """A dense copy, of slices as rows where there is a dimension; native/Unique.cpp."""
    return contiguous_copy(input if dim is None else input.movedim(dim, 0))


@operator("aten::unique_dim_consecutive").workspace("cpu")
def unique_consecutive_slices(input: Tensor, dim: int) -> int:
    """Slices as rows; native/Unique.cpp, _unique_dim_cpu_template."""
    return contiguous_copy(input.movedim(dim, 0))
