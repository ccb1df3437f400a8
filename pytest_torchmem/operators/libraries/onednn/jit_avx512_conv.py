"""Direct convolutions in float32, ``jit:avx512_core``, and in bfloat16, ``jit_bf16``: they want
blocks of 16 channels, or take channels last as they are; src/cpu/x64/
jit_avx512_common_conv_kernel.cpp, jit_avx512_common_convolution.hpp and
jit_avx512_core_bf16_conv_kernel.cpp.

In bfloat16 gradients of the weight are summed in float, from rows of both operands in which two
pixels lie side by side.

At the end those of AVX2 in float32, ``jit:avx2``, in blocks of 8 channels: on AVX512 machines they
take what the kernels of AVX512 refuse, few channels; src/cpu/x64/jit_avx2_conv_kernel_f32.cpp.
"""

import math
from collections.abc import Callable

from pytest_torchmem.operators.libraries.onednn.problem import (
    BARRIER,
    VECTOR,
    Blocks,
    Division,
    Primitive,
    Problem,
    bias_reduction,
    blocks_of,
    cheapest,
    divisions,
    efficiency,
    input_row_fits,
    input_row_pixels,
    is_first,
    overlaps,
    reduction,
    weights_take_padding,
)
from pytest_torchmem.operators.workspace import FLOAT, Entry, ceil_div, round_up

_CODE = 256 * 1024
_CODE_OF_PRODUCT = 15
_REGISTERS, _REGISTERS_OF_BFLOAT16 = 28, 31
_LONGEST_PADDING = 28
_SHORT_VECTOR = 8
_FEW_REGISTERS = 15
_REDUCTION_ROOM = 1 << 21
_ROWS = 9
"""Rows of an image that one thread takes at least, where threads share images."""
_SIZE = 2
_LONGEST_ROW = 28
_ROWS_IN_CACHE = 48 * 1024


# -- forward -------------------------------------------------------------------------------------


