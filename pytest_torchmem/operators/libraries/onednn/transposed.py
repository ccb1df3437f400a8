"""Transposed convolutions, which oneDNN calls deconvolutions: src/cpu/ref_deconvolution.hpp runs
them as gradients of convolutions, src/cpu/x64/jit_brgemm_deconv.cpp forwards on brgemm kernels.

Their ``Problem`` is the convolution that they are the gradient of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_torchmem.operators.libraries.onednn import brgemm
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, booked

Kernel = Callable[[Problem], Primitive]

_FLOAT = 4


def _nested(primitive: Primitive, *further: int) -> Primitive:
    return replace(primitive, scratchpad=booked(primitive.scratchpad, *further))


def forward(problem: Problem, backward_data: Kernel) -> Primitive:
    """Without brgemm a bias is added to a result in float, which is kept beside the result."""
    own = _by_brgemm(problem)
    if own is not None:
        return _nested(own)
    if not problem.bias:
        return _nested(backward_data(problem))
    primitive = backward_data(replace(problem, float_gradient=True))
    result = primitive.input or problem.input_bytes(problem.channels)
    return _nested(primitive, result // problem.element_size * _FLOAT)


def _by_brgemm(problem: Problem) -> Primitive | None:
    for narrow in (False, True):
        if problem.strided:
            found = brgemm.backward_data_strided(problem, transposed=True, narrow=narrow)
        else:
            found = brgemm.backward_data_unnested(problem, narrow)
        if found is not None:
            return found
    return None


def backward(problem: Problem, kernel: Kernel) -> Primitive:
    """Gradients are those of the convolution, with input and output exchanged."""
    return _nested(kernel(replace(problem, bias=False)))
