"""Extremes, their positions, and truth values of all elements or along a dimension.

native/ReduceOps.cpp, native/cpu/ReduceAllOpsKernel.cpp, native/cuda/Reduce*Kernel.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.formats import dense_copy
from pytest_torchmem.operators.geometry import contiguous_copy, like
from pytest_torchmem.operators.reduction.cpu_buffers import partial_results
from pytest_torchmem.operators.reduction.cuda_buffers import Dims, dense_strides, reduced
from pytest_torchmem.operators.registry import UnknownOutputs, aten, operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_VALUE_AND_INDEX = 16
"""``std::pair`` of a value of up to 8 bytes and an ``int64_t``."""

of_elements = operator("aten::max", "aten::min")
pair = operator("aten::aminmax")
pair_by_one_kernel = operator("aten::_aminmax")
positions = operator("aten::argmax", "aten::argmin")
truth = operator("aten::any", "aten::all")

operator(
    *(f"aten::{name}{kind}" for name in ("any", "all") for kind in ("", ".dim", ".dims")),
    "aten::_is_all_true",
    "aten::_is_any_true",
    unknown_outputs=UnknownOutputs.ANY_OR_ALL,
)
operator(*aten("argmax argmin max.dim min.dim"), unknown_outputs=UnknownOutputs.POSITIONS)
operator(*aten("amax amin max min"), unknown_outputs=UnknownOutputs.CARRIED)


@operator("aten::amax", "aten::amin").workspace("cuda")
def reduced_in_own_type(machine: Gpu, input: Tensor, dim: Dims = ()) -> tuple[int, ...]:
    """``func_wrapper`` of the input's own type; ReduceMaxValuesKernel.cu."""
    own = input.element_size()
    return reduced(machine, input.shape, input.stride(), dim, input.dtype, own, own)


@positions.workspace("cpu")
@of_elements.workspace("cpu")
@pair.workspace("cpu")
def contiguous_input(input: Tensor, dim: int | None = None, other: Tensor | None = None) -> int:
    """A contiguous copy where all dimensions are reduced; native/cpu/ReduceAllOpsKernel.cpp, and
    native/ReduceOps.cpp, argmax_argmin.
    """
    return dense_copy(input) if dim is None and other is None else 0


@of_elements.workspace("cuda")
def largest_or_smallest(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """Of all elements: a dense copy and their own type. Along a dimension: value and index.

    ReduceMaxValuesKernel.cu, ``max_all_launch_kernel`` and ``max_launch_kernel``.
    """
    own, dtype = input.element_size(), input.dtype
    if dim is not None:
        return reduced(machine, input.shape, input.stride(), dim, dtype, own, _VALUE_AND_INDEX, 4)
    buffers = reduced(machine, input.shape, dense_strides(input.shape), None, dtype, own, own)
    return (contiguous_copy(input), *buffers)


@pair.workspace("cuda")
@pair_by_one_kernel.workspace("cuda")
def pair_of_values(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """A pair of the input's type, of all elements from a dense copy; ReduceAMinMaxKernel.cu."""
    own = input.element_size()
    copy = contiguous_copy(input) if dim is None else 0
    strides = dense_strides(input.shape) if dim is None else input.stride()
    return (copy, *reduced(machine, input.shape, strides, dim, input.dtype, own, 2 * own, 4))


@pair_by_one_kernel.meta()
def aminmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """native/ReduceOps.cpp."""
    shape = list(input.shape)
    if dim is None:
        shape = []
    elif keepdim:
        shape[dim] = 1
    else:
        del shape[dim]
    return like(input, shape), like(input, shape)


@positions.workspace("cuda")
def position(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """A value and an index; a dense copy where all elements are asked. ReduceArgMaxKernel.cu."""
    copy = contiguous_copy(input) if dim is None else 0
    strides = dense_strides(input.shape) if dim is None else input.stride()
    buffers = reduced(machine, input.shape, strides, dim, input.dtype, 8, _VALUE_AND_INDEX, 4)
    return (copy, *buffers)


@truth.workspace("cpu")
def as_booleans(machine: Host, outputs: Tensor, input: Tensor) -> int:
    """A boolean copy of what is not boolean; native/ReduceOps.cpp, allany_meta."""
    kept = input.dtype in (torch.bool, torch.uint8)
    copied = 0 if kept else input.numel()
    return copied + partial_results(machine, input.numel(), outputs.numel(), 1)


@truth.workspace("cuda")
def in_type_of_input(machine: Gpu, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """Without a copy, in the input's type; ReduceLogicKernel.cu, ``get_allany_iter``. One element
    is converted to a boolean; native/ReduceOps.cpp, allany_impl.
    """
    own = input.element_size()
    if input.numel() == 1:
        return (0 if input.dtype is torch.bool else torch.bool.itemsize,)
    return reduced(machine, input.shape, input.stride(), dim, input.dtype, 1, own, 4)


@operator("aten::equal").workspace("cuda")
def equal(machine: Gpu, input: Tensor, other: Tensor) -> tuple[int, ...]:
    """Where the elements are equal, whether all are, and the reduction; cuda/Equal.cpp."""
    if input.shape != other.shape or not input.numel():
        return ()
    shape = (input.numel(),)
    buffers = reduced(machine, shape, dense_strides(shape), None, torch.bool, 1, 1, 4)
    return (input.numel(), 1, *buffers)
