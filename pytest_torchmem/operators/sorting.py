"""Sorting, searching and order statistics; prefix sums, products and extremes; distinct elements,
and which elements are among others.

native/Sorting.cpp, native/cpu/SortingKernel.cpp; native/cuda/Sort.cpp, SortStable.cu,
TensorTopK.cu, Sorting.cpp. native/ReduceOps.cpp, native/cuda/ScanKernels.cpp. native/Unique.cpp,
native/TensorCompare.cpp; native/cuda/Unique.cu, UniqueCub.cu.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.elementwise import converted, in_arguments
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import UnknownOutputs, operator
from pytest_torchmem.operators.workspace import (
    CONTIGUOUS,
    HALVES,
    INT,
    LONG,
    Workspace,
    bounded,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
    dense_copy,
    is_dense,
    made_like,
    output_bytes,
    passing,
    transpose_scratch,
    type_of_number,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.settings import prefers_deterministic

_SMALL_SORT = 4096
_LARGE_SEGMENT = 1_000_000
_FEW_SEGMENTS = 128
_MOST_AT_ONCE = 2**31 - 1
_TOPK_BLOCK = 256
_TOPK_RESIDENT = 65_536 // (40 * _TOPK_BLOCK)
"""Blocks that a multiprocessor's registers are enough for; ``get_items_per_thread``."""
_MULTIBLOCK = ((20, 20_000), (40, 10_000), (80, 8_000), (200, 5_000), (800, 3_000), (4_000, 800))


@operator("aten::sort").workspace("cuda")
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


operator("aten::sort", "aten::sort.stable", "aten::topk", unknown_outputs=UnknownOutputs.POSITIONS)


@operator("aten::sort").workspace("cpu")
def row_of_keys(input: Tensor, dim: int = -1) -> int:
    """Keys and indices of one row, moved together; sort_stable_kernel. Rows that other threads sort
    are not seen by the allocator's observer.
    """
    size = input.shape[dim] if input.dim() and input.numel() else 0
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
    """Several blocks for a long slice, then a sort of many that were found; TensorTopK.cpp,
    ``topk_out_cuda``; TensorTopK.cu, ``launch_gather_topk_kernel``.
    """
    if not input.dim() or not input.numel() or not k:
        return ()
    size = input.shape[dim]
    slices = input.numel() // size
    found: tuple[int, ...] = (contiguous_copy(input),)
    if size >= next((least for most, least in _MULTIBLOCK if slices <= most), 400):
        # ``mbtopk::launch``: the value sought and what is known of it, twice, for each slice,
        # digits and counts of every block, and prefix sums of the counts.
        threads = machine.multiprocessors * _TOPK_RESIDENT * _TOPK_BLOCK
        items = min(max(4, ceil_div(slices * size, threads)), 64)
        blocks = slices * ceil_div(size, items * _TOPK_BLOCK)
        known = 2 * slices * max(4, input.dtype.itemsize)
        state = (slices * input.dtype.itemsize, 2 * slices * 4, known)
        counts = (blocks * 256 * 2, slices * 256 * 4, blocks * 4, blocks * 4)
        sums = passing(cub.scan_by_key(machine, blocks, 4))
        found += passing(*state, *counts, *sums, *sums)
    if not sorted or k <= _SMALL_SORT:
        return found
    values, indices = outputs
    sorting = passing(*sort_requests(machine, values, dim, outputs))
    return (*found, dense_bytes(indices), dense_bytes(values), *sorting, dense_bytes(indices))


@operator("aten::kthvalue").workspace("cpu")
def partitioned(input: Tensor) -> int:
    """A copy of the values and their indices, to be partitioned; kthvalue_out_impl_cpu."""
    if input.dim() == 0:
        return 0
    return dense_bytes(input) + input.numel() * LONG


