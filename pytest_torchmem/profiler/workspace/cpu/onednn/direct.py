"""Direct convolutions in float32, ``jit:avx512_core``;
src/cpu/x64/jit_avx512_common_conv_kernel.cpp.

They want blocks of 16 channels, or take channels last as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_torchmem.profiler.workspace.cpu.onednn.problem import (
    BARRIER,
    L1,
    L2,
    VECTOR,
    Primitive,
    Problem,
    booked,
    round_up,
    share,
)
from pytest_torchmem.profiler.workspace.cpu.onednn.sharing import (
    Work,
    bias_reduction,
    least_computation,
    least_memory,
)

_NAME = "jit:avx512_core"
_FLOAT = 4
_CODE = 256 * 1024
_REGISTERS = 28


@dataclass(frozen=True)
class _Channels:
    """How a kernel blocks channels and filters of one group."""

    block: int
    channels: int
    filters: int
    first: bool
    """Few input channels, which are not blocked: the first layer of a network."""

    @property
    def channel_block(self) -> int:
        return self.channels if self.first else self.block


def _channels(problem: Problem, first: bool) -> _Channels | None:
    """Blocks of 16, of 8 or 4 in groups too small for that; none where groups fill no block."""
    channels, filters, block = problem.group_channels, problem.group_filters, VECTOR
    if not problem.grouped and not problem.channels_last:
        padded = channels if first else round_up(channels, VECTOR)
        return _Channels(VECTOR, padded, round_up(filters, VECTOR), first)
    narrow = not problem.channels_last or (max(channels, filters) < VECTOR and problem.grouped)
    if narrow and not first and (channels % VECTOR or filters % VECTOR):
        block = next((size for size in (8, 4) if not channels % size | filters % size), VECTOR)
    if not problem.channels_last and (filters % block or (channels % block and not first)):
        return None
    return _Channels(block, channels, filters, first)


def _is_first(problem: Problem) -> bool:
    return problem.groups == 1 and problem.channels < VECTOR


def _weight(problem: Problem, blocks: _Channels) -> int:
    channels = round_up(blocks.channels, blocks.channel_block)
    size = round_up(blocks.filters, blocks.block) * channels * problem.taps
    return problem.groups * size * _FLOAT


def _input(problem: Problem, blocks: _Channels) -> int:
    if problem.channels_last or blocks.first:
        return 0
    return problem.input_bytes(problem.groups * blocks.channels)


def _output(problem: Problem, blocks: _Channels) -> int:
    if problem.channels_last:
        return 0
    return problem.output_bytes(problem.groups * blocks.filters)


# -- forward -------------------------------------------------------------------------------------


def forward(problem: Problem) -> Primitive | None:
    """A bias that is not whole blocks is copied into one that is."""
    blocks = _channels(problem, _is_first(problem))
    if blocks is None or problem.misses_input or not _rows_fit(problem, blocks):
        return None
    padded = problem.bias and blocks.filters != problem.group_filters
    return Primitive(
        _NAME,
        _input(problem, blocks),
        _weight(problem, blocks),
        _output(problem, blocks),
        booked(blocks.filters * _FLOAT) if padded else 0,
    )


def _rows_fit(problem: Problem, blocks: _Channels) -> bool:
    """Padding stays within the pixels of a row that are computed at a time, and the kernel's
    code within its buffer.
    """
    unrolled, filter_blocks = _forward_unrolling(problem, blocks)
    width, taps = problem.output[2], problem.kernel[2]
    start, stride, extent = problem.padding[2], problem.stride[2], problem.extent[2]
    size = problem.input[2]

    def end(pixels: int) -> int:
        return (pixels - 1) * stride + extent - (size + start)

    if start > unrolled or max(0, end(width - width % unrolled)) > unrolled:
        return False
    initially = min(width, _REGISTERS)
    variants = 1 + (start > 0) + (end(initially * (width // initially)) > 0)
    code = variants * taps * blocks.channel_block * filter_blocks * unrolled * 15
    return code <= _CODE


def _forward_unrolling(problem: Problem, blocks: _Channels) -> tuple[int, int]:
    """Pixels of a row and blocks of filters that are computed at a time."""
    width, height, taps = problem.output[2], problem.output[1], problem.kernel[2]
    filters = share(blocks.filters, blocks.block)
    initially = min(width, _REGISTERS)
    rows = problem.kernel[0] * problem.kernel[1]
    working_set = _FLOAT * (
        share(problem.input[2], problem.stride[2]) * blocks.channel_block * rows
        + width * blocks.block * 2
        + rows * taps * blocks.channel_block * blocks.block * 2
    )
    small = (
        taps == 3
        and width <= 28
        and working_set < L1
        and not (width == 13 and blocks.channels >= 192)
        and not (width == 28 and blocks.channels >= 512)
    )
    tall = (
        problem.groups == problem.batch == problem.stride[1] == problem.stride[2] == width == 1
        and problem.input[0] == problem.kernel[0] == 1
        and problem.input[2] == taps
        and filters > 1
        and problem.padding[2] == 0
        and height >= 60
        and problem.kernel[1] >= 3
    )
    strided = problem.stride[1] != 1 or problem.stride[2] != 1
    embedded = not tall and (
        taps > 3
        or (not strided and small)
        or (strided and problem.batch <= 16 and (blocks.filters <= 192 or height <= 10) and small)
        or (
            problem.batch == 1
            and (initially >= width or blocks.first or (width <= 147 and blocks.filters <= 96))
        )
    )
    if embedded:
        pairs = (
            working_set < L1
            and width <= 8
            and problem.kernel[1] <= 3
            and taps <= 3
            and filters % 2 == 0
            and (not blocks.first or problem.batch == 1)
            and (problem.batch != 1 or initially < width)
        )
        return (min(width, 10), 2) if pairs else (initially, 1)
    if blocks.first and problem.batch == 1 and not tall:
        return initially, 1
    chosen = 1
    divisors = [size for size in range(min(filters, 5), 0, -1) if filters % size == 0]
    if tall:
        chosen = divisors[0]
    else:
        best = 0.0
        for size in divisors:
            pixels = min(width, 31 // (size + 1))
            row_block = _row_block(problem, blocks, size, pixels)
            efficiency = _efficiency(problem, blocks, size, row_block)
            if efficiency > 1.05 * best:
                chosen, best = size, efficiency
    return min(width, 31 // (chosen + 1)), chosen


def _efficiency(problem: Problem, blocks: _Channels, size: int, row_block: int) -> float:
    width = problem.output[2]
    chunks = share(share(blocks.filters, blocks.block), size)
    work = problem.batch * problem.output[1] * chunks * share(width, row_block)
    balance = width / round_up(width, row_block)
    return balance * work / round_up(work, problem.threads)


def _row_block(problem: Problem, blocks: _Channels, size: int, pixels: int) -> int:
    width = problem.output[2]
    if blocks.first or problem.dims == 3:
        return width
    room = L2 * 7 // 8 // _FLOAT
    source = blocks.channel_block * pixels * problem.kernel[1]
    result = blocks.block * size * pixels
    weight = blocks.block * size * blocks.channel_block * problem.kernel[2] * problem.kernel[1]
    in_cache = int((room - 2 * weight) / (2 * result + 2 * source))
    chosen = pixels * max(2, in_cache)
    efficiency = _efficiency(problem, blocks, size, chosen)
    for parts in range(share(width, chosen), share(width, 2 * pixels) + 1):
        tried = min(round_up(share(width, parts), pixels), width)
        if tried < size * blocks.block and efficiency > 0.9:
            break
        if share(width, tried) != parts:
            continue
        reached = _efficiency(problem, blocks, size, tried)
        if tried >= 2 * pixels and reached > efficiency:
            chosen, efficiency = tried, reached
        if efficiency > 0.98:
            break
    return min(width, max(2 * pixels, chosen))


# -- gradient of the input -----------------------------------------------------------------------


def backward_data(problem: Problem) -> Primitive | None:
    """Blocks of channels on both sides, also of few."""
    gaps = zip(problem.dilation, problem.stride, strict=True)
    if any(gap != 1 and step != 1 for gap, step in gaps) or problem.misses_input:
        return None
    blocks = _channels(problem, first=False)
    if blocks is None or not _input_rows_fit(problem, blocks):
        return None
    return Primitive(
        _NAME,
        _input(problem, blocks),
        _weight(problem, blocks),
        _output(problem, blocks),
    )


def _input_rows_fit(problem: Problem, blocks: _Channels) -> bool:
    """As of the forward, for rows of the input."""
    width, taps, step = problem.input[2], problem.kernel[2], problem.stride[2]
    reach = problem.extent[2] - 1
    left = max(0, reach - problem.padding[2]) // step
    end = problem.end_padding[2]
    channel_blocks = share(blocks.channels, blocks.block)
    wide = (
        14 <= taps < 20
        and problem.output[2] == 1
        and channel_blocks > 1
        and taps == width
        and step == 1
        and not problem.dilated
    )
    unrolled, at_a_time = _backward_unrolling(problem, blocks, channel_blocks, wide)
    tail = width % unrolled
    if left * step > unrolled and not wide:
        return False
    right = max(0, int((reach - max(0, end + tail)) / step))
    if right * step > unrolled:
        return False
    if width > unrolled and (unrolled % step or end + tail < 0):
        return False
    variants = 1 + (left > 0) + (right > 0)
    code = variants * taps * blocks.block * at_a_time * unrolled * 15
    return wide or code <= _CODE


def _backward_unrolling(
    problem: Problem, blocks: _Channels, channel_blocks: int, wide: bool
) -> tuple[int, int]:
    width, taps = problem.input[2], problem.kernel[2]
    rows = problem.kernel[1]
    working_set = _FLOAT * (
        width * blocks.block * 2 * rows
        + problem.output[2] * blocks.block
        + rows * taps * blocks.block * blocks.block * 2
    )
    strided = problem.stride[1] > 1 or problem.stride[0] > 1
    slow = (
        taps == 1
        or (taps == 5 and width < 8)
        or (taps < 5 and (width <= 5 or 8 < width <= 13 or working_set > L1))
    )
    if (not slow or strided) and not wide:
        large = taps > 3 or (taps == 3 and working_set < L1 and problem.output[2] > 8)
        if not large and not strided and channel_blocks % 2 == 0:
            return min(width, 10), 2
        return min(width, _REGISTERS), 1
    most = min(2 if wide else 4, channel_blocks)
    at_a_time = next(size for size in range(most, 0, -1) if channel_blocks % size == 0)
    return min(width, 31 // (at_a_time + 1)), at_a_time


# -- gradient of the weight ----------------------------------------------------------------------


def backward_weights(problem: Problem) -> Primitive | None:
    """Threads that share images, or rows of them, have a copy of the weight's gradient each."""
    first = _is_first(problem)
    blocks = _weight_channels(problem, first)
    if blocks is None or not _weight_bounds(problem):
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
        _input(problem, blocks),
        problem.groups * filters * channels * problem.taps * _FLOAT,
        _output(problem, blocks),
        booked(*entries),
    )