def forward(problem: Problem) -> Primitive | None:
    """A row has to fit the registers, and in float32 the kernel's code its buffer. A bias that is
    not whole blocks is copied into one that is. In bfloat16 a first layer has a plain input, and
    channels of weights in pairs.
    """
    blocks = blocks_of(problem, is_first(problem), smaller=(8, 4))
    if blocks is None or problem.misses_input:
        return None
    if not (_row_of_bfloat16_fits if problem.bfloat16 else _row_fits)(blocks):
        return None
    found = blocks.primitive(blocks.padded_bias)
    if not (blocks.first and problem.bfloat16):
        return found
    return found._replace(weight=found.weight // blocks.channels * round_up(blocks.channels, 2))


def _row_fits(blocks: Blocks) -> bool:
    problem, (pixels, filter_blocks) = blocks.problem, _output_unrolling(blocks)
    width, taps = problem.output[2], problem.kernel[2]
    whole = width - width % min(width, _REGISTERS)
    variants = 1 + (problem.padding[2] > 0) + (problem.reach(2, whole) > 0)
    products = variants * taps * blocks.channel_block * filter_blocks * pixels
    return problem.padding[2] <= pixels and products * _CODE_OF_PRODUCT <= _CODE


def _row_of_bfloat16_fits(blocks: Blocks) -> bool:
    width, start = blocks.problem.output[2], blocks.problem.padding[2]
    for at_a_time in range(min(4, blocks.filter_blocks), 1, -1):
        pixels = _REGISTERS_OF_BFLOAT16 // (at_a_time + 1)
        even = blocks.filter_blocks % at_a_time == 0
        if even and start <= pixels and (width == 1 or width % pixels != 1):
            return start <= width
    return start <= min(width, _REGISTERS_OF_BFLOAT16 // 2)


def _output_unrolling(blocks: Blocks) -> tuple[int, int]:
    """Pixels of a row and blocks of filters that are computed at a time."""
    problem, filters, width = blocks.problem, blocks.filter_blocks, blocks.problem.output[2]
    tall = (
        {problem.groups, problem.batch, *problem.stride[1:], width} == {1}
        and problem.input[0] == problem.kernel[0] == 1
        and problem.input[2] == problem.kernel[2]
        and filters > 1
        and problem.padding[2] == 0
        and problem.output[1] >= 60
        and problem.kernel[1] >= 3
    )
    if not tall and _embeds_output(blocks):
        pairs = (
            _working_set(blocks) < problem.host.l1
            and width <= 8
            and problem.kernel[1] <= 3
            and problem.kernel[2] <= 3
            and filters % 2 == 0
            and problem.batch > 1
            and not blocks.first
        )
        return (width, 2) if pairs else (min(width, _REGISTERS), 1)
    divisors = [size for size in range(min(filters, 5), 0, -1) if filters % size == 0]
    chosen = divisors[0] if tall else 1
    best = 0.0
    for size in [] if tall else divisors:
        pixels = min(width, 31 // (size + 1))
        reached = _row_efficiency(blocks, size, _row_block(blocks, size, pixels))
        if reached > 1.05 * best:
            chosen, best = size, reached
    return min(width, 31 // (chosen + 1)), chosen


def _working_set(blocks: Blocks) -> int:
    """Bytes of a row of the operands; ``ker_total_size``."""
    problem = blocks.problem
    rows = problem.kernel[0] * problem.kernel[1]
    source = ceil_div(problem.input[2], problem.stride[2]) * blocks.channel_block * rows
    result = problem.output[2] * blocks.block * 2
    weight = rows * problem.kernel[2] * blocks.channel_block * blocks.block * 2
    return FLOAT * (source + result + weight)


def _embeds_output(blocks: Blocks) -> bool:
    """Whether products read the input where it is, instead of from registers; ``embd_bcast``."""
    problem = blocks.problem
    taps, (_, height, width) = problem.kernel[2], problem.output
    small = (
        taps == 3
        and width <= 28
        and _working_set(blocks) < problem.host.l1
        and not (width == 13 and blocks.channels >= 192)
        and not (width == 28 and blocks.channels >= 512)
    )
    strided = problem.stride[1:] != (1, 1)
    few = problem.batch <= 16 and (blocks.filters <= 192 or height <= 10)
    narrow = width <= _REGISTERS or (width <= 147 and blocks.filters <= 96)
    single = problem.batch == 1 and (blocks.first or narrow)
    return taps > 3 or (small and (few or not strided)) or single


def _row_efficiency(blocks: Blocks, size: int, row_block: int) -> float:
    problem, width = blocks.problem, blocks.problem.output[2]
    chunks = ceil_div(blocks.filter_blocks, size)
    work = problem.batch * problem.output[1] * chunks * ceil_div(width, row_block)
    return efficiency(width, row_block) * work / round_up(work, problem.threads)


def _row_block(blocks: Blocks, size: int, pixels: int) -> int:
    problem, width = blocks.problem, blocks.problem.output[2]
    if blocks.first or problem.dims == 3:
        return width
    room = problem.host.l2 * 7 // 8 // FLOAT
    _, height, taps = problem.kernel
    source = blocks.channel_block * pixels * height
    result = blocks.block * size * pixels
    weight = blocks.block * size * blocks.channel_block * taps * height
    in_cache = int((room - 2 * weight) / (2 * result + 2 * source))
    chosen = pixels * max(2, in_cache)
    best = _row_efficiency(blocks, size, chosen)
    for parts in range(ceil_div(width, chosen), ceil_div(width, 2 * pixels) + 1):
        tried = min(round_up(ceil_div(width, parts), pixels), width)
        if tried < size * blocks.block and best > 0.9:
            break
        if ceil_div(width, tried) != parts:
            continue
        reached = _row_efficiency(blocks, size, tried)
        if tried >= 2 * pixels and reached > best:
            chosen, best = tried, reached
        if best > 0.98:
            break
    return min(width, max(2 * pixels, chosen))


# -- gradient of the input -----------------------------------------------------------------------


def backward_data(problem: Problem) -> Primitive | None:
    """Blocks of channels on both sides, also of few; rows of the input fit as the output's."""
    blocks = blocks_of(problem, first=False, smaller=(8, 4))
    if problem.moves_gaps() or problem.misses_input or blocks is None:
        return None
    if problem.bfloat16:
        pixels = input_row_pixels(blocks, _REGISTERS_OF_BFLOAT16)
        return blocks.primitive() if pixels and input_row_fits(problem, pixels) else None
    taps = problem.kernel[2]
    wide = (
        14 <= taps < 20
        and problem.output[2] == 1
        and blocks.channel_blocks > 1
        and taps == problem.input[2]
        and problem.stride[2] == 1
        and not problem.dilated
    )
    pixels, at_a_time = _input_unrolling(blocks, wide)
    left, right = overlaps(problem, pixels)
    variants = 1 + (left > 0) + (right > 0)
    products = variants * taps * blocks.block * at_a_time * pixels
    fits = wide or products * _CODE_OF_PRODUCT <= _CODE
    return blocks.primitive() if fits and input_row_fits(problem, pixels, any_left=wide) else None


def _input_unrolling(blocks: Blocks, wide: bool) -> tuple[int, int]:
    problem, channel_blocks = blocks.problem, blocks.channel_blocks
    width, result, (_, rows, taps) = problem.input[2], problem.output[2], problem.kernel
    working_set = (
        FLOAT * blocks.block * (width * 2 * rows + result + rows * taps * blocks.block * 2)
    )
    strided = max(problem.stride[:2]) > 1
    slow = (
        taps == 1
        or (taps == 5 and width < 8)
        or (taps < 5 and (width <= 5 or 8 < width <= 13 or working_set > problem.host.l1))
    )
    if (not slow or strided) and not wide:
        large = taps > 3 or (taps == 3 and working_set < problem.host.l1 and result > 8)
        if not large and not strided and channel_blocks % 2 == 0:
            return min(width, 10), 2
        return min(width, _REGISTERS), 1
    most = min(2 if wide else 4, channel_blocks)
    at_a_time = next(size for size in range(most, 0, -1) if channel_blocks % size == 0)
    return min(width, 31 // (at_a_time + 1)), at_a_time


# -- gradient of the weight ----------------------------------------------------------------------


def backward_weights(problem: Problem) -> Primitive | None:
    """Threads that share images, or rows of them, have a copy of the weight's gradient each."""
    blocks = blocks_of(problem, is_first(problem))
    if blocks is not None and problem.bfloat16:
        return _weights_of_bfloat16(blocks)
    if blocks is None or not _is_taken(blocks):
        return None
    division, threads = (1, 1, 1), problem.threads
    if problem.threads >= problem.groups:
        division = _division(blocks)
        threads = math.prod(division) * problem.groups
    entries: list[Entry] = []
    if division[0] > 1:
        copies = division[0] - 1
        entries += [(blocks.weight + blocks.padded_filters) * copies * FLOAT, BARRIER]
    if problem.bias and problem.group_filters % VECTOR:
        entries.append(blocks.padded_filters * FLOAT)
    if problem.bias:
        jobs = problem.groups * blocks.filter_blocks
        entries += bias_reduction(threads, jobs, problem.batch)
    return blocks.primitive(*entries)


def _is_taken(blocks: Blocks) -> bool:
    problem, start = blocks.problem, blocks.problem.padding[0]
    return (
        (not blocks.first or blocks.channels <= 3 or problem.channels_last)
        and not problem.moves_gaps(axes=2)
        and (problem.dims == 2 or problem.dilation[0] == 1)
        and weights_take_padding(problem)
        and problem.padding[2] <= _LONGEST_PADDING
        and (start == 0 or problem.kernel[0] < problem.input[0] + start)
        and (problem.kernel[2] <= 14 or _is_transposed(problem))
    )


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
    )


def _division(blocks: Blocks) -> Division:
    """The least memory; or less computation for 10 % more, a quarter less for any; ``balance``."""
    problem, threads = blocks.problem, blocks.problem.threads
    depth, height, width = problem.input
    result_depth, result_height, result_width = problem.output
    images = sources = most = problem.batch
    plane = problem.dims == 2 and problem.dilation[1] == 1 and not problem.channels_last
    if plane and result_height > _ROWS and not _is_transposed(problem):
        # Rows are shared, of the input and of the output.
        images, sources = images * result_height, sources * height
        most *= result_height // _ROWS
        height = result_height = 1
    source = blocks.channel_block * depth * height * width
    result = VECTOR * result_depth * result_height * result_width
    weight = 8 * blocks.channel_block * VECTOR * problem.taps

    def memory(on_images: int, on_filters: int, on_channels: int) -> int:
        filters = ceil_div(blocks.filter_blocks, on_filters)
        channels = ceil_div(blocks.channel_blocks, on_channels)
        read = ceil_div(sources, on_images) * channels * source
        for step in problem.stride:
            read //= step
        written = ceil_div(images, on_images) * filters * result
        return read + written + filters * channels * weight

    def computation(on_images: int, on_filters: int, on_channels: int) -> int:
        filters = ceil_div(blocks.filter_blocks, on_filters)
        return ceil_div(images, on_images) * filters * ceil_div(blocks.channel_blocks, on_channels)

    most *= result_depth
    each = threads // problem.groups
    choices = list(divisions(each, most, blocks.filter_blocks, blocks.channel_blocks))
    best = cheapest(choices, memory)
    least, fewest = memory(*best), computation(*best)
    for choice in choices:
        cost = computation(*choice)
        if (cost <= fewest and memory(*choice) < 1.1 * least) or 4 * cost <= 3 * fewest:
            best, fewest = choice, cost
    if threads // 2 < best[0] < threads:
        return min(most, threads), *best[1:]
    return best


# -- in bfloat16 ---------------------------------------------------------------------------------


def _weights_of_bfloat16(blocks: Blocks) -> Primitive | None:
    """Rows of operands turned for every thread on images, and the sums of each in float."""
    if not _weights_fit(blocks):
        return None
    problem, turned = blocks.problem, _Turned(blocks)
    groups, division = problem.threads, (1, 1, 1)
    if problem.threads >= problem.groups:
        groups, division = problem.groups, _division_of_bfloat16(turned)
    entries = turned.entries(groups, division)
    bias = blocks.padded_filters if problem.bias else 0
    entries.append((blocks.weight + bias) * division[0] * FLOAT)
    if not turned.by_rows:
        entries.append(BARRIER)
    return blocks.primitive(*entries)


def _weights_fit(blocks: Blocks) -> bool:
    problem, first = blocks.problem, blocks.first
    if first and not problem.channels_last and problem.filters % VECTOR:
        return False  # a first layer is not padded: its filters have to fill blocks
    width = problem.output[2]
    reaches = problem.padding[2] >= _LONGEST_ROW or problem.extent[2] > width
    return (
        not problem.moves_gaps()
        and weights_take_padding(problem)
        and not (problem.dilation[0] != 1 and problem.padding[0])
        and not (first and width > _LONGEST_ROW and reaches)
        and problem.kernel[2] <= (24 if first else 14)
    )


class _Turned:
    """The operands in rows where two pixels lie side by side."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        problem = self.problem = blocks.problem
        lone = blocks.first and (not problem.channels_last or problem.channels == 1)
        self.nothing = (
            not blocks.first
            and problem.dims == 3
            and not problem.channels_last
            and problem.kernel[2] == 1
            and problem.stride[2] == 1
        )
        """Volumes whose kernel is one pixel wide are turned as they are read."""
        self.input = not self.nothing and not lone
        end = max(0, problem.end_padding[2])
        self.guard = round_up(max(problem.padding[2], end + 1), 2)
        width, step = problem.input[2], problem.stride[2]
        turned = round_up(ceil_div(width, step) + self.guard, 2) * step
        self.input_width = turned if self.input else width
        self.output_width = round_up(problem.output[2], 1 if self.nothing else 2)
        self.by_rows = self._by_rows()

    def _by_rows(self) -> bool:
        """Large results of first layers are turned part by part, for each thread."""
        problem = self.problem
        depth, height, width = problem.output
        size = self.blocks.filters * problem.output_space
        long = width >= 124 and height > 1
        if problem.dims == 3:
            long = width * height >= 64 * 124 and depth > 1
        room = problem.host.l2 // FLOAT
        large = problem.channels_last and size >= 2 * room and min(problem.kernel) >= 6
        return self.blocks.first and not large and size >= room and long

    def entries(self, groups: int, division: Division) -> list[Entry]:
        """Buffers of the turned operands, and barriers among the threads that fill them."""
        if self.nothing:
            return []
        problem, blocks = self.problem, self.blocks
        images, filters, channels = division
        threads = math.prod(division) * groups
        depth, height, _ = problem.input
        source = self.input_width * blocks.channel_block * height * depth if self.input else 0
        result = self.output_width * VECTOR * problem.output[0] * problem.output[1]
        shared = images * problem.groups
        sources = threads if self.by_rows else shared * blocks.channel_blocks
        results = threads if self.by_rows else shared * blocks.filter_blocks
        entries: list[Entry] = [(sources * source + self.guard) * _SIZE, results * result * _SIZE]
        if not self.by_rows:
            shares = [threads // parts for parts in (filters, channels) if parts > 1]
            entries += [(barriers * BARRIER[0], BARRIER[1]) for barriers in shares]
        return entries


def _division_of_bfloat16(turned: _Turned) -> Division:
    """The threads with the least memory to read and write: ``balance``."""
    problem, blocks = turned.problem, turned.blocks
    threads = problem.threads // problem.groups
    images = problem.batch * _parts(turned)
    choices = divisions(threads, images, blocks.filter_blocks, blocks.channel_blocks)
    best = cheapest(choices, _cost(turned, images))
    return (min(images, threads), *best[1:]) if threads // 2 < best[0] < threads else best


def _parts(turned: _Turned) -> int:
    """Parts of an image that threads share: rows, or slices of a volume."""
    problem, blocks = turned.problem, turned.blocks
    if problem.dims == 3:
        return problem.output[0]
    row = (blocks.channel_block * turned.input_width + VECTOR * turned.output_width) * _SIZE
    whole = (
        problem.input == problem.output
        and 1 not in problem.kernel[1:]
        and not problem.strided
        and not problem.dilated
        and all(
            start == taps // 2 for start, taps in zip(problem.padding, problem.kernel, strict=True)
        )
        and not blocks.first
        and row * max(1, problem.padding[1]) <= _ROWS_IN_CACHE
        and blocks.channels >= 128
    )
    return 1 if whole else problem.output[1]


def _cost(turned: _Turned, images: int) -> Callable[[int, int, int], float]:
    """What a thread reads and writes, weighed, for threads on images, filters and channels."""
    problem, blocks = turned.problem, turned.blocks
    source_row = problem.input[0] * problem.input[1] * turned.input_width
    result_row = problem.output[0] * problem.output[1] * turned.output_width
    source = problem.batch * blocks.channels * source_row * 2
    result = problem.batch * blocks.filters * result_row * 2
    weight = blocks.filters * blocks.channels * problem.taps * 4
    compensation = 0.5 * (result + source) / weight
    ratio = blocks.filter_blocks / blocks.channel_blocks
    source_weight = max(1 / ratio, 1.0) * (4 if compensation < 1 else 1)
    result_weight, weight_weight = max(ratio, 1.0), max(compensation, 1.0)
    steps = math.prod(problem.stride)

    def cost(on_images: int, on_filters: int, on_channels: int) -> float:
        part = ceil_div(images, on_images)
        filters = ceil_div(blocks.filter_blocks, on_filters)
        channels = ceil_div(blocks.channel_blocks, on_channels)
        read = source_weight * part * channels * problem.batch * blocks.channel_block
        read *= source_row / images / steps
        written = weight_weight * filters * channels * problem.taps
        written *= blocks.channel_block * VECTOR
        gradient = result_weight * part * filters * problem.batch * VECTOR
        gradient *= result_row / images
        return float(read + written + gradient)

    return cost


# -- on AVX2 -------------------------------------------------------------------------------------


def forward_of_avx2(problem: Problem) -> Primitive | None:
    """Groups of fewer than 8 channels are taken as they are."""
    long = problem.kernel[2] > 7 and any(problem.padding[1:]) and problem.stride[1:] != (1, 1)
    padded = problem.padding[2] > min(3, problem.output[2])
    if long or padded or problem.bfloat16 or problem.misses_input:
        return None
    blocks = blocks_of(problem, problem.group_channels < _SHORT_VECTOR, _SHORT_VECTOR)
    return blocks.primitive(blocks.padded_bias) if blocks is not None else None


def backward_weights_of_avx2(problem: Problem) -> Primitive | None:
    """Threads that share a batch sum into buffers of their own."""
    if problem.bfloat16 or problem.dilated or problem.kernel[2] >= 14 or not _is_within(problem):
        return None
    blocks = blocks_of(problem, problem.group_channels == 3, _SHORT_VECTOR)
    if blocks is None:
        return None
    filter_blocks = problem.groups * blocks.filter_blocks
    block = blocks.weight // (filter_blocks * blocks.channel_blocks)
    rows = problem.batch * problem.output[0]
    jobs = [(block, filter_blocks * blocks.channel_blocks, rows)]
    entries: list[Entry] = []
    if problem.bias:
        if problem.group_filters % _SHORT_VECTOR:
            entries.append(blocks.padded_filters * FLOAT)
        jobs.append((_SHORT_VECTOR, filter_blocks, problem.batch))
    for job_size, number, images in jobs:
        entries += reduction(problem.threads, job_size, number, images, _REDUCTION_ROOM)
    return blocks.primitive(*entries)


def _is_within(problem: Problem) -> bool:
    (depth, *across), extent = problem.padding, problem.extent
    return (
        depth == 0
        and all(most < size for most, size in zip(across, extent[1:], strict=True))
        and problem.kernel[0] <= problem.input[0]
        and problem.kernel[1] <= problem.input[1]
    )


def backward_data_of_avx2(problem: Problem) -> Primitive | None:
    """As the forward, without copies of a bias."""
    depth, height, width = problem.stride
    moves = problem.moves_gaps() or depth != 1 or width != height
    if problem.bfloat16 or problem.misses_input or moves:
        return None
    if problem.group_channels < _SHORT_VECTOR and problem.kernel[2] > 3 and width > 1:
        return None
    blocks = blocks_of(problem, first=False, block=_SHORT_VECTOR)
    pixels = input_row_pixels(blocks, _FEW_REGISTERS) if blocks is not None else 0
    if blocks is None or not pixels or not input_row_fits(problem, pixels):
        return None
    return blocks.primitive()