@operator("aten::median", "aten::nanmedian").workspace("cpu")
def copy_to_partition(input: Tensor, dim: int | None = None) -> int:
    """Over everything a clone; else a copy where elements are apart; median_with_indices_impl."""
    if dim is None:
        return dense_bytes(input) + transpose_scratch(input)
    if input.dim() == 0 or input.stride(dim) <= 1:
        return 0
    return dense_copy(input.movedim(dim, -1))


# Selected from a dense copy along a dimension; Sorting.cpp.
operator("kthvalue median nanmedian").workspace("cuda")(copied(first=True, self=CONTIGUOUS))


@operator("aten::median", "aten::nanmedian").decomposition("cuda")
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
    are counted. Thrust merges numbers of 16 bits of c10's, in less than their runs take;
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


operator("aten::searchsorted").workspace("cpu")(copied(sorted_sequence=CONTIGUOUS, self=CONTIGUOUS))


@operator("aten::searchsorted", "aten::bucketize").workspace("cuda")
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


@operator("aten::bucketize").workspace("cpu")
def bucket(input: Tensor | float, boundaries: Tensor) -> int:
    """The same copies; of a number a tensor; native/Bucketization.cpp, bucketize_cpu."""
    if not isinstance(input, Tensor):
        return converted(input, boundaries.dtype)
    return sum(searchsorted(input, boundaries=boundaries))


operator("aten::_logcumsumexp").meta()(made_like(self=CONTIGUOUS))  # native/ReduceOps.cpp


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
@operator("aten::_logcumsumexp").workspace("cuda")  # LogcumsumexpKernel.cu
def cumulative(outputs: Tensor, input: Tensor, dim: int) -> tuple[int, ...]:
    """Copies of another type or not dense; of a dimension CUB's tiles. ScanUtils.cuh, scan_dim."""
    if not input.dim():
        return (0,)
    number, dtype = input.numel(), outputs.dtype
    copy = converted(input, dtype) or contiguous_copy(input)
    if not number or number != input.shape[dim]:
        return (copy,)
    return (copy, cub.scan(number, dtype.itemsize, not (dtype in HALVES or dtype.is_complex)))


# The input in the type of the result; native/ReduceOps.cpp, impl_func_cum_ops.
operator("cumsum cumsum_ cumprod cumprod_").workspace("cpu")(
    lambda outputs, input: converted(input, outputs.dtype)
)
_extremes = operator("aten::_cummax_helper", "aten::_cummin_helper")
_extremes.meta()(in_arguments)  # native/ReduceOps.cpp, cummax_out
# ScanKernels.cpp, ``cummax_helper_cuda``
_extremes.workspace("cuda")(copied(self=CONTIGUOUS, values=CONTIGUOUS, indices=CONTIGUOUS))

_TRUTHS = 2

operator(
    "isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor", unknown_outputs=UnknownOutputs.IS_IN
)


class Asked(NamedTuple):
    """What is asked of distinct elements, by the names of the schemas' arguments."""

    input: Tensor
    return_inverse: bool = False
    return_counts: bool = False
    dim: int | None = None


@operator("aten::_unique").at_most()
def all_distinct(asked: Asked) -> tuple[Tensor, ...]:
    """As many as there are elements; what is not asked for is empty."""
    return none_repeated(asked)[:2]


@operator("aten::_unique2", "aten::unique_consecutive").at_most()
def none_repeated(asked: Asked) -> tuple[Tensor, ...]:
    """All elements and their counts, or slices along a dimension."""
    input = asked.input
    if asked.dim is not None:
        return every_slice(input, asked.dim)
    inverse = _positions(input, input.shape, asked=asked.return_inverse)
    counts = _positions(input, (input.numel(),), asked=asked.return_counts)
    number = min(input.numel(), _TRUTHS) if input.dtype is torch.bool else input.numel()
    return input.new_empty((number,)), inverse, counts


@operator("aten::unique_dim", "aten::unique_dim_consecutive").at_most()
def every_slice(input: Tensor, dim: int) -> tuple[Tensor, ...]:
    """All slices along a dimension; both numbers of them are made, asked for or not."""
    number = (input.shape[dim],)
    return (
        torch.empty(input.shape, dtype=input.dtype, device=input.device),
        _positions(input, number, asked=True),
        _positions(input, number, asked=True),
    )


