"""Which kernel oneDNN takes for a convolution: the first that accepts it;
src/cpu/cpu_convolution_list.cpp.

Transposed convolutions, which oneDNN calls deconvolutions, are gradients of convolutions
(src/cpu/ref_deconvolution.hpp), but forwards on brgemm kernels where those accept them
(src/cpu/x64/jit_brgemm_deconv.cpp). Their ``Problem`` is the convolution that they are the gradient
of.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pytest_torchmem.operators.geometry import FLOAT
from pytest_torchmem.operators.libraries.onednn import (
    brgemm_conv,
    gemm_convolution,
    jit_1x1_conv,
    jit_avx2_conv,
    jit_avx512_common_conv,
    jit_avx512_core_bf16_conv,
    jit_uni_dw_conv,
)
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, booked

Kernel = Callable[[Problem], Primitive | None]

_FORWARD: Sequence[Kernel] = (
    jit_uni_dw_conv.forward_by_brdgmm,
    brgemm_conv.forward,
    jit_uni_dw_conv.forward,
    jit_1x1_conv.forward,
    jit_avx512_common_conv.forward,
    jit_avx512_core_bf16_conv.forward,
    brgemm_conv.forward_of_avx2,
    jit_avx2_conv.forward,
    gemm_convolution.forward,
)
_BACKWARD_DATA: Sequence[Kernel] = (
    brgemm_conv.backward_data,
    brgemm_conv.backward_data_strided,
    jit_uni_dw_conv.backward_data,
    jit_1x1_conv.backward_data,
    jit_avx512_common_conv.backward_data,
    jit_avx512_core_bf16_conv.backward_data,
    partial(brgemm_conv.backward_data, avx2=True),
    partial(brgemm_conv.backward_data_strided, avx2=True),
    jit_avx2_conv.backward_data,
    gemm_convolution.backward_data,
)
_BACKWARD_WEIGHTS: Sequence[Kernel] = (
    jit_uni_dw_conv.backward_weights,
    jit_1x1_conv.backward_weights,
    jit_avx512_common_conv.backward_weights,
    jit_avx512_core_bf16_conv.backward_weights,
    jit_avx2_conv.backward_weights,
    gemm_convolution.backward_weights,
)
_DECONVOLUTION: Sequence[Kernel] = (
    brgemm_conv.as_forward,
    partial(brgemm_conv.backward_data_strided, transposed=True),
    partial(brgemm_conv.as_forward, avx2=True),
    partial(brgemm_conv.backward_data_strided, transposed=True, avx2=True),
)


def _first(kernels: Sequence[Kernel], problem: Problem) -> Primitive | None:
    return next(filter(None, (kernel(problem) for kernel in kernels)), None)


def _taken(kernels: Sequence[Kernel], problem: Problem) -> Primitive:
    """Return what a forward takes, or the gradient of an input, or those of weight and bias."""
    found = _first(kernels, problem)
    assert found is not None, "products of columns take every convolution"
    return found


forward = partial(_taken, _FORWARD)
backward_data = partial(_taken, _BACKWARD_DATA)
backward_weights = partial(_taken, _BACKWARD_WEIGHTS)


def _nested(primitive: Primitive, *further: int) -> Primitive:
    return primitive._replace(scratchpad=booked(primitive.scratchpad, *further))


def transposed_forward(problem: Problem) -> Primitive:
    """Return what a transposed convolution takes: without brgemm a bias is added to a result in
    float, which is kept beside the result.
    """
    found = _first(_DECONVOLUTION, problem)
    if found is not None or not problem.bias:
        return _nested(found or backward_data(problem))
    primitive = backward_data(replace(problem, float_gradient=True))
    result = primitive.input or problem.input_bytes(problem.channels)
    return _nested(primitive, result // problem.element_size * FLOAT)


def transposed_backward_data(problem: Problem) -> Primitive:
    """Return what the gradient of its input takes."""
    return _nested(forward(replace(problem, bias=False)))


def transposed_backward_weights(problem: Problem) -> Primitive:
    """Return what the gradients of its weight and bias take."""
    return _nested(backward_weights(replace(problem, bias=False)))
