"""Sorting, selecting and prefix sums; limits wherever CUB takes part.

native/cuda/Sort.cpp, SortStable.cu, TensorTopK.cu, Sorting.cpp, ScanKernels.cpp, Unique.cu,
MultinomialKernel.cu and Randperm.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    Outputs,
    contiguous_copy,
    dense_bytes,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.cuda_buffers import dense_strides, reduced
from pytest_torchmem.operators.registry import operator
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


@operator("aten::sort").workspace("cuda")
def sort(machine: Gpu, input: Tensor, dim: int = -1) -> Workspace | tuple[int, ...]:
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
    blocks = slices * -(-size // (4 * 256))
    state = slices * (input.element_size() + 4 + 4 + 8) + blocks * (256 * 2 + 4 + 4)
    own = state + 2 * cub.scan(blocks)
    return bounded(copy, max(own, sum(ordering)))


@operator("aten::kthvalue", "aten::median", "aten::nanmedian").workspace("cuda")
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
    """A dense copy with the dimension last; long slices are sorted. TensorModeKernel.cpp."""
    if not input.dim() or not input.numel():
        return ()
    size = input.shape[dim]
    copy = dense_bytes(input.transpose(dim, -1)) if dim % input.dim() != input.dim() - 1 else 0
    copy = max(copy, contiguous_copy(input))
    if size <= 2048:
        return (copy,)
    scratch = 2 * size * _LONG + size * input.element_size()
    return bounded(copy, scratch, cub.radix_sort_pairs(machine, size, input.element_size(), _LONG))


@operator("aten::cumsum", "aten::cumsum_", "aten::cumprod", "aten::cumprod_").workspace("cuda")
def cumulative(outputs: Tensor, input: Tensor, dim: int) -> Workspace | tuple[int, ...]:
    """Copies of another type or not dense; of one dimension CUB's tiles. ScanKernels.cpp,
    ``scan_dim``.
    """
    other = dense_bytes(input, outputs.dtype) if input.dtype != outputs.dtype else 0
    copies = (other or contiguous_copy(input),)
    if input.numel() and input.numel() == (input.shape[dim] if input.dim() else 1):
        return bounded(*copies, cub.scan(input.numel()))
    return copies


@operator("aten::_logcumsumexp").workspace("cuda")
def logcumsumexp(outputs: Tensor, input: Tensor, dim: int) -> Workspace | tuple[int, ...]:
    """As a prefix sum; LogcumsumexpKernel.cu."""
    return cumulative(outputs, input, dim)


@operator("aten::_cummax_helper", "aten::_cummin_helper").workspace("cuda")
def cumulative_extreme(input: Tensor, values: Tensor, indices: Tensor) -> tuple[int, ...]:
    """Copies that are not dense; exact, ScanKernels.cpp, ``cummax_helper_cuda``."""
    return tuple(map(contiguous_copy, (input, values, indices)))


@operator("aten::_unique2", "aten::_unique", "aten::unique_consecutive").workspace("cuda")
def unique(machine: Gpu, input: Tensor) -> Workspace:
    """Sorted copies, positions and inverse; a limit. Unique.cu, ``unique_cuda_template``."""
    number, element = input.numel(), input.element_size()
    sort = cub.radix_sort_pairs(machine, number, element, _LONG)
    positions = number * _LONG
    values = number * element
    return bounded(contiguous_copy(input), values, positions, positions, positions, sort)


@operator("aten::isin").workspace("cuda")
def isin(
    machine: Gpu,
    outputs: Tensor,
    elements: Tensor | None = None,
    test_elements: Tensor | None = None,
    assume_unique: bool = False,
) -> Workspace | tuple[int, ...]:
    """Few are compared with every element, exactly; many are sorted together with them.

    native/TensorCompare.cpp, ``isin_Tensor_Tensor_out``; cuda/TensorCompare.cpp.
    """
    if elements is None or test_elements is None or not outputs.numel():
        return ()
    number, others = elements.numel(), test_elements.numel()
    if others < int(10 * number**0.145):
        shape = (number, others)
        strides = dense_strides(shape)
        return (number * others, number, *reduced(machine, shape, strides, 1, torch.bool, 1, 1, 4))
    both, size = number + others, elements.element_size()
    order = 0 if assume_unique else number * _LONG
    sort = cub.radix_sort_pairs(machine, both, size, _LONG)
    copies = (both * size, both * size, both * _LONG)
    return bounded(order, number * size, others * size, *copies, both * _LONG, sort)


@operator("aten::unique_dim").workspace("cuda")
def unique_dim(machine: Gpu, input: Tensor, dim: int) -> Workspace:
    """The input as rows, positions and their sort; a limit. Unique.cu,
    ``unique_dim_cuda_template``.
    """
    rows = input.shape[dim] if input.dim() else 1
    positions = rows * _LONG
    sort = cub.radix_sort_pairs(machine, rows, _LONG, _LONG)
    copies = (dense_bytes(input), dense_bytes(input))
    return bounded(*copies, positions, positions, positions, sort)


@operator("aten::multinomial").workspace("cuda")
def multinomial(
    machine: Gpu, input: Tensor, num_samples: int, replacement: bool = False
) -> Workspace | tuple[int, ...]:
    """Without replacement or of one sample: exponential numbers, and the largest of them.

    native/Distributions.cpp, ``multinomial_out``; with replacement MultinomialKernel.cu.
    """
    whole = dense_bytes(input)
    if num_samples == 1:
        largest = reduced(machine, input.shape, input.stride(), -1, input.dtype, _LONG, 16, 4)
        return (whole, *largest)
    if not replacement:
        values = num_samples * (input.numel() // max(1, input.shape[-1])) * input.element_size()
        return bounded(whole, values, contiguous_copy(input))
    return bounded(whole, whole, whole)


@operator("aten::randperm").workspace("cuda")
def randperm(machine: Gpu, outputs: Tensor, n: int) -> Workspace | int:
    """Small ones come from the host; others are sorted by random keys. Randperm.cu."""
    if n < 30_000:
        return 0
    keys, values = n * _LONG, n * outputs.element_size()
    sort = cub.radix_sort_pairs(machine, n, _LONG, outputs.element_size())
    return bounded(keys, keys, values, sort)


@operator("aten::searchsorted", "aten::bucketize").workspace("cuda")
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
    converted = [dense_bytes(found, common) for found in given if found.dtype != common]
    return (*map(contiguous_copy, (*given, sorter)), *converted)


@operator("aten::repeat_interleave").workspace("cuda")
def repeat_interleave(repeats: Tensor) -> Workspace | int:
    """A prefix sum of the counts; a limit. native/Repeat.h, ``repeat_interleave_common``."""
    number = repeats.numel()
    copies = contiguous_copy(repeats)
    return bounded(copies, number * _LONG, cub.scan(number))


@operator("aten::bincount").workspace("cuda")
def bincount(weights: Tensor | None = None) -> tuple[int, ...]:
    """Counts in ``int64`` or a result in float; exact, SummaryOps.cu."""
    return (dense_bytes(weights) if weights is not None else 0,)
