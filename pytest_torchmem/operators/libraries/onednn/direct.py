"""Direct convolutions in float32, ``jit:avx512_core``;
src/cpu/x64/jit_avx512_common_conv_kernel.cpp.

They want blocks of 16 channels, or take channels last as they are.
"""

from __future__ import annotations

from pytest_torchmem.operators.libraries.onednn.blocks import Blocks, blocks_of, is_first
from pytest_torchmem.operators.libraries.onednn.problem import (
    L1,
    L2,
    Primitive,
    Problem,
    booked,
    share,
)
from pytest_torchmem.operators.rounding import round_up

_NAME = "jit:avx512_core"
_FLOAT = 4
_CODE = 256 * 1024
_REGISTERS = 28


# -- forward -------------------------------------------------------------------------------------


def forward(problem: Problem) -> Primitive | None:
    """A bias that is not whole blocks is copied into one that is."""
    blocks = blocks_of(problem, is_first(problem))
    if blocks is None or problem.bfloat16 or problem.misses_input or not _rows_fit(problem, blocks):
        return None
    padded = problem.bias and blocks.filters != problem.group_filters
    return Primitive(
        _NAME,
        blocks.input_bytes(problem),
        blocks.weight_bytes(problem),
        blocks.output_bytes(problem),
        booked(blocks.filters * _FLOAT) if padded else 0,
    )


def _rows_fit(problem: Problem, blocks: Blocks) -> bool:
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


def _forward_unrolling(problem: Problem, blocks: Blocks) -> tuple[int, int]:
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


def _efficiency(problem: Problem, blocks: Blocks, size: int, row_block: int) -> float:
    width = problem.output[2]
    chunks = share(share(blocks.filters, blocks.block), size)
    work = problem.batch * problem.output[1] * chunks * share(width, row_block)
    balance = width / round_up(width, row_block)
    return balance * work / round_up(work, problem.threads)


def _row_block(problem: Problem, blocks: Blocks, size: int, pixels: int) -> int:
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
    if problem.bfloat16:
        return None
    if any(gap != 1 and step != 1 for gap, step in gaps) or problem.misses_input:
        return None
    blocks = blocks_of(problem, first=False)
    if blocks is None or not _input_rows_fit(problem, blocks):
        return None
    return Primitive(
        _NAME,
        blocks.input_bytes(problem),
        blocks.weight_bytes(problem),
        blocks.output_bytes(problem),
    )


def _input_rows_fit(problem: Problem, blocks: Blocks) -> bool:
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
    problem: Problem, blocks: Blocks, channel_blocks: int, wide: bool
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
