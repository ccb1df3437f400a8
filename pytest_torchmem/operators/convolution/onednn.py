"""oneDNN's convolutions: operands in the layouts that its kernel wants, and its scratchpad.

native/mkldnn/Conv.cpp calls oneDNN through ideep, which copies operands into the kernel's layouts;
``libraries/onednn/`` knows those and the scratchpads.
"""

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.operators.convolution.choice import Convolution
from pytest_torchmem.operators.geometry import contiguous_copy
from pytest_torchmem.operators.libraries.onednn import convolution_list
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, Sizes


def forward(call: Convolution, result: Tensor) -> list[int]:
    """Requests of a forward, the result included."""
    problem = _problem(call, result)
    copies = _format_copies(call, call.input, call.weight)
    if call.settings.transposed:
        return [copies, *_as_transposed(problem, convolution_list.transposed_forward(problem))]
    return [copies, *_as_forward(problem, convolution_list.forward(problem))]


def backward(call: Convolution, grad_output: Tensor, output_mask: Sequence[bool]) -> list[int]:
    """Requests of the input's gradient, then of the weight's and the bias's."""
    problem = _problem(call, grad_output)
    requests = [_format_copies(call, grad_output, call.input, call.weight)]
    if output_mask[0]:
        if call.settings.transposed:
            requests += _as_forward(problem, convolution_list.transposed_backward_data(problem))
        else:
            requests += _as_transposed(problem, convolution_list.backward_data(problem))
    if output_mask[1] or output_mask[2]:
        chosen = (
            convolution_list.transposed_backward_weights
            if call.settings.transposed
            else convolution_list.backward_weights
        )
        filters = problem.channels if call.settings.transposed else problem.filters
        requests += _of_weight(problem, chosen(problem), filters if output_mask[2] else 0)
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
        channels_last=call.channels_last,
    )


def _deep(sizes: Sequence[int], filling: int) -> Sizes:
    """Depth, height and width, of an image too."""
    depth, height, width = (*(filling,) * (3 - len(sizes)), *sizes)
    return depth, height, width


def _format_copies(call: Convolution, *operands: Tensor) -> int:
    """Copies into the format of the call."""
    return sum(contiguous_copy(operand, call.memory_format) for operand in operands)


def _as_forward(problem: Problem, primitive: Primitive) -> list[int]:
    """Requests of a kernel that reads the input and writes the output."""
    source = (problem.channels, problem.input_space, primitive.input)
    result = (problem.filters, problem.output_space, primitive.output)
    return _requests(problem, primitive, source, result, problem.output_bytes(problem.filters))


def _as_transposed(problem: Problem, primitive: Primitive) -> list[int]:
    """Requests of a kernel that reads the output, or its gradient, and writes the input's."""
    source = (problem.filters, problem.output_space, primitive.output)
    result = (problem.channels, problem.input_space, primitive.input)
    return _requests(problem, primitive, source, result, problem.input_bytes(problem.channels))


def _requests(
    problem: Problem,
    primitive: Primitive,
    source: tuple[int, int, int],
    result: tuple[int, int, int],
    plain: int,
) -> list[int]:
    """Requests of one kernel, the result included: channels, pixels and own bytes of both sides.

    Channels last, the kernel writes where the caller wants it. Else what it writes is copied, twice
    where it chose channels last: ``mkldnn_to_dense`` keeps that layout.
    """
    working = primitive.weight + primitive.scratchpad
    if problem.channels_last:
        return [plain, working, -working]

    def stays(channels: int, pixels: int) -> bool:
        """One channel or one pixel lies the same both ways."""
        return primitive.channels_last and (channels == 1 or pixels == 1)

    working += 0 if stays(*source[:2]) else source[2]
    written = result[2] or plain
    turned = primitive.channels_last and not stays(*result[:2])
    turn = [plain, -plain] if turned else []
    return [written, working, -working, plain, *turn, -written]


def _of_weight(problem: Problem, primitive: Primitive, bias: int) -> list[int]:
    """Requests of mkldnn_convolution_backward_weights, the gradients included."""
    plain = problem.weight_bytes
    written = primitive.weight or plain
    summed = bias * problem.element_size
    working = primitive.input + primitive.output + primitive.scratchpad
    turn = [plain, -plain] if problem.channels_last else []
    return [working, written + summed, -working, summed, plain, *turn, -written - summed]
