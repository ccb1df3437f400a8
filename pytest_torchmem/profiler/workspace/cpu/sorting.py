"""Sorting and order statistics on the CPU; native/Sorting.cpp, native/cpu/SortingKernel.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.host import Host
from pytest_torchmem.profiler.workspace import workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import (
    contiguous_copy,
    dense_bytes,
    transpose_scratch,
)

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
