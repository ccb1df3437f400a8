"""Reductions: sums, means, norms, extremes, moments; exact, from native/cuda/Reduce*Kernel.cu.

What one kernel takes is in ``reduce_config``; here stand, for each operator, what it accumulates in
(the ``arg_t`` of its ``ops``) and the copies made before: an input of another type than the result
(native/ReduceOpsUtils.h, ``make_reduction_from_out_ty``; 16-bit input of a float result is read as
it is).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    Outputs,
    accumulation_type,
    contiguous_copy,
    dense_bytes,
)
from pytest_torchmem.operators.reduction.cuda_configuration import (
    Reduction,
    iteration,
    reduction_buffers,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.gpus import Gpu

Dims = Sequence[int] | int | None
_HALVES = (torch.float16, torch.bfloat16)
_VALUE_AND_INDEX = 16
"""``std::pair`` of a value of up to 8 bytes and an ``int64_t``."""


def reduced(
    gpu: Gpu,
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Dims,
    dtype: torch.dtype,
    out_size: int,
    accumulator: int | None = None,
    input_vector: int | None = None,
) -> tuple[int, ...]:
    """Return what one reduction kernel takes for an input of ``dtype``.

    ``accumulator`` is the bytes of what it adds up in, by default the type's own accumulation type;
    no ``dims`` means all of them.
    """
    wrapped = _wrapped(dims, len(shape))
    first, rest = iteration(shape, strides, wrapped)
    return reduction_buffers(
        gpu,
        Reduction(
            first,
            rest,
            dtype.itemsize,
            out_size,
            accumulator or accumulation_type(dtype).itemsize,
            input_vector or (8 if dtype.itemsize == 2 else 4),
            256 if dtype is torch.complex128 else 512,
            not (dtype in _HALVES and out_size == dtype.itemsize),
        ),
    )


def sum_buffers(
    gpu: Gpu, shape: Sequence[int], dims: Dims, dtype: torch.dtype, strides: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return what summing a tensor (dense where no strides are given) into its own type takes."""
    return reduced(gpu, shape, strides or dense_strides(shape), dims, dtype, dtype.itemsize)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))[-len(shape) :] if shape else ()


def _wrapped(dims: Dims, number: int) -> tuple[int, ...]:
    if isinstance(dims, int):
        dims = (dims,)
    if not dims:
        return tuple(range(number))
    return tuple(dim % number for dim in dims) if number else ()


