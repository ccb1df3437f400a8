"""oneDNN's convolutions: operands in the layouts that its kernel wants, and its scratchpad.

native/mkldnn/Conv.cpp calls oneDNN through ideep, which copies operands into the kernel's layouts;
``libraries/onednn/`` knows those and the scratchpads. The kernel is the first that accepts a
convolution; src/cpu/cpu_convolution_list.cpp.

Transposed convolutions, which oneDNN calls deconvolutions, are gradients of convolutions
(src/cpu/ref_deconvolution.hpp), but forwards on brgemm kernels where those accept them
(src/cpu/x64/jit_brgemm_deconv.cpp). Their ``Problem`` is the convolution that they are the gradient
of.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from pytest_torchmem.operators.convolution.choice import Convolution
from pytest_torchmem.operators.libraries.onednn import (
    brgemm_conv,
    gemm_convolution,
    jit_1x1_conv,
    jit_avx512_conv,
    jit_uni_dw_conv,
)
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, Sizes
from pytest_torchmem.operators.workspace import CONTIGUOUS, FLOAT, booked, contiguous_copy

Kernel = Callable[[Problem], Primitive | None]

_FORWARD: Sequence[Kernel] = (
    jit_uni_dw_conv.forward_by_brdgmm,
    brgemm_conv.forward,
    jit_uni_dw_conv.forward,
    jit_1x1_conv.forward,
    jit_avx512_conv.forward,
    partial(brgemm_conv.forward, avx2=True),
    jit_avx512_conv.forward_of_avx2,
    gemm_convolution.forward,
)
_BACKWARD_DATA: Sequence[Kernel] = (
    brgemm_conv.backward_data,
    brgemm_conv.backward_data_strided,
    jit_uni_dw_conv.backward_data,
    jit_1x1_conv.backward_data,
    jit_avx512_conv.backward_data,
    partial(brgemm_conv.backward_data, avx2=True),
    partial(brgemm_conv.backward_data_strided, avx2=True),
    jit_avx512_conv.backward_data_of_avx2,
    gemm_convolution.backward_data,
)
_BACKWARD_WEIGHTS: Sequence[Kernel] = (
    jit_uni_dw_conv.backward_weights,
    jit_1x1_conv.backward_weights,
    jit_avx512_conv.backward_weights,
    jit_avx512_conv.backward_weights_of_avx2,
    gemm_convolution.backward_weights,
)
_DECONVOLUTION: Sequence[Kernel] = (
    brgemm_conv.as_forward,
    partial(brgemm_conv.backward_data_strided, transposed=True),
    partial(brgemm_conv.as_forward, avx2=True),
    partial(brgemm_conv.backward_data_strided, transposed=True, avx2=True),
)


def _taken(kernels: Sequence[Kernel], problem: Problem) -> Primitive:
    """Return what a forward takes, or the gradient of an input, or those of weight and bias."""
    # Products of columns take every convolution.
    return next(filter(None, (kernel(problem) for kernel in kernels)))


forward_primitive = partial(_taken, _FORWARD)
backward_data_primitive = partial(_taken, _BACKWARD_DATA)
backward_weights_primitive = partial(_taken, _BACKWARD_WEIGHTS)


def _nested(primitive: Primitive, *further: int) -> Primitive:
    return primitive._replace(scratchpad=booked(primitive.scratchpad, *further))


def transposed_forward_primitive(problem: Problem) -> Primitive:
    """Return what a transposed one takes; without brgemm a bias is added to a result in float."""
    found = next(filter(None, (kernel(problem) for kernel in _DECONVOLUTION)), None)
    if found is not None or not problem.bias:
        return _nested(found or backward_data_primitive(problem))
    primitive = backward_data_primitive(problem._replace(float_gradient=True))
    result = primitive.input or problem.input_bytes(problem.channels)
    return _nested(primitive, result // problem.element_size * FLOAT)


def forward(call: Convolution, result: Tensor) -> list[int]:
    """Requests of a forward, the result included."""
    problem, layout = _problem(call, result), call.memory_format
    copies = contiguous_copy(call.input, layout) + contiguous_copy(call.weight, layout)
    if call.settings.transposed:
        return [copies, *_requests(problem, transposed_forward_primitive(problem), turned=True)]
    return [copies, *_requests(problem, forward_primitive(problem))]


def backward(call: Convolution, grad_output: Tensor, output_mask: Sequence[bool]) -> list[int]:
    """Requests of the input's gradient, then of the weight's and the bias's."""
    problem, layout = _problem(call, grad_output), call.memory_format
    operands = grad_output, call.input, call.weight
    requests = [sum(contiguous_copy(operand, layout) for operand in operands)]
    if output_mask[0]:
        if call.settings.transposed:
            primitive = _nested(forward_primitive(problem._replace(bias=False)))
            requests += _requests(problem, primitive)
        else:
            requests += _requests(problem, backward_data_primitive(problem), turned=True)
    if output_mask[1] or output_mask[2]:
        # mkldnn_convolution_backward_weights
        if call.settings.transposed:
            primitive = _nested(backward_weights_primitive(problem._replace(bias=False)))
            filters = problem.channels
        else:
            primitive, filters = backward_weights_primitive(problem), problem.filters
        plain = problem.weight_bytes
        written = primitive.weight or plain
        summed = (filters if output_mask[2] else 0) * problem.element_size
        working = primitive.input + primitive.output + primitive.scratchpad
        turn = [plain, -plain] if problem.channels_last else []
        requests += [working, written + summed, -working, summed, plain, *turn, -written - summed]
    return requests


