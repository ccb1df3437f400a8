"""Distinct elements, and which elements are among others.

native/Unique.cpp, native/TensorCompare.cpp; native/cuda/Unique.cu, UniqueCub.cu.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    HALVES,
    INT,
    LONG,
    contiguous_copy,
    dense_bytes,
    output_bytes,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import UnknownOutputs, aten, operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_TRUTHS = 2

sorted_elements = operator("aten::_unique", "aten::_unique2")
consecutive = operator("aten::unique_consecutive")
slices = operator("aten::unique_dim")
operator(
    *aten("isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor"),
    unknown_outputs=UnknownOutputs.IS_IN,
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


@operator("aten::_unique2").at_most()
@consecutive.at_most()
def none_repeated(asked: Asked) -> tuple[Tensor, ...]:
    """All elements and their counts, or slices along a dimension."""
    input = asked.input
    if asked.dim is not None:
        return every_slice(input, asked.dim)
    inverse = _positions(input, input.shape, asked=asked.return_inverse)
    counts = _positions(input, (input.numel(),), asked=asked.return_counts)
    number = min(input.numel(), _TRUTHS) if input.dtype is torch.bool else input.numel()
    return input.new_empty((number,)), inverse, counts


@slices.at_most()
@operator("aten::unique_dim_consecutive").at_most()
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


@sorted_elements.workspace("cpu")
def elements_in_order(outputs: Sequence[Tensor], input: Tensor, return_counts: bool = False) -> int:
    """All in order and where they were, then where each one begins; unique_cpu_sorted_template."""
    if input.dtype == torch.bool or not input.numel():
        return 0
    positions = input.numel() * LONG
    in_order = contiguous_copy(input) + dense_bytes(input) + positions
    places = (outputs[0].numel() + 1) * LONG if return_counts else 0
    return in_order + max(positions - output_bytes(outputs), places, 0)


@slices.workspace("cpu")
def rows_in_order(input: Tensor, dim: int) -> int:
    """Slices as rows, and the rows in order; _unique_dim_cpu_template."""
    return contiguous_copy(input.movedim(dim, 0)) + dense_bytes(input)


@consecutive.workspace("cpu")
@operator("aten::unique_dim_consecutive").workspace("cpu")
def as_rows(input: Tensor, dim: int | None = None) -> int:
    """A dense copy, of slices as rows where there is a dimension."""
    return contiguous_copy(input if dim is None else input.movedim(dim, 0))


@sorted_elements.decomposition("cuda")
def sorted_and_picked(machine: Gpu, outputs: Sequence[Tensor], asked: Asked) -> tuple[Tensor, ...]:
    """Sorted elements, with their positions for an inverse; UniqueCub.cu."""
    input, return_inverse = asked[:2]
    number, size = input.numel(), input.element_size()
    if not number:
        return _empty(outputs)
    dense = input.contiguous()
    if input.dtype is torch.bool:
        return _truths(machine, outputs, dense, return_inverse)
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


def _truths(
    gpu: Gpu, outputs: Sequence[Tensor], input: Tensor, return_inverse: bool
) -> tuple[Tensor, ...]:
    """A count of those that are true; UniqueCub.cu, ``UniqueCub<bool>``."""
    count = cub.scratch(INT)
    cub.scratch(cub.reduce(gpu, input.numel(), INT))
    made = input.new_empty((_TRUTHS,))
    counts = input.new_empty((_TRUTHS,), dtype=torch.int64)
    places = outputs[1].shape if return_inverse else (0,)
    inverse = input.new_empty(places, dtype=torch.int64)
    del count
    found = outputs[0].numel()
    return (made[:found], inverse, counts[: outputs[-1].numel()])[: len(outputs)]


def _empty(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(made.shape, dtype=made.dtype) for made in outputs)


@consecutive.decomposition("cuda")
@operator("aten::unique_dim_consecutive").decomposition("cuda")
def picked_in_their_order(
    machine: Gpu, outputs: Sequence[Tensor], asked: Asked
) -> tuple[Tensor, ...]:
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


@slices.decomposition("cuda")
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