def _positions(input: Tensor, shape: Sequence[int], *, asked: bool) -> Tensor:
    return input.new_empty(shape if asked else (0,), dtype=torch.int64)


@operator("aten::_unique", "aten::_unique2").workspace("cpu")
def elements_in_order(outputs: Sequence[Tensor], input: Tensor, return_counts: bool = False) -> int:
    """All in order and where they were, then where each one begins; unique_cpu_sorted_template."""
    if input.dtype == torch.bool or not input.numel():
        return 0
    positions = input.numel() * LONG
    in_order = contiguous_copy(input) + dense_bytes(input) + positions
    places = (outputs[0].numel() + 1) * LONG if return_counts else 0
    return in_order + max(positions - output_bytes(outputs), places, 0)


@operator("aten::unique_dim").workspace("cpu")
def rows_in_order(input: Tensor, dim: int) -> int:
    """Slices as rows, and the rows in order; _unique_dim_cpu_template."""
    return contiguous_copy(input.movedim(dim, 0)) + dense_bytes(input)


@operator("aten::unique_consecutive", "aten::unique_dim_consecutive").workspace("cpu")
def as_rows(input: Tensor, dim: int | None = None) -> int:
    """A dense copy, of slices as rows where there is a dimension."""
    return contiguous_copy(input if dim is None else input.movedim(dim, 0))


@operator("aten::_unique", "aten::_unique2").decomposition("cuda")
def sorted_and_picked(machine: Gpu, outputs: Sequence[Tensor], asked: Asked) -> tuple[Tensor, ...]:
    """Sorted elements, with their positions for an inverse; UniqueCub.cu."""
    input, return_inverse = asked[:2]
    number, size = input.numel(), input.element_size()
    if not number:
        return _empty(outputs)
    dense = input.contiguous()
    if input.dtype is torch.bool:  # those that are true are counted; ``UniqueCub<bool>``
        count = cub.scratch(INT)
        cub.scratch(cub.reduce(machine, number, INT))
        values, counts = dense.new_empty((_TRUTHS,)), dense.new_empty((_TRUTHS,), dtype=torch.int64)
        inverse = _positions(dense, outputs[1].shape, asked=return_inverse)
        del count
        found = values[: outputs[0].numel()], inverse, counts[: outputs[-1].numel()]
        return found[: len(outputs)]
    in_order, positions = torch.empty_like(dense), None
    if return_inverse:
        places = dense.new_empty((number,), dtype=torch.int64)
        positions = torch.empty_like(places)
        cub.scratch(cub.radix_sort(machine, number, size, LONG))
        del places
    else:
        cub.scratch(cub.radix_sort(machine, number, size, single=input.dtype is torch.float32))
    made = _picked(machine, outputs, in_order, asked, torch.int64)
    del positions, in_order
    return made


def _empty(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(made.shape, dtype=made.dtype) for made in outputs)


@operator("aten::unique_consecutive", "aten::unique_dim_consecutive").decomposition("cuda")
def picked_in_order(machine: Gpu, outputs: Sequence[Tensor], asked: Asked) -> tuple[Tensor, ...]:
    """Elements in their order, or slices of a dimension; UniqueCub.cu, Unique.cu."""
    if asked.dim is not None:
        return sorted_slices(machine, outputs, asked, in_order=True)
    if not asked.input.numel():
        return _empty(outputs)
    return _picked(machine, outputs, asked.input.contiguous(), asked, torch.int32)


