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
from pytest_torchmem.operators.workspace import workspace
from pytest_torchmem.targets.host import Host

_INDEX = 8


@workspace("aten::sort", device="cpu")
def sort(
    machine: Host, outputs: object, input: Tensor, *arguments: object, **options: object
) -> int:
    """Keys and indices of one row, moved together; sort_stable_kernel.

    Rows that other threads sort are not seen by the allocator's observer.
    """
    stable_first = arguments and (arguments[0] is None or isinstance(arguments[0], bool))
    rest = arguments[1:] if stable_first and "stable" not in options else arguments
    dim = rest[0] if rest and isinstance(rest[0], int) else options.get("dim", -1)
    if input.dim() == 0 or input.numel() == 0 or not isinstance(dim, int):
        return 0
    size = int(input.shape[dim])
    return size * _INDEX if size > 1 else 0


@workspace("aten::kthvalue", device="cpu")
def kthvalue(
    machine: Host, outputs: object, input: Tensor, *arguments: object, **options: object
) -> int:
    """A copy of the values and their indices, to be partitioned; kthvalue_out_impl_cpu."""
    if input.dim() == 0:
        return 0
    return dense_bytes(input) + input.numel() * _INDEX


@workspace("aten::median", "aten::nanmedian", device="cpu")
def median(
    machine: Host, outputs: object, input: Tensor, *arguments: object, **options: object
) -> int:
    """Over everything a clone; over a dimension a copy unless it is dense along it already."""
    dim = arguments[0] if arguments else options.get("dim")
    if not isinstance(dim, int):
        return dense_bytes(input) + transpose_scratch(input)
    if input.dim() == 0:
        return 0
    rows = input.transpose(dim, -1)
    copied = contiguous_copy(rows)
    return copied + transpose_scratch(rows) if copied else 0


@workspace("aten::count_nonzero", device="cpu")
def count_nonzero(machine: Host, outputs: Tensor, input: Tensor, dim: object = None) -> int:
    """A mask, and the mask as int64; native/TensorAdvancedIndexing.cpp, count_nonzero."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return 0
    return input.numel() * (torch.bool.itemsize + torch.int64.itemsize)


def _distinct(machine: Host, outputs: Sequence[Tensor], input: Tensor, counts: bool) -> int:
    if input.dtype == torch.bool or not input.numel():
        return 0
    elements, copied = input.numel(), contiguous_copy(input)
    in_order = copied + dense_bytes(input) + elements * _INDEX
    sorting = elements * _INDEX - output_bytes(outputs)
    places = (outputs[0].numel() + 1) * _INDEX if counts else 0
    return in_order + max(sorting, places, 0)


@workspace("aten::_unique2", device="cpu")
def unique(
    machine: Host,
    outputs: Sequence[Tensor],
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> int:
    """All elements in order and where they were, then where each distinct one begins;
    native/Unique.cpp, unique_cpu_sorted_template.
    """
    return _distinct(machine, outputs, input, return_counts)


@workspace("aten::_unique", device="cpu")
def unique_without_counts(
    machine: Host, outputs: Sequence[Tensor], input: Tensor, *flags: bool
) -> int:
    """The same kernel as _unique2."""
    return _distinct(machine, outputs, input, False)


@workspace("aten::unique_dim", device="cpu")
def unique_slices(
    machine: Host, outputs: Sequence[Tensor], input: Tensor, dim: int, *flags: bool
) -> int:
    """Slices as rows, and the rows in order; native/Unique.cpp, _unique_dim_cpu_template."""
    return contiguous_copy(input.movedim(dim, 0)) + dense_bytes(input)


@workspace("aten::unique_consecutive", device="cpu")
def unique_consecutive(
    machine: Host,
    outputs: Sequence[Tensor],
    input: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> int:
    """A dense copy, of slices as rows where there is a dimension; native/Unique.cpp."""
    return contiguous_copy(input if dim is None else input.movedim(dim, 0))


@workspace("aten::unique_dim_consecutive", device="cpu")
def unique_consecutive_slices(
    machine: Host, outputs: Sequence[Tensor], input: Tensor, dim: int, *flags: bool
) -> int:
    """Slices as rows; native/Unique.cpp, _unique_dim_cpu_template."""
    return contiguous_copy(input.movedim(dim, 0))
