"""Which kernel oneDNN takes: the first that accepts; src/cpu/cpu_convolution_list.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_torchmem.operators.libraries.onednn import (
    brgemm,
    depthwise,
    direct,
    direct_bfloat16,
    direct_weights,
    gemm,
    narrow,
    pointwise,
    pointwise_bfloat16,
    transposed,
)
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem

Kernel = Callable[[Problem], Primitive | None]

_FORWARD: Sequence[Kernel] = (
    depthwise.forward_by_brdgmm,
    brgemm.forward,
    depthwise.forward,
    pointwise.forward,
    pointwise_bfloat16.forward,
    direct.forward,
    direct_bfloat16.forward,
    brgemm.forward_narrow,
    narrow.forward,
    gemm.forward,
)
_DATA: Sequence[Kernel] = (
    brgemm.backward_data,
    brgemm.backward_data_strided,
    depthwise.backward_data,
    pointwise.backward_data,
    pointwise_bfloat16.backward_data,
    direct.backward_data,
    direct_bfloat16.backward_data,
    brgemm.backward_data_narrow,
    brgemm.backward_data_strided_narrow,
    narrow.backward_data,
    gemm.backward_data,
)
_WEIGHTS: Sequence[Kernel] = (
    depthwise.backward_weights,
    pointwise.backward_weights,
    pointwise_bfloat16.backward_weights,
    direct_weights.backward_weights,
    direct_bfloat16.backward_weights,
    narrow.backward_weights,
    gemm.backward_weights,
)


def _first(kernels: Sequence[Kernel], problem: Problem) -> Primitive:
    for kernel in kernels:
        primitive = kernel(problem)
        if primitive is not None:
            return primitive
    raise AssertionError("products of columns take every convolution")


def forward(problem: Problem) -> Primitive:
    """Return what the forward takes."""
    return _first(_FORWARD, problem)


def backward_data(problem: Problem) -> Primitive:
    """Return what the gradient of the input takes."""
    return _first(_DATA, problem)


def backward_weights(problem: Problem) -> Primitive:
    """Return what the gradients of weight and bias take."""
    return _first(_WEIGHTS, problem)


def transposed_forward(problem: Problem) -> Primitive:
    """Return what a transposed convolution takes; ``problem`` is the one it turns round."""
    return transposed.forward(problem, backward_data)


def transposed_backward_data(problem: Problem) -> Primitive:
    """Return what the gradient of its input takes."""
    return transposed.backward(problem, forward)


def transposed_backward_weights(problem: Problem) -> Primitive:
    """Return what the gradients of its weight and bias take."""
    return transposed.backward(problem, backward_weights)