def _picked(
    gpu: Gpu, outputs: Sequence[Tensor], in_order: Tensor, asked: Asked, places: torch.dtype
) -> tuple[Tensor, ...]:
    """Make the outputs, values and counts for as many as there are elements, whose storage
    ``resize_`` keeps; UniqueCub.cu, ``compute_unique``.

    CUB reads booleans as ``int`` (``wrap_input_iterator``), and knows no numbers of 16 bits of c10.
    """
    number, size, dtype = in_order.numel(), in_order.element_size(), in_order.dtype
    inverse = in_order.new_empty(outputs[1].shape, dtype=torch.int64)
    if asked.return_inverse:
        changes = in_order.new_empty((number,), dtype=places)
        cub.scratch(cub.running_count(gpu, number))
        del changes
    values, length = in_order.new_empty((number,)), cub.scratch(LONG)
    counts = in_order.new_empty((number if asked.return_counts else 0,), dtype=torch.int64)
    if asked.return_counts:
        cub.scratch(cub.run_lengths(number))
    else:
        size = INT if dtype is torch.bool else size
        cub.scratch(cub.distinct(gpu, number, size, dtype not in HALVES))
    del length
    found = values[: outputs[0].numel()], inverse, counts[: outputs[-1].numel()]
    return found[: len(outputs)]


@operator("aten::unique_dim").decomposition("cuda")
def sorted_slices(
    machine: Gpu, outputs: Sequence[Tensor], asked: Asked, in_order: bool = False
) -> tuple[Tensor, ...]:
    """Slices by positions, sorted, and picked by comparing; ``unique_dim_cuda_template``."""
    input, return_inverse, return_counts, along = asked
    dim = along or 0
    number = input.shape[dim] if input.dim() else 1
    if not number:
        return _empty(outputs)
    rows = input.transpose(dim, 0).contiguous()
    positions = torch.empty((number,), dtype=torch.int64)
    if not in_order:
        cub.scratch(cub.merge_sort(number))
    changes = torch.empty_like(positions) if return_inverse else None
    inverse = torch.empty((number if return_inverse else 0,), dtype=torch.int64)
    if return_inverse:
        cub.scratch(cub.temporaries(0))
        cub.scratch(cub.running_sum(machine, number))
    del changes
    beginnings = torch.empty((number + 1,), dtype=torch.int64) if return_counts else None
    cub.scratch(cub.distinct_rows(machine, number, return_counts))
    counts = torch.empty(outputs[2].shape if return_counts else (0,), dtype=torch.int64)
    del beginnings
    found = input.index_select(dim, positions[: outputs[0].shape[dim] if input.dim() else 1])
    del positions, rows
    return found, inverse, counts


def _distinct(elements: Tensor, with_places: bool, gpu: Gpu | None) -> tuple[Tensor, Tensor | None]:
    """``_unique`` of a vector in which nothing comes twice, which only values would tell."""
    if gpu is not None:
        shown = elements, elements if with_places else elements[:0]
        made = sorted_and_picked(gpu, shown, Asked(elements, with_places))
        return made[0], made[1] if with_places else None
    in_order = elements.sort()
    values = torch.empty_like(elements)
    places = torch.empty((elements.numel(),), dtype=torch.int64) if with_places else None
    del in_order
    return values, places


@operator("aten::isin.Tensor_Tensor", "aten::isin.Tensor_Tensor_out").decomposition()
def compared_or_sorted(
    machine: Gpu | Host,
    elements: Tensor,
    test_elements: Tensor,
    *,
    assume_unique: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """native/TensorCompare.cpp, isin_Tensor_Tensor_out: few are compared one by one, on CUDA
    (cuda/TensorCompare.cpp) at once, many are sorted together.
    """
    result = torch.empty((0,), dtype=torch.bool) if out is None else out
    result.resize_(elements.shape)
    if test_elements.numel() < int(10.0 * elements.numel() ** 0.145) or not elements.numel():
        if isinstance(machine, Gpu) and elements.numel():
            same = elements.unsqueeze(-1) == test_elements.reshape(-1)
            result.copy_(same.any(-1))
        return result
    flat, tested = elements.reshape(-1), test_elements.reshape(-1)
    places = None
    if not assume_unique:
        gpu = machine if isinstance(machine, Gpu) else None
        flat, places = _distinct(flat, True, gpu)
        tested, _ = _distinct(tested, False, gpu)
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
