"""Positions where a mask is true, and the elements there.

native/TensorAdvancedIndexing.cpp; native/cuda/Nonzero.cu, IndexKernel.cpp.
"""

import math

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    CONTIGUOUS,
    LONG,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.buffers import GRAIN, sum_workspace
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_ELEMENTS_OF_BLOCK = 512 * 16
"""What a block of ``nonzero_static`` looks at in one round."""

selected = operator("aten::masked_select", decided_by=(1,))
scattered = operator("aten::masked_scatter_")
operator("aten::masked_scatter", decided_by=(1,))


@selected.workspace("cpu")
def counted_mask(machine: Host, outputs: Tensor, input: Tensor, mask: Tensor) -> int:
    """The mask as int64, to be counted, and for threads added up; masked_select_out_impl_cpu."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    elements = int(math.prod(shape))
    whole = elements * LONG
    dense = all(side.shape == shape and side.is_contiguous() for side in (input, mask))
    serial = outputs.numel() == 0 or (selects_serially(machine, input) and dense)
    added_up = sum_workspace(machine, mask.expand(shape), torch.int64, 1)
    counted = LONG + added_up - dense_bytes(outputs)
    return max(counted, 0 if serial else 2 * whole, 0)


def selects_serially(machine: Host, input: Tensor) -> bool:
    """Return whether one thread selects elements of a dense tensor by a mask."""
    return input.is_contiguous() and (input.numel() < GRAIN or machine.threads == 1)


def positions_of(gpu: Gpu, mask: Tensor, number: int) -> tuple[int, ...]:
    """Return what turning a mask to ``number`` positions takes, which are alive then: a dense copy,
    a count and CUB's.

    A mask without a dimension is given one (``expandTensors``).
    """
    copy, elements = contiguous_copy(mask), mask.numel()
    counted, found = passing(cub.reduce(gpu, elements, 4)), passing(cub.flagged(gpu, elements))
    return (copy, 4, *counted, number * max(1, mask.dim()) * LONG, *found, -4, -copy)


@operator("aten::nonzero").at_most()
def every_position(input: Tensor) -> Tensor:
    """A row for each element."""
    return input.new_empty((input.numel(), input.dim()), dtype=torch.int64)


@selected.at_most()
def every_element(input: Tensor, mask: Tensor) -> Tensor:
    """All elements of the two that are broadcast together."""
    return input.new_empty(math.prod(torch.broadcast_shapes(input.shape, mask.shape)))


@operator("aten::nonzero", "aten::nonzero.out").decomposition("cuda")
def counted_then_found(
    machine: Gpu, outputs: Tensor, input: Tensor, out: Tensor | None = None
) -> Tensor:
    """A count, and then positions; Nonzero.cu, ``nonzero_cuda_out_impl``."""
    return _found(machine, input, len(outputs), out)


def _found(gpu: Gpu, input: Tensor, number: int, out: Tensor | None = None) -> Tensor:
    """One dimension's positions after the other's."""
    dense, count = input.contiguous(), cub.scratch(4)
    cub.scratch(cub.reduce(gpu, input.numel(), 4))
    if out is None:
        out = torch.empty((input.dim(), number), dtype=torch.int64).t()
    out.resize_((number, input.dim()))
    if input.dim():
        cub.scratch(cub.flagged(gpu, input.numel()))
    del count, dense
    return out


static = operator("aten::nonzero_static")


@static.decomposition("cpu")
def every_position_then_cut(input: Tensor, *, size: int) -> Tensor:
    """All positions, cut at the end; native/TensorAdvancedIndexing.cpp, nonzero_static_cpu."""
    result = torch.empty((size, input.dim()), dtype=torch.int64)
    if result.numel():
        positions = input.nonzero()
        del positions
    return result


@static.meta("cuda")
def positions_in_columns(input: Tensor, *, size: int) -> Tensor:
    """One dimension's positions after the other's; Nonzero.cu, nonzero_static_cuda."""
    return input.new_empty((input.dim(), size), dtype=torch.int64).t()


@static.workspace("cuda")
def counts_of_blocks(machine: Gpu, input: Tensor, size: int) -> tuple[int, ...]:
    """A dense copy, and what each block counts, added up; nonzero_static_cuda_out_impl."""
    number = input.numel()
    if not number or not size * input.dim():
        return ()
    most = machine.multiprocessors * (2 if input.element_size() == 1 else 1)
    rounds = ceil_div(ceil_div(number, _ELEMENTS_OF_BLOCK), most)
    blocks = ceil_div(number, rounds * _ELEMENTS_OF_BLOCK)
    return contiguous_copy(input), 4 * blocks, LONG * blocks


@operator("aten::masked_select", "aten::masked_select.out").decomposition("cuda")
def positions_of_mask(
    machine: Gpu, outputs: Tensor, input: Tensor, mask: Tensor, out: Tensor | None = None
) -> Tensor:
    """The positions of the mask; IndexKernel.cpp, ``masked_select_out_cuda_impl``."""
    whole = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    positions = _found(machine, whole if whole.dim() else whole.reshape(1), outputs.numel())
    result = input.new_empty(outputs.shape) if out is None else out.resize_(outputs.shape)
    del positions
    return result


scattered.workspace("cpu")(copied(source=CONTIGUOUS))


@scattered.workspace("cuda")
def prefix_sum_of_mask(input: Tensor, mask: Tensor, source: Tensor) -> tuple[int, ...]:
    """A prefix sum of the mask; IndexKernel.cpp, ``masked_scatter__cuda``."""
    number = input.numel()
    whole = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    summed = (number * LONG, contiguous_copy(whole), *passing(cub.scan(number, LONG)))
    return (*summed, contiguous_copy(source))
