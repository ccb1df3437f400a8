"""Sorting, searching and order statistics; prefix sums, products and extremes.

native/Sorting.cpp, native/cpu/SortingKernel.cpp; native/cuda/Sort.cpp, SortStable.cu,
TensorTopK.cu, Sorting.cpp. native/ReduceOps.cpp, native/cuda/ScanKernels.cpp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.geometry import (
    CONTIGUOUS,
    HALVES,
    LONG,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
    dense_copy,
    is_dense,
    made_like,
    transpose_scratch,
    type_of_number,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import UnknownOutputs, operator
from pytest_torchmem.operators.workspace import ALL, Request, Workspace, bounded, passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.settings import prefers_deterministic

_SMALL_SORT = 4096
_LARGE_SEGMENT = 1_000_000
_FEW_SEGMENTS = 128
_MOST_AT_ONCE = 2**31 - 1
_TOPK_BLOCK = 256
_TOPK_RESIDENT = 65_536 // (40 * _TOPK_BLOCK)
"""Blocks that a multiprocessor's registers are enough for; ``get_items_per_thread``."""
_MULTIBLOCK = ((20, 20_000), (40, 10_000), (80, 8_000), (200, 5_000), (800, 3_000), (4_000, 800))


whole_sort = operator("aten::sort")


@whole_sort.workspace("cuda")
def sort_requests(
    machine: Gpu, input: Tensor, dim: int = -1, outputs: Sequence[Tensor] = ()
) -> tuple[int, ...]:
    """Return what sorting along ``dim`` into ``outputs``, or into dense ones, takes beyond them.

    Up to 4,096 elements are sorted in place, after a range of indices.
    Sort.cpp, ``sort_cuda_kernel``; SortStable.cu, ``launch_stable_sort_kernel``.
    """
    size = input.shape[dim] if input.dim() and input.numel() else 0
    if size <= _SMALL_SORT:
        return (size * LONG,)
    copies, strides = [0], input.stride()
    if not is_dense(input) or input.stride(dim) != 1:
        copies, strides = [dense_bytes(input)], _strides_with_last(input, dim)
    copies += [dense_bytes(made) for made in outputs if made.stride() != strides]
    number, element = min(input.numel(), _MOST_AT_ONCE), input.element_size()
    segments = number // size
    if segments == 1 or size >= _LARGE_SEGMENT:
        sort = passing(cub.radix_sort(machine, size, element, LONG))
        return (*copies, size * LONG, *sort * segments)
    if segments >= _FEW_SEGMENTS:
        return (*copies, number * LONG, cub.segmented_sort_pairs(number, element, LONG))
    by_value = passing(number * element, cub.radix_sort(machine, number, element, LONG))
    by_segment = cub.radix_sort(machine, number, LONG, bits=(segments - 1).bit_length())
    return (*copies, number * LONG, number * LONG, *by_value, by_segment)


def _strides_with_last(input: Tensor, dim: int) -> tuple[int, ...]:
    """Return dense strides in the input's own order, ``dim`` last; infer_dense_strides_dim_last."""
    own, dim = input.stride(), dim % input.dim()
    outwards = sorted(range(input.dim()), key=lambda axis: (axis == dim, -own[axis]))
    strides, size = [0] * input.dim(), 1
    for axis in reversed(outwards):
        strides[axis], size = size, size * input.shape[axis]
    return tuple(strides)


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
    return size * LONG if size > 1 else 0


@operator("aten::topk").workspace("cuda")
def topk(
    machine: Gpu,
    outputs: tuple[Tensor, Tensor],
    input: Tensor,
    k: int,
    dim: int = -1,
    sorted: bool = True,
) -> tuple[int, ...]:
    """Several blocks for a long slice, then a sort of many that were found.

    TensorTopK.cpp, ``topk_out_cuda``; TensorTopK.cu, ``launch_gather_topk_kernel``.
    """
    if not input.dim() or not input.numel() or not k:
        return ()
    size = input.shape[dim]
    slices = input.numel() // size
    found: tuple[int, ...] = (contiguous_copy(input),)
    if size >= next((least for most, least in _MULTIBLOCK if slices <= most), 400):
        found += passing(*_several_blocks(machine, slices, size, input.dtype))
    if not sorted or k <= _SMALL_SORT:
        return found
    values, indices = outputs
    sorting = passing(*sort_requests(machine, values, dim, outputs))
    return (*found, dense_bytes(indices), dense_bytes(values), *sorting, dense_bytes(indices))


