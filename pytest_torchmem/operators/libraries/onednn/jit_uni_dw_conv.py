"""Depthwise convolutions: one channel to a group.

``brdgmm_dw`` (src/cpu/x64/jit_brdgmm_dw_conv.cpp) runs channels last, ``jit_dw``
(jit_uni_dw_conv_kernel_utils.cpp) blocks of channels too.
"""

from pytest_torchmem.operators.libraries.onednn.problem import VECTOR, Primitive, Problem
from pytest_torchmem.operators.workspace import FLOAT, booked, ceil_div, round_up


def forward_by_brdgmm(problem: Problem) -> Primitive | None:
    """``brdgmm_dw``: any volume, and images that are channels last."""
    if not problem.depthwise or problem.dilated:
        return None
    if not problem.channels_last and problem.dims == 2:
        return None
    return _operands(problem, 1)._replace(channels_last=not problem.channels_last)


def _operands(problem: Problem, block: int = VECTOR) -> Primitive:
    """The operands in blocks of channels, without input and output where they are channels last."""
    weight, channels = round_up(problem.groups, VECTOR), round_up(problem.channels, block)
    return problem.primitive(weight * problem.taps, channels=channels, filters=channels)


def forward(problem: Problem) -> Primitive | None:
    """``jit_dw``, forward: a bias that is not whole vectors of floats is copied."""
    if not problem.depthwise or problem.dims != 2 or problem.misses_input:
        return None
    width, taps, stride = problem.output[2], problem.kernel[2], problem.stride[2]
    pixels = min(6, width)  # of a row, which the kernel computes at a time
    if problem.channels_last:
        blocks = min(4, ceil_div(problem.groups, VECTOR))
        shared = (31 - taps + stride) // (blocks + stride)
        if not problem.bfloat16 and stride < taps <= 5 and problem.dilation[2] == 1 and shared >= 2:
            pixels = min(width, shared)
        if problem.groups * problem.input[2] * problem.element_size % 1024 == 0:
            pixels = min(pixels, 7 if width > 7 else 4)
    if problem.padding[2] > pixels:
        return None
    channels = problem.groups if problem.channels_last else round_up(problem.groups, VECTOR)
    copied = problem.bias and (problem.bfloat16 or channels != problem.groups)
    return _operands(problem)._replace(scratchpad=booked(channels * FLOAT if copied else 0))


def backward_data(problem: Problem) -> Primitive | None:
    """``jit_dw``, gradient of the input."""
    if not problem.depthwise or problem.dims != 2 or problem.dilated:
        return None
    return _operands(problem)


def backward_weights(problem: Problem) -> Primitive | None:
    """``jit_dw``, gradient of the weight: a copy of it for every thread that shares a batch;
    ``jit_uni_dw_conv_bwd_weights_kernel_t::init_scratchpad``.
    """
    operands = backward_data(problem)
    taps, step = problem.kernel[2], problem.stride[2]
    if operands is None or taps > 3 or step > taps or not _is_within(problem):
        return None
    padded = round_up(problem.groups, VECTOR)
    channels = problem.groups if problem.channels_last else padded
    own = 0 if problem.bfloat16 else 1  # in float32 the first thread sums into the result
    if problem.channels_last:
        copies = bias_copies = _threads_channels_last(problem) - own
    else:
        on_channels = min(padded // VECTOR, problem.threads)
        on_batch = min(max(1, problem.threads // on_channels), problem.batch)
        copies, bias_copies = on_batch - own, on_batch - 1
    entries = [padded * problem.taps * copies * FLOAT]
    if problem.bias:
        entries += [channels * bias_copies * FLOAT, channels * FLOAT * (1 - own)]
    return operands._replace(scratchpad=booked(*entries))


def _is_within(problem: Problem) -> bool:
    if any(most > taps // 2 for most, taps in zip(problem.padding, problem.kernel, strict=True)):
        return False
    step, top, bottom = problem.stride[1], problem.padding[1], max(0, problem.end_padding[1])
    uneven = any(rows > 1 and rows % step for rows in (top, bottom))
    return problem.input[1] >= problem.kernel[1] + -top % step and not uneven


def _threads_channels_last(problem: Problem) -> int:
    """Threads on blocks of channels, images and rows: the most that can work at a time, and of
    those the most even; ``partition_nthr_nxc``.
    """
    unroll = 1 if problem.bfloat16 else min(4, 31 // (2 * problem.kernel[2]))
    blocks = ceil_div(problem.groups, VECTOR)
    outer = ceil_div(blocks, min(blocks, unroll))
    threads, batch, rows = problem.threads, problem.batch, problem.output[1]
    return max(
        on_channels * on_batch * min(rows, threads // on_channels // on_batch)
        for on_channels in range(1, min(outer, threads) + 1)
        for on_batch in range(1, min(batch, threads // on_channels) + 1)
    )
