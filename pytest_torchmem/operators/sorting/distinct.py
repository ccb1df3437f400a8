"""Distinct elements, and which elements are among others.

native/Unique.cpp, native/TensorCompare.cpp; native/cuda/Unique.cu, UniqueCub.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes, output_bytes
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.cuda_buffers import dense_strides, reduced
from pytest_torchmem.operators.registry import UnknownOutputs, aten, operator
from pytest_torchmem.operators.workspace import Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu

_LONG = 8
_TRUTHS = 2

sorted_elements = operator("aten::_unique", "aten::_unique2")
consecutive = operator("aten::unique_consecutive")
slices = operator("aten::unique_dim")
operator(
    *aten("isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor"),
    unknown_outputs=UnknownOutputs.IS_IN,
)


@operator("aten::_unique").at_most()
def all_distinct(input: Tensor, return_inverse: bool = False) -> tuple[Tensor, ...]:
    """As many as there are elements; what is not asked for is empty."""
    return _elements(input), _positions(input, input.shape, asked=return_inverse)


@operator("aten::_unique2").at_most()
def all_distinct_and_counted(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, ...]:
    """As many as there are elements, and their counts."""
    counts = _positions(input, (input.numel(),), asked=return_counts)
    return *all_distinct(input, return_inverse), counts


@consecutive.at_most()
def none_repeated(
    input: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, ...]:
    """All elements, or slices along a dimension."""
    if dim is not None:
        return every_slice(input, dim)
    inverse = _positions(input, input.shape, asked=return_inverse)
    return _elements(input), inverse, _positions(input, (input.numel(),), asked=return_counts)


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


def _elements(input: Tensor) -> Tensor:
    number = min(input.numel(), _TRUTHS) if input.dtype is torch.bool else input.numel()
    return input.new_empty((number,))


def _positions(input: Tensor, shape: Sequence[int], *, asked: bool) -> Tensor:
    return input.new_empty(shape if asked else (0,), dtype=torch.int64)


@sorted_elements.workspace("cpu")
def elements_in_order(outputs: Sequence[Tensor], input: Tensor, return_counts: bool = False) -> int:
    """All elements in order and where they were, then where each distinct one begins;
    unique_cpu_sorted_template.
    """
    if input.dtype == torch.bool or not input.numel():
        return 0
    positions = input.numel() * _LONG
    in_order = contiguous_copy(input) + dense_bytes(input) + positions
    places = (outputs[0].numel() + 1) * _LONG if return_counts else 0
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


@sorted_elements.workspace("cuda")
@consecutive.workspace("cuda")
def sorted_copies(machine: Gpu, input: Tensor) -> Workspace:
    """Sorted copies, positions and inverse; a limit. Unique.cu, ``unique_cuda_template``."""
    number, element = input.numel(), input.element_size()
    sort = cub.radix_sort_pairs(machine, number, element, _LONG)
    positions = number * _LONG
    values = number * element
    return bounded(contiguous_copy(input), values, positions, positions, positions, sort)


@slices.workspace("cuda")
def sorted_rows(machine: Gpu, input: Tensor, dim: int) -> Workspace:
    """The input as rows, positions and their sort; a limit. Unique.cu,
    ``unique_dim_cuda_template``.
    """
    rows = input.shape[dim] if input.dim() else 1
    positions = rows * _LONG
    sort = cub.radix_sort_pairs(machine, rows, _LONG, _LONG)
    copies = (dense_bytes(input), dense_bytes(input))
    return bounded(*copies, positions, positions, positions, sort)


@sorted_elements.storages("cuda")
@consecutive.storages("cuda")
def as_large_as_input(
    outputs: Sequence[Tensor], input: Tensor, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, ...]:
    """Values, and counts where they are asked for, are made for as many as the input has elements
    (of booleans two), and ``resize_`` keeps the storage. Along a dimension they are selected.

    UniqueCub.cu, ``compute_unique``.
    """
    values, places, *counts = outputs
    if dim is not None:
        return tuple(outputs)
    elements = _TRUTHS if input.dtype is torch.bool else input.numel()
    if return_counts:
        counts = [_on_storage(counts[0], elements)]
    return (_on_storage(values, elements), places, *counts)


def _on_storage(output: Tensor, elements: int) -> Tensor:
    """Return ``output`` at the beginning of a storage for ``elements``."""
    found = output.new_empty(max(elements, output.numel()))[: output.numel()]
    return found.copy_(output)


def _distinct(elements: Tensor, with_places: bool) -> tuple[Tensor, Tensor | None]:
    """``_unique`` of a vector in which nothing comes twice, which only values would tell."""
    in_order = elements.sort()
    values = torch.empty_like(elements)
    places = torch.empty((elements.numel(),), dtype=torch.int64) if with_places else None
    del in_order
    return values, places


@operator("aten::isin.Tensor_Tensor").decomposition("cpu")
def compared_or_sorted(
    elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False
) -> Tensor:
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


@operator("aten::isin").workspace("cuda")
def comparisons_or_sort(
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