def _problem(call: Convolution, result: Tensor) -> Problem:
    """Return what oneDNN is asked, where ``result`` is the output or its gradient."""
    input, output = tuple(call.input.shape[2:]), tuple(result.shape[2:])
    channels, filters = call.input.shape[1], result.shape[1]
    if call.settings.transposed:
        input, output, channels, filters = output, input, filters, channels
    return Problem(
        host=call.machine,
        dtype=call.input.dtype,
        dims=call.dims,
        batch=call.input.shape[0],
        groups=call.settings.groups,
        channels=channels,
        filters=filters,
        input=_deep(input, 1),
        output=_deep(output, 1),
        kernel=_deep(tuple(call.weight.shape[2:]), 1),
        stride=_deep(call.settings.stride, 1),
        dilation=_deep(call.settings.dilation, 1),
        padding=_deep(call.settings.padding, 0),
        bias=call.bias,
        channels_last=call.memory_format != CONTIGUOUS,
    )


def _deep(sizes: Sequence[int], filling: int) -> Sizes:
    """Depth, height and width, of an image too."""
    return *(filling,) * (3 - len(sizes)), *sizes


def _requests(problem: Problem, primitive: Primitive, turned: bool = False) -> list[int]:
    """Requests of a kernel that reads the input and writes the output, or ``turned`` reads the
    output, or its gradient, and writes the input's; the result included.

    Channels last, the kernel writes where the caller wants it. Else what it writes is copied, twice
    where it chose channels last: ``mkldnn_to_dense`` keeps that layout.
    """
    sides = [(problem.channels, problem.input_space), (problem.filters, problem.output_space)]
    plain = [problem.input_bytes(problem.channels), problem.output_bytes(problem.filters)]
    source, result = (1, 0) if turned else (0, 1)
    working = primitive.weight + primitive.scratchpad
    if problem.channels_last:
        return [plain[result], working, -working]
    own = primitive.input, primitive.output
    # One channel or one pixel lies the same both ways.
    chosen = [primitive.channels_last and 1 not in side for side in sides]
    working += own[source] if chosen[source] or not primitive.channels_last else 0
    written = own[result] or plain[result]
    turn = [plain[result], -plain[result]] if chosen[result] else []
    return [written, working, -working, plain[result], *turn, -written]
