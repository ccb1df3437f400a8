"""What reductions take on the CPU: upcasts of the input and partial results per thread.

native/ReduceOps.cpp and native/TensorIteratorReduce.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.geometry import accumulation_type
from pytest_torchmem.targets.host import Host

GRAIN = 32768
"""``at::internal::GRAIN_SIZE``: below it a loop runs on one thread."""

SCALAR = 8
"""Bytes of a Python number wrapped in a tensor."""


def partial_results(machine: Host, elements: int, results: int, element_size: int) -> int:
    """One result per thread, where everything is reduced to one element on several threads;
    native/TensorIteratorReduce.cpp, two_pass_reduction.
    """
    if results != 1 or elements < GRAIN or machine.threads < 2:
        return 0
    return machine.threads * element_size


def takes_every_dim(input: Tensor, dims: Sequence[int] | None) -> bool:
    """Whether the ``dim`` of a reduction names every dimension, or none."""
    return not dims or len(dims) == input.dim()


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
    return converted(input, result) + partial_results(
        machine, input.numel(), results, result.itemsize
    )


def mean_workspace(machine: Host, input: Tensor, dtype: torch.dtype, results: int) -> int:
    """A sum in the accumulation type, then a division by a wrapped number; mean_out."""
    accumulated = accumulation_type(dtype)
    result = 0 if accumulated == dtype else results * accumulated.itemsize
    summed = sum_workspace(machine, input, accumulated, results)
    return result + max(summed, SCALAR + accumulated.itemsize)