def _weight_channels(problem: Problem, first: bool) -> _Channels | None:
    channels, filters = problem.group_channels, problem.group_filters
    if problem.channels_last:
        return _Channels(VECTOR, channels, filters, first)
    if not problem.grouped:
        if first and channels > 3:
            return None
        padded = channels if first else round_up(channels, VECTOR)
        return _Channels(VECTOR, padded, round_up(filters, VECTOR), first)
    if channels % VECTOR or filters % VECTOR:
        return None
    return _Channels(VECTOR, channels, filters, False)


def _weight_bounds(problem: Problem) -> bool:
    gaps, steps, extent = problem.dilation, problem.stride, problem.extent
    if any(gaps[axis] != 1 and steps[axis] != 1 for axis in (0, 1)):
        return False
    if gaps[1] != 1 and extent[1] > problem.input[1]:
        return False
    if problem.dims == 3 and gaps[0] != 1:
        return False
    start, end = problem.padding, [max(0, amount) for amount in problem.end_padding]
    if start[2] >= extent[2] or end[2] >= extent[2] or max(start[2], end[2]) > _REGISTERS:
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


def _work(problem: Problem, blocks: _Channels) -> Work:
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


def _memory(problem: Problem, blocks: _Channels, work: Work) -> dict[tuple[int, int, int], int]:
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


def _division(problem: Problem, blocks: _Channels) -> tuple[int, int, int]:
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


def _threads_on_images(problem: Problem, blocks: _Channels) -> int:
    return _division(problem, blocks)[0]


def _threads_used(problem: Problem, blocks: _Channels) -> int:
    if problem.threads < problem.groups:
        return problem.threads
    return math.prod(_division(problem, blocks)) * problem.groups
