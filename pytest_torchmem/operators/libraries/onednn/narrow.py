"""Kernels of AVX2 that take on AVX512 machines what those of AVX512 refuse: few channels.

``jit:avx2``, src/cpu/x64/jit_avx2_conv_kernel_f32.cpp, in blocks of 8 channels.
"""

from __future__ import annotations

import math

from pytest_torchmem.operators.libraries.onednn.direct_bfloat16 import input_pixels
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, booked, share
from pytest_torchmem.operators.libraries.onednn.sharing import reduction
from pytest_torchmem.operators.rounding import round_up

_NAME = "jit:avx2"
_FLOAT = 4
_VECTOR = 8


def _sizes(problem: Problem, flat: bool) -> tuple[int, int, int] | None:
    """Bytes of input, weight and output; ``flat`` where the input is not blocked."""
    channels, filters = problem.group_channels, problem.group_filters
    pads = not problem.channels_last and not problem.grouped
    if pads:
        filters = round_up(filters, _VECTOR)
        channels = channels if flat else round_up(channels, _VECTOR)
    elif not problem.channels_last and (filters % _VECTOR or (channels % _VECTOR and not flat)):
        return None
    depth = channels if flat else round_up(channels, _VECTOR)
    weight = problem.groups * round_up(filters, _VECTOR) * depth * problem.taps * _FLOAT
    if problem.channels_last:
        return 0, weight, 0
    source = 0 if flat else problem.input_bytes(problem.groups * channels)
    return source, weight, problem.output_bytes(problem.groups * filters)


def forward(problem: Problem) -> Primitive | None:
    """Groups of fewer than 8 channels are taken as they are."""
    if problem.bfloat16 or problem.misses_input:
        return None
    sizes = _sizes(problem, problem.group_channels < _VECTOR)
    if sizes is None or not _rows_fit(problem):
        return None
    padded = problem.bias and not problem.channels_last and problem.filters % _VECTOR
    entry = round_up(problem.filters, _VECTOR) * _FLOAT
    return Primitive(_NAME, *sizes, booked(entry) if padded else 0)


def _rows_fit(problem: Problem) -> bool:
    width, step = problem.output[2], problem.stride[2]
    start, top = problem.padding[2], problem.padding[1]
    unrolled = min(3, width)
    if start > unrolled:
        return False
    if problem.kernel[2] > 7 and (top or start) and (step != 1 or problem.stride[1] != 1):
        return False

    def end(pixels: int) -> int:
        last = (pixels - 1) * step + problem.extent[2]
        return max(0, last - (problem.input[2] + start))

    tail = width % unrolled
    beyond = end(width - tail)
    if beyond <= unrolled * step or width // unrolled <= 1:
        return True
    unrolled = min(beyond // step + tail, width, 7)
    return unrolled >= max(start, end(width - width % unrolled))


def backward_weights(problem: Problem) -> Primitive | None:
    """Threads that share a batch sum into buffers of their own."""
    if problem.bfloat16 or problem.dilated or problem.kernel[2] >= 14:
        return None
    flat = problem.group_channels == 3
    sizes = _sizes(problem, flat)
    if sizes is None or not _within_bounds(problem):
        return None
    depth = problem.group_channels if flat else _VECTOR
    filter_blocks = problem.groups * share(problem.group_filters, _VECTOR)
    channel_blocks = share(problem.group_channels, depth)
    entries: list[int | tuple[int, int]] = []
    if problem.bias and problem.group_filters % _VECTOR:
        entries.append(problem.groups * round_up(problem.group_filters, _VECTOR) * _FLOAT)
    if problem.bias:
        entries += reduction(problem.threads, _VECTOR, filter_blocks, problem.batch, _BUFFER)
    entries += reduction(
        problem.threads,
        problem.taps * depth * _VECTOR,
        filter_blocks * channel_blocks,
        problem.batch * problem.output[0],
        _BUFFER,
    )
    return Primitive(_NAME, *sizes, booked(*entries))


_BUFFER = 1 << 21


def _within_bounds(problem: Problem) -> bool:
    ends = [max(0, amount) for amount in problem.end_padding]
    if problem.padding[0] or ends[0] or problem.kernel[0] > problem.input[0]:
        return False
    for axis in (1, 2):
        if max(problem.padding[axis], ends[axis]) >= problem.extent[axis]:
            return False
    return problem.kernel[1] <= problem.input[1]


def backward_data(problem: Problem) -> Primitive | None:
    """As the forward, without copies of a bias."""
    if problem.bfloat16 or problem.misses_input or problem.stride[0] != 1:
        return None
    step, taps = problem.stride[2], problem.kernel[2]
    gaps = zip(problem.dilation, problem.stride, strict=True)
    if step != problem.stride[1] or any(gap != 1 and by != 1 for gap, by in gaps):
        return None
    if problem.group_channels < _VECTOR and taps > 3 and step > 1:
        return None
    sizes = _sizes(problem, flat=False)
    if sizes is None or not _input_rows_fit(problem):
        return None
    return Primitive(_NAME, *sizes)


def _input_rows_fit(problem: Problem) -> bool:
    width, step = problem.input[2], problem.stride[2]
    reach = problem.extent[2] - 1
    end = problem.end_padding[2]
    left = max(0, (reach - problem.padding[2]) // step)
    blocks = share(problem.group_channels, _VECTOR)
    unrolled = input_pixels(width, step, blocks, left, registers=15)
    if not unrolled:
        return False
    tail = width % unrolled
    right = max(0, math.trunc((reach - max(0, end + tail)) / step))
    if left * step > unrolled or right * step > unrolled:
        return False
    return width <= unrolled or not (unrolled % step or end + tail < 0)
