"""Sorting, searching and order statistics; on CUDA limits wherever CUB takes part.

native/Sorting.cpp, native/cpu/SortingKernel.cpp; native/cuda/Sort.cpp, SortStable.cu,
TensorTopK.cu, Sorting.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.formats import CONTIGUOUS, copied, dense_copy
from pytest_torchmem.operators.geometry import (
    Outputs,
    ceil_div,
    contiguous_copy,
    dense_bytes,
    transpose_scratch,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import UnknownOutputs, operator
from pytest_torchmem.operators.workspace import Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu

_LONG = 8
_SMALL_SORT = 4096
_LARGE_SEGMENT = 1_000_000
_FEW_SEGMENTS = 128
_MOST_AT_ONCE = 2**31 - 1
_MULTIBLOCK = (
    (20, 20_000),
    (40, 10_000),
    (80, 8_000),
    (200, 5_000),
    (800, 3_000),
    (4_000, 800),
)


def sort_bytes(gpu: Gpu, input: Tensor, dim: int) -> tuple[int, ...]:
    """Return at most what sorting along ``dim`` takes beyond values and indices; nothing along up
    to 4,096 elements.

    Sort.cpp, ``sort_cuda_kernel``; SortStable.cu, ``launch_stable_sort_kernel``.
    """
    if not input.dim() or not input.numel():
        return ()
    size = input.shape[dim]
    if size <= _SMALL_SORT:
        return ()
    number, element = min(input.numel(), _MOST_AT_ONCE), input.element_size()
    segments = number // size
    copies: tuple[int, ...] = ()
    if input.stride(dim) != 1 or not input.is_contiguous():
        copies = (dense_bytes(input), dense_bytes(input), input.numel() * _LONG)
    if segments == 1 or size >= _LARGE_SEGMENT:
        return (*copies, size * _LONG, cub.radix_sort_pairs(gpu, size, element, _LONG))
    if segments < _FEW_SEGMENTS:
        pairs = number * _LONG
        sort = cub.radix_sort_pairs(gpu, number, element, _LONG)
        return (*copies, pairs, pairs, number * element, sort)
    return (*copies, number * _LONG, cub.segmented_sort_pairs(number, element, _LONG))


whole_sort = operator("aten::sort")
kth_value = operator("aten::kthvalue")
medians = operator("aten::median", "aten::nanmedian")
search = operator("aten::searchsorted")
bucketize = operator("aten::bucketize")
operator("aten::sort", "aten::sort.stable", "aten::topk", unknown_outputs=UnknownOutputs.POSITIONS)


@whole_sort.workspace("cpu")
def row_of_keys(input: Tensor, dim: int = -1) -> int:
    """Keys and indices of one row, moved together; sort_stable_kernel.

    Rows that other threads sort are not seen by the allocator's observer.
    """
    if input.dim() == 0 or input.numel() == 0:
        return 0
    size = input.shape[dim]
    return size * _LONG if size > 1 else 0


@whole_sort.workspace("cuda")
def sorted_by_kernel(machine: Gpu, input: Tensor, dim: int = -1) -> Workspace | tuple[int, ...]:
    """As ``sort_bytes``; in place a range of the indices, exactly; Sort.cpp,
    ``fillSliceWithIndex``.
    """
    size = input.shape[dim] if input.dim() and input.numel() else 0
    if size <= _SMALL_SORT:
        return (size * _LONG,)
    return bounded(*sort_bytes(machine, input, dim))


def _uses_sort(input: Tensor, dim: int) -> bool:
    """``should_use_sort``, TensorTopK.cpp."""
    size = input.shape[dim]
    return input.dtype != torch.bool and input.numel() // size <= 10 and size >= 100_000


@operator("aten::topk").workspace("cuda")
def topk(
    machine: Gpu,
    outputs: tuple[Tensor, Tensor],
    input: Tensor,
    k: int,
    dim: int = -1,
    sorted: bool = True,
) -> Workspace | tuple[int, ...]:
    """A full sort of few long slices; several blocks a slice; or one, exactly without anything.

    TensorTopK.cu, ``launch_gather_topk_kernel``, ``mbtopk::launch``.
    """
    if not input.dim() or not input.numel():
        return ()
    size = input.shape[dim]
    slices = input.numel() // size
    if _uses_sort(input, dim):
        whole = (dense_bytes(input), input.numel() * _LONG)
        return bounded(*whole, *sort_bytes(machine, input, dim))
    copy = contiguous_copy(input)
    ordering: tuple[int, ...] = ()
    if sorted and k > _SMALL_SORT:  # sorted values and indices beside those that were found
        values, indices = map(dense_bytes, outputs)
        ordering = (indices, values, max(indices, sum(sort_bytes(machine, outputs[0], dim))))
    least = next((least for most, least in _MULTIBLOCK if slices <= most), 400)
    if size < least:
        return bounded(copy, *ordering) if ordering else (copy,)
    blocks = slices * ceil_div(size, 4 * 256)
    state = slices * (input.element_size() + 4 + 4 + 8) + blocks * (256 * 2 + 4 + 4)
    own = state + 2 * cub.scan(blocks)
    return bounded(copy, max(own, sum(ordering)))


@kth_value.workspace("cpu")
def partitioned(input: Tensor) -> int:
    """A copy of the values and their indices, to be partitioned; kthvalue_out_impl_cpu."""
    if input.dim() == 0:
        return 0
    return dense_bytes(input) + input.numel() * _LONG


@medians.workspace("cpu")
def copy_to_partition(input: Tensor, dim: int | None = None) -> int:
    """Over everything a clone; over a dimension a copy unless it is dense along it already."""
    if dim is None:
        return dense_bytes(input) + transpose_scratch(input)
    if input.dim() == 0:
        return 0
    return dense_copy(input.transpose(dim, -1))


@kth_value.workspace("cuda")
@medians.workspace("cuda")
def selection(machine: Gpu, outputs: Outputs, input: Tensor) -> Workspace | tuple[int, ...]:
    """Selected from a dense copy along a dimension; of all elements sorted. Sorting.cpp."""
    if isinstance(outputs, Tensor) and input.numel():  # median of all elements
        flat = input.reshape(-1) if input.is_contiguous() else input.contiguous().view(-1)
        positions = input.numel() * _LONG
        sort = sort_bytes(machine, flat, 0)
        return bounded(contiguous_copy(input), dense_bytes(input), positions, *sort)
    return (contiguous_copy(input),)


@operator("aten::mode").workspace("cuda")
def mode(machine: Gpu, input: Tensor, dim: int = -1) -> Workspace | tuple[int, ...]:
    """A dense copy with the dimension last; long slices are sorted, always in a copy.

    TensorModeKernel.cpp, ``mode_kernel_impl``; TensorModeKernel.cu, ``ModeImpl``.
    """
    if not input.dim() or not input.numel():
        return ()
    size = input.shape[dim]
    copy = dense_bytes(input.transpose(dim, -1)) if dim % input.dim() != input.dim() - 1 else 0
    copy = max(copy, contiguous_copy(input))
    if size <= 2048:
        return (copy,)
    scratch = 2 * size * _LONG + size * input.element_size()
    copy = copy or dense_bytes(input)
    return bounded(copy, scratch, cub.radix_sort_pairs(machine, size, input.element_size(), _LONG))


search.workspace("cpu")(copied(sorted_sequence=CONTIGUOUS, self=CONTIGUOUS))


@search.workspace("cuda")
@bucketize.workspace("cuda")
def searchsorted(
    input: Tensor | float,
    sorted_sequence: Tensor | None = None,
    boundaries: Tensor | None = None,
    sorter: Tensor | None = None,
) -> tuple[int, ...]:
    """Dense copies, and the one of a lesser type in that of the other; exact,
    native/BucketizationUtils.h, ``searchsorted_maybe_trim_input_tensors``.
    """
    given = [found for found in (sorted_sequence, input, boundaries) if isinstance(found, Tensor)]
    common = torch.result_type(*given) if len(given) > 1 else given[0].dtype
    cast = [dense_bytes(found, common) for found in given if found.dtype != common]
    return (*map(contiguous_copy, (*given, sorter)), *cast)


@bucketize.workspace("cpu")
def bucket(input: Tensor | float, boundaries: Tensor) -> int:
    """The same copies; of a number a tensor; native/Bucketization.cpp, bucketize_cpu."""
    if not isinstance(input, Tensor):
        return converted(input, boundaries.dtype)
    return sum(searchsorted(input, boundaries=boundaries))