def _several_blocks(gpu: Gpu, slices: int, size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """TensorTopK.cu, ``mbtopk::launch``: the value sought and what is known of it, twice, for each
    slice, digits and counts of every block, and prefix sums of the counts.
    """
    threads = gpu.multiprocessors * _TOPK_RESIDENT * _TOPK_BLOCK
    items = min(max(4, ceil_div(slices * size, threads)), 64)
    blocks = slices * ceil_div(size, items * _TOPK_BLOCK)
    known = 2 * slices * max(4, dtype.itemsize)
    state = (slices * dtype.itemsize, 2 * slices * 4, known)
    counts = (blocks * 256 * 2, slices * 256 * 4, blocks * 4, blocks * 4)
    sums = passing(cub.scan_by_key(gpu, blocks, 4))
    return (*state, *counts, *sums, *sums)


@kth_value.workspace("cpu")
def partitioned(input: Tensor) -> int:
    """A copy of the values and their indices, to be partitioned; kthvalue_out_impl_cpu."""
    if input.dim() == 0:
        return 0
    return dense_bytes(input) + input.numel() * LONG


@medians.workspace("cpu")
def copy_to_partition(input: Tensor, dim: int | None = None) -> int:
    """Over everything a clone; else a copy where elements are apart; median_with_indices_impl."""
    if dim is None:
        return dense_bytes(input) + transpose_scratch(input)
    if input.dim() == 0 or input.stride(dim) <= 1:
        return 0
    return dense_copy(input.movedim(dim, -1))


@kth_value.workspace("cuda")
@medians.workspace("cuda")
def selection(input: Tensor) -> tuple[Request, ...]:
    """Selected from a dense copy along a dimension. Sorting.cpp."""
    return (contiguous_copy(input), ALL)


@medians.decomposition("cuda")
def middle(call: GivenCall, input: Tensor) -> Tensor:
    """The middle one of all elements, sorted, or of those that are numbers; ``median_impl``."""
    if not input.numel():
        return torch.empty((), dtype=input.dtype)
    in_order = input.contiguous().view(-1).sort()[0]
    if call.overload is torch.ops.aten.median.default:
        of_last = torch.isnan(in_order[-1])
        result = torch.empty((), dtype=input.dtype)
        del of_last
        return result
    missing = torch.isnan(in_order)
    number = missing.sum()
    others = in_order.numel() - 1 - number
    half = others / 2
    place = half.to(torch.int64)
    del half, others, number, missing
    result = torch.empty((), dtype=input.dtype)
    del place
    return result


@operator("aten::mode").workspace("cuda")
def mode(machine: Gpu, input: Tensor, dim: int = -1) -> Workspace | tuple[int, ...]:
    """A dense copy with the dimension last; long slices are sorted one by one, always in a copy,
    and their runs counted: at most as many as there are elements. Of booleans those that are true
    are counted. Thrust merges numbers of 16 bits of c10's, in less than their runs take.

    TensorModeKernel.cpp, ``mode_kernel_impl``; TensorModeKernel.cu, ``ModeImpl``.
    """
    if not input.dim() or not input.numel():
        return ()
    size, element = input.shape[dim], input.element_size()
    copy = dense_bytes(input.transpose(dim, -1)) if dim % input.dim() != input.dim() - 1 else 0
    copy = max(copy, contiguous_copy(input))
    if size <= 2048:
        return (copy,)
    copy, slices = copy or dense_bytes(input), input.numel() // size
    found = cub.reduce(machine, size, 2 * LONG) + 2 * LONG
    if input.dtype is torch.bool:
        count = cub.reduce(machine, size, LONG) + LONG
        return (copy, *(passing(count) + passing(found)) * slices)
    sort = cub.sort_in_place(machine, size, element, LONG) if input.dtype not in HALVES else 0
    runs = size * (element + LONG) + found
    return bounded(copy, *passing(size * LONG, max(sort, runs)) * slices)


search.workspace("cpu")(copied(sorted_sequence=CONTIGUOUS, self=CONTIGUOUS))


@search.workspace("cuda")
@bucketize.workspace("cuda")
def searchsorted(
    input: Tensor | float,
    sorted_sequence: Tensor | None = None,
    boundaries: Tensor | None = None,
    sorter: Tensor | None = None,
) -> tuple[int, ...]:
    """Dense copies, and the one of a lesser type in that of the other, as is a number in a tensor;
    native/BucketizationUtils.h, ``searchsorted_maybe_trim_input_tensors``.
    """
    given = [found for found in (sorted_sequence, input, boundaries) if isinstance(found, Tensor)]
    if not isinstance(input, Tensor):
        number, dtype = type_of_number(input), given[0].dtype
        cast = [dtype.itemsize] if number != dtype else []
        return (number.itemsize, *map(contiguous_copy, (*given, sorter)), *cast)
    common = torch.result_type(*given) if len(given) > 1 else given[0].dtype
    cast = [dense_bytes(found, common) for found in given if found.dtype != common]
    return (*map(contiguous_copy, (*given, sorter)), *cast)


@bucketize.workspace("cpu")
def bucket(input: Tensor | float, boundaries: Tensor) -> int:
    """The same copies; of a number a tensor; native/Bucketization.cpp, bucketize_cpu."""
    if not isinstance(input, Tensor):
        return converted(input, boundaries.dtype)
    return sum(searchsorted(input, boundaries=boundaries))


logcumsumexp = operator("aten::_logcumsumexp")
logcumsumexp.meta()(made_like(self=CONTIGUOUS))  # native/ReduceOps.cpp
extremes = operator("aten::_cummax_helper", "aten::_cummin_helper")


sums = operator("aten::cumsum", "aten::cumsum_", "aten::cumprod", "aten::cumprod_")


@sums.workspace("cpu")
def in_type_of_result(outputs: Tensor, input: Tensor) -> int:
    """The input in the type of the result; native/ReduceOps.cpp, impl_func_cum_ops."""
    return converted(input, outputs.dtype)


@operator("aten::cumsum", "aten::cumsum_").workspace("cuda")
def added_up(machine: Gpu, outputs: Tensor, input: Tensor, dim: int) -> tuple[int, ...]:
    """As any, or deterministic: a sum of every block; cub.cuh, inclusive_deterministic_scan."""
    copy, *scan = cumulative(outputs, input, dim)
    rounds = outputs.dtype.is_floating_point or outputs.dtype.is_complex
    if not (scan and rounds and prefers_deterministic()):
        return (copy, *scan)
    size = outputs.element_size()
    blocks = ceil_div(input.numel(), 16 * (128 if size >= 16 else 256 if size >= 8 else 512))
    return (copy, min(machine.multiprocessors, blocks) * size)


@operator("aten::cumprod", "aten::cumprod_").workspace("cuda")
@logcumsumexp.workspace("cuda")  # LogcumsumexpKernel.cu
def cumulative(outputs: Tensor, input: Tensor, dim: int) -> tuple[int, ...]:
    """Copies of another type or not dense; of a dimension CUB's tiles. ScanUtils.cuh, scan_dim."""
    if not input.dim():
        return (0,)
    number, dtype = input.numel(), outputs.dtype
    copy = converted(input, dtype) or contiguous_copy(input)
    if not number or number != input.shape[dim]:
        return (copy,)
    return (copy, cub.scan(number, dtype.itemsize, not (dtype in HALVES or dtype.is_complex)))


@extremes.meta()
def nothing() -> None:
    """What it finds is written to arguments; native/ReduceOps.cpp, cummax_out."""


# ScanKernels.cpp, ``cummax_helper_cuda``
extremes.workspace("cuda")(copied(self=CONTIGUOUS, values=CONTIGUOUS, indices=CONTIGUOUS))