@operator("aten::sum", "aten::nansum", "aten::mean").workspace("cuda")
def total(machine: Gpu, outputs: Tensor, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """A copy of an input of another type, then ``sum_functor`` or ``mean_kernel_impl``."""
    return _converted(machine, outputs, input, dim)


@operator("aten::prod").workspace("cuda")
def product(machine: Gpu, outputs: Tensor, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """As a sum; ReduceSumProdKernel.cu, ``prod_functor``."""
    return _converted(machine, outputs, input, dim)


def _converted(gpu: Gpu, outputs: Tensor, input: Tensor, dims: Dims) -> tuple[int, ...]:
    result = outputs.dtype
    as_is = input.dtype in _HALVES and result == torch.float32
    if input.dtype == result or as_is:
        return reduced(gpu, input.shape, input.stride(), dims, input.dtype, outputs.element_size())
    strides = input.stride() if _is_dense(input) else dense_strides(input.shape)
    buffers = reduced(gpu, input.shape, strides, dims, result, outputs.element_size())
    return (dense_bytes(input, result), *buffers)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a copy keeps the strides; ``is_non_overlapping_and_dense``."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@operator("aten::amax", "aten::amin").workspace("cuda")
def extremes(machine: Gpu, input: Tensor, dim: Dims = ()) -> tuple[int, ...]:
    """``func_wrapper`` of the input's own type; ReduceMaxValuesKernel.cu."""
    own = input.element_size()
    return reduced(machine, input.shape, input.stride(), dim, input.dtype, own, own)


@operator("aten::max", "aten::min").workspace("cuda")
def extreme(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """Of all elements: a dense copy and their own type. Along a dimension: value and index.

    ReduceMaxValuesKernel.cu, ``max_all_launch_kernel`` and ``max_launch_kernel``.
    """
    own = input.element_size()
    if dim is not None:
        return reduced(
            machine, input.shape, input.stride(), dim, input.dtype, own, _VALUE_AND_INDEX, 4
        )
    strides = dense_strides(input.shape)
    buffers = reduced(machine, input.shape, strides, None, input.dtype, own, own)
    return (contiguous_copy(input), *buffers)


@operator("aten::aminmax", "aten::_aminmax").workspace("cuda")
def both_extremes(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """A pair of the input's type; ReduceAMinMaxKernel.cu."""
    own = input.element_size()
    return reduced(machine, input.shape, input.stride(), dim, input.dtype, own, 2 * own, 4)


@operator("aten::argmax", "aten::argmin").workspace("cuda")
def position(machine: Gpu, input: Tensor, dim: int | None = None) -> tuple[int, ...]:
    """A value and an index; a dense copy where all elements are asked. ReduceArgMaxKernel.cu."""
    copy = contiguous_copy(input) if dim is None else 0
    strides = dense_strides(input.shape) if dim is None else input.stride()
    buffers = reduced(machine, input.shape, strides, dim, input.dtype, 8, _VALUE_AND_INDEX, 4)
    return (copy, *buffers)


@operator("aten::any", "aten::all").workspace("cuda")
def truth(machine: Gpu, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """Without a copy, in the input's type; ReduceLogicKernel.cu, ``get_allany_iter``."""
    own = input.element_size()
    return reduced(machine, input.shape, input.stride(), dim, input.dtype, 1, own, 4)


@operator("aten::var", "aten::std", "aten::var_mean", "aten::std_mean").workspace("cuda")
def moments(machine: Gpu, outputs: Outputs, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """``WelfordData``: two accumulators, a count and a fraction; ReduceMomentKernel.cu."""
    accumulator = accumulation_type(input.dtype).itemsize
    welford = 3 * accumulator + max(4, accumulator)
    result = outputs if isinstance(outputs, Tensor) else outputs[0]
    assert result is not None
    size = result.element_size()
    return reduced(machine, input.shape, input.stride(), dim, input.dtype, size, welford, 2)


@operator("aten::linalg_vector_norm").workspace("cuda")
def vector_norm(
    machine: Gpu,
    outputs: Tensor,
    input: Tensor,
    dim: Dims = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[int, ...]:
    """A copy of an input of another type, then ReduceNormKernel.cu, ``norm_kernel_cuda_impl``."""
    return _norm(machine, outputs, input, dim, dtype)


@operator("aten::norm").workspace("cuda")
def norm(machine: Gpu, outputs: Tensor, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """As ``linalg_vector_norm``, which it calls; native/ReduceOps.cpp, ``impl_func_norm``."""
    return _norm(machine, outputs, input, dim, None)


def _norm(
    gpu: Gpu, outputs: Tensor, input: Tensor, dims: Dims, dtype: torch.dtype | None
) -> tuple[int, ...]:
    if dtype is None or dtype == input.dtype or input.dtype in _HALVES:
        size = outputs.element_size()
        return reduced(gpu, input.shape, input.stride(), dims, input.dtype, size)
    strides = input.stride() if _is_dense(input) else dense_strides(input.shape)
    buffers = reduced(gpu, input.shape, strides, dims, dtype, outputs.element_size())
    return (dense_bytes(input, dtype), *buffers)


@operator("aten::count_nonzero").workspace("cuda")
def count_nonzero(machine: Gpu, input: Tensor, dim: Dims = None) -> tuple[int, ...]:
    """A mask, the same as ``int64``, and its sum; native/TensorAdvancedIndexing.cpp."""
    mask = input.numel()
    buffers = reduced(machine, input.shape, dense_strides(input.shape), dim, torch.int64, 8)
    return (mask, dense_bytes(input, torch.int64), *buffers)


@operator("aten::equal").workspace("cuda")
def equal(machine: Gpu, input: Tensor, other: Tensor) -> tuple[int, ...]:
    """Where the elements are equal, whether all are, and the reduction; cuda/Equal.cpp."""
    if input.shape != other.shape or not input.numel():
        return ()
    shape = (input.numel(),)
    buffers = reduced(machine, shape, dense_strides(shape), None, torch.bool, 1, 1, 4)
    return (input.numel(), 1, *buffers)


@operator("aten::trace").workspace("cuda")
def trace(machine: Gpu, outputs: Tensor, input: Tensor) -> tuple[int, ...]:
    """The sum of the diagonal; native/cuda/TriangularOps.cu, ``trace_cuda``."""
    diagonal = input.diagonal()
    return _converted(machine, outputs, diagonal, None)
