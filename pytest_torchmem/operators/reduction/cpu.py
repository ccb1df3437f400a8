"""Reductions on the CPU: upcasts of the input, partial results per thread, contiguous copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    accumulation_type,
    contiguous_copy,
    dense_bytes,
    transpose_scratch,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

GRAIN = 32768
"""``at::internal::GRAIN_SIZE``: below it a loop runs on one thread."""

_SCALAR = 8
"""Bytes of a Python number wrapped in a tensor."""


def partial_results(machine: Host, elements: int, results: int, element_size: int) -> int:
    """One result per thread, where everything is reduced to one element on several threads;
    native/TensorIteratorReduce.cpp, two_pass_reduction.
    """
    if results != 1 or elements < GRAIN or machine.threads < 2:
        return 0
    return machine.threads * element_size


def upcast(input: Tensor, dtype: torch.dtype) -> int:
    """The copy of the input in ``dtype``, which TensorIterator makes where they differ."""
    return 0 if input.dtype == dtype else dense_bytes(input, dtype)


def every_dim(input: Tensor) -> tuple[int, ...]:
    """All dimensions, as a reduction over nothing in particular means them."""
    return tuple(range(input.dim()))


def needs_float_buffer(input: Tensor, dims: Sequence[int]) -> bool:
    """Whether TensorIterator is left with two reduced dimensions innermost, so that a 16-bit sum
    would be rounded between them; native/ReduceOps.cpp, should_use_acc_buffer.
    """
    if not input.numel():
        return False
    gone = {dim % input.dim() for dim in dims} if input.dim() else set()
    walked = sorted(
        (dim for dim in gone if input.shape[dim] != 1), key=lambda dim: (input.stride(dim), -dim)
    )
    return any(
        input.stride(inner) * input.shape[inner] != input.stride(outer)
        for inner, outer in pairwise(walked)
    )


def sum_workspace(
    machine: Host,
    input: Tensor,
    result: torch.dtype,
    results: int,
    dims: Sequence[int] | None = None,
) -> int:
    """What ``sum`` takes: an upcast, or for 16-bit inputs of some layouts a sum in float."""
    reduced = input.dtype == result and result in (torch.bfloat16, torch.float16)
    if reduced and dims is not None and needs_float_buffer(input, dims):
        buffer = results * torch.float32.itemsize
        return buffer + sum_workspace(machine, input, torch.float32, results)
    return upcast(input, result) + partial_results(machine, input.numel(), results, result.itemsize)


@operator("aten::sum").workspace("cpu")
def summation(
    machine: Host, outputs: Tensor, input: Tensor, dim: Sequence[int] | None = None
) -> int:
    """An upcast of the whole input and a result per thread; native/ReduceOps.cpp, sum_out."""
    dims = dim or every_dim(input)
    return sum_workspace(machine, input, outputs.dtype, outputs.numel(), dims)


@operator("aten::nansum", "aten::prod", "aten::amax", "aten::amin").workspace("cpu")
def reduce_in_result_type(machine: Host, outputs: Tensor, input: Tensor) -> int:
    """An upcast of the input and a result per thread; native/ReduceOps.cpp, make_reduction."""
    return sum_workspace(machine, input, outputs.dtype, outputs.numel())


@operator("aten::linalg_vector_norm").workspace("cpu")
def vector_norm(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> int:
    """The kernel converts as it reads unless a type is asked for; native/LinearAlgebra.cpp."""
    copied = upcast(input, outputs.dtype) if dtype is not None else 0
    if outputs.numel() == 1 and _every_dim(input, dim) and not copied:
        return 0
    return copied + partial_results(machine, input.numel(), outputs.numel(), outputs.element_size())


@operator("aten::any", "aten::all").workspace("cpu")
def any_all(machine: Host, outputs: Tensor, input: Tensor) -> int:
    """A boolean copy of what is not boolean; native/ReduceOps.cpp, allany_meta."""
    kept = input.dtype in (torch.bool, torch.uint8)
    copied = 0 if kept else input.numel()
    return copied + partial_results(machine, input.numel(), outputs.numel(), 1)


@operator("aten::mean").workspace("cpu")
def mean(machine: Host, outputs: Tensor, input: Tensor) -> int:
    """A sum in the accumulation type, then a division by a wrapped number;
    native/ReduceOps.cpp, mean_out.
    """
    return mean_workspace(machine, input, outputs.dtype, outputs.numel())


def mean_workspace(machine: Host, input: Tensor, dtype: torch.dtype, results: int) -> int:
    """What ``mean`` into ``results`` elements of ``dtype`` takes."""
    accumulated = accumulation_type(dtype)
    result = 0 if accumulated == dtype else results * accumulated.itemsize
    summed = sum_workspace(machine, input, accumulated, results)
    return result + max(summed, _SCALAR + accumulated.itemsize)


@operator("aten::var", "aten::std").workspace("cpu")
def variance(
    machine: Host, outputs: Tensor, input: Tensor, dim: Sequence[int] | None = None
) -> int:
    """Over everything in float: a mean and a sum of squares; native/ReduceOps.cpp,
    std_var_all_cpu.
    """
    if outputs.numel() != 1 or not _every_dim(input, dim):
        return 0
    if input.dtype not in (torch.float32, torch.float64):
        return 0
    size = input.element_size()
    by_thread = partial_results(machine, input.numel(), 1, size)
    return size + max(by_thread, _SCALAR + size)


def _every_dim(input: Tensor, dims: Sequence[int] | None) -> bool:
    """Whether the ``dim`` of a reduction names every dimension, or none."""
    return not dims or len(dims) == input.dim()


@operator("aten::argmax", "aten::argmin").workspace("cpu")
def argument_of_extreme(input: Tensor, dim: int | None = None) -> int:
    """A contiguous copy where everything is reduced; native/ReduceOps.cpp, argmax_argmin."""
    return _contiguous(input) if dim is None else 0


@operator("aten::max", "aten::min", "aten::aminmax").workspace("cpu")
def extreme(input: Tensor, dim: int | None = None, other: Tensor | None = None) -> int:
    """A contiguous copy where all dimensions are reduced; native/cpu/ReduceAllOpsKernel.cpp."""
    return _contiguous(input) if dim is None and other is None else 0


def _contiguous(input: Tensor) -> int:
    copied = contiguous_copy(input)
    return copied + transpose_scratch(input) if copied else 0
