"""Gradients of weights by direct convolutions in float32, ``jit:avx512_core``;
src/cpu/x64/jit_avx512_common_conv_kernel.cpp and jit_avx512_common_convolution.hpp.
"""

from __future__ import annotations

import math

from pytest_torchmem.operators.libraries.onednn.blocks import Blocks, is_first
from pytest_torchmem.operators.libraries.onednn.problem import (
    BARRIER,
    VECTOR,
    Primitive,
    Problem,
    booked,
    share,
)
from pytest_torchmem.operators.libraries.onednn.sharing import (
    Work,
    bias_reduction,
    least_computation,
    least_memory,
)
from pytest_torchmem.operators.rounding import round_up

_NAME = "jit:avx512_core"
_FLOAT = 4
_LONGEST_PADDING = 28


def backward_weights(problem: Problem) -> Primitive | None:
    """Threads that share images, or rows of them, have a copy of the weight's gradient each."""
    first = is_first(problem)
    blocks = _weight_channels(problem, first)
    if problem.bfloat16 or blocks is None or not _weight_bounds(problem):
        return None
    filters = round_up(blocks.filters, VECTOR)
    channels = round_up(blocks.channels, blocks.channel_block)
    on_images = _threads_on_images(problem, blocks)
    entries: list[int | tuple[int, int]] = []
    if on_images > 1:
        weight = problem.groups * filters * (channels * problem.taps + 1)
        entries += [weight * (on_images - 1) * _FLOAT, BARRIER]
    if problem.bias and problem.group_filters % VECTOR:
        entries.append(problem.groups * filters * _FLOAT)
    if problem.bias:
        entries += bias_reduction(
            _threads_used(problem, blocks),
            VECTOR,
            problem.groups * share(blocks.filters, VECTOR),
            problem.batch,
        )
    return Primitive(
        _NAME,
        blocks.input_bytes(problem),
        problem.groups * filters * channels * problem.taps * _FLOAT,
        blocks.output_bytes(problem),
        booked(*entries),
    )


def _weight_channels(problem: Problem, first: bool) -> Blocks | None:
    channels, filters = problem.group_channels, problem.group_filters
    if problem.channels_last:
        return Blocks(VECTOR, channels, filters, first)
    if not problem.grouped:
        if first and channels > 3:
            return None
        padded = channels if first else round_up(channels, VECTOR)
        return Blocks(VECTOR, padded, round_up(filters, VECTOR), first)
    if channels % VECTOR or filters % VECTOR:
        return None
    return Blocks(VECTOR, channels, filters, False)


def _weight_bounds(problem: Problem) -> bool:
    gaps, steps, extent = problem.dilation, problem.stride, problem.extent
    if any(gaps[axis] != 1 and steps[axis] != 1 for axis in (0, 1)):
        return False
    if gaps[1] != 1 and extent[1] > problem.input[1]:
        return False
    if problem.dims == 3 and gaps[0] != 1:
        return False
    start, end = problem.padding, [max(0, amount) for amount in problem.end_padding]
    if start[2] >= extent[2] or end[2] >= extent[2] or max(start[2], end[2]) > _LONGEST_PADDING:
        return False
    if max(start[1], end[1]) > extent[1] // 2:
        return False
    if start[0] >= extent[0] or end[0] >= extent[0]:
        return False
    if start[0] > 0 and problem.kernel[0] >= problem.input[0] + start[0]:
        return False
    return problem.kernel[2] <= 14 or _is_transposed(problem)


def _is_transposed(problem: Problem) -> bool:
    """A single column of results: the kernel goes down instead of across."""
    return (
        not problem.channels_last
        and problem.dims == 2
        and 14 <= problem.kernel[2] < 20
        and problem.output[2] == 1
        and problem.kernel[2] == problem.input[2]
        and not problem.strided
        and not problem.dilated
        and problem.padding == (0, 0, 0)
        and max(problem.end_padding) <= 0
    )


def _work(problem: Problem, blocks: Blocks) -> Work:
    transposed = _is_transposed(problem)
    by_rows = (
        problem.dilation[1] == 1
        and problem.dims == 2
        and problem.output[1] > 9
        and not transposed
        and not problem.channels_last
    )
    depth, height, width = problem.input
    result_depth, result_height, result_width = problem.output
    if transposed:
        height, width = width, height
        result_height, result_width = result_width, result_height
    parts = max(1, result_height // 9) if by_rows else 1
    rows = result_height if by_rows else 1
    row_input = 1 if by_rows else height
    row_output = 1 if by_rows else result_height
    block = blocks.channel_block
    # Rows of the input and of the output are counted apart; see ``_memory``.
    return Work(
        threads=problem.threads // problem.groups,
        images=problem.batch * rows,
        most_on_images=problem.batch * result_depth * parts,
        filter_blocks=share(blocks.filters, VECTOR),
        channel_blocks=share(blocks.channels, block),
        input=block * row_input * width * depth,
        output=VECTOR * row_output * result_width * result_depth,
        weight=block * VECTOR * problem.taps,
    )


def _memory(problem: Problem, blocks: Blocks, work: Work) -> dict[tuple[int, int, int], int]:
    """What ``balance`` weighs: the input divided by the strides, rows of it where those are
    shared.
    """
    by_rows = work.images != problem.batch
    images = problem.batch * (problem.input[1] if by_rows else 1)

    def memory(on_images: int, on_filters: int, on_channels: int) -> int:
        per_channel = share(work.channel_blocks, on_channels)
        per_filter = share(work.filter_blocks, on_filters)
        source = share(images, on_images) * per_channel * work.input
        for step in problem.stride:
            source //= step
        result = share(work.images, on_images) * per_filter * work.output
        return source + result + 8 * per_filter * per_channel * work.weight

    return {choice: memory(*choice) for choice in ((1, 1, 1), *work.choices())}


def _division(problem: Problem, blocks: Blocks) -> tuple[int, int, int]:
    if problem.threads < problem.groups:
        return 1, 1, 1
    work = _work(problem, blocks)
    memory = _memory(problem, blocks, work)

    def weigh(*choice: int) -> int:
        return memory[choice]  # type: ignore[index]

    best = least_computation(work, weigh, least_memory(work, weigh))
    images, filters, channels = best
    if problem.threads // 2 < images < problem.threads:
        images = min(work.most_on_images, problem.threads)
    return images, filters, channels


def _threads_on_images(problem: Problem, blocks: Blocks) -> int:
    return _division(problem, blocks)[0]


def _threads_used(problem: Problem, blocks: Blocks) -> int:
    if problem.threads < problem.groups:
        return problem.threads
    return math.prod(_division(problem, blocks)) * problem.groups
