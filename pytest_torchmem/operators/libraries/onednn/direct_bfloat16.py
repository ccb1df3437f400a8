"""Direct convolutions in bfloat16, ``jit_bf16``;
src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp.

Blocks as in float32. Gradients of the weight are summed in float, from rows of both operands in
which two pixels lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pytest_torchmem.operators.libraries.onednn.blocks import Blocks, blocks_of, is_first
from pytest_torchmem.operators.libraries.onednn.problem import (
    BARRIER,
    L2,
    VECTOR,
    Primitive,
    Problem,
    booked,
    share,
)
from pytest_torchmem.operators.rounding import round_up

_NAME = "jit_bf16"
_FLOAT = 4
_SIZE = 2
_REGISTERS = 31
_LONGEST_ROW = 28


def forward(problem: Problem) -> Primitive | None:
    """A bias in whole blocks; the input of a first layer is not blocked."""
    if not problem.bfloat16 or problem.misses_input:
        return None
    blocks = blocks_of(problem, is_first(problem))
    if blocks is None or not _rows_fit(problem, blocks):
        return None
    padded = problem.bias and blocks.filters != problem.group_filters
    return Primitive(
        _NAME,
        blocks.input_bytes(problem),
        blocks.weight_bytes(problem),
        blocks.output_bytes(problem),
        booked(blocks.filters * _SIZE) if padded else 0,
    )


def _rows_fit(problem: Problem, blocks: Blocks) -> bool:
    width, start = problem.output[2], problem.padding[2]
    filters = share(blocks.filters, blocks.block)
    at_a_time = min(4, filters)
    while at_a_time > 1:
        pixels = _REGISTERS // (at_a_time + 1)
        if filters % at_a_time == 0 and start <= pixels and (width == 1 or width % pixels != 1):
            break
        at_a_time -= 1
    unrolled = min(width, _REGISTERS // (at_a_time + 1))
    last = (width - width % unrolled - 1) * problem.stride[2] + problem.extent[2]
    return max(start, last - (problem.input[2] + start)) <= unrolled


def backward_data(problem: Problem) -> Primitive | None:
    """As the forward, blocked on both sides."""
    gaps = zip(problem.dilation, problem.stride, strict=True)
    if not problem.bfloat16 or problem.misses_input:
        return None
    if any(gap != 1 and step != 1 for gap, step in gaps):
        return None
    blocks = blocks_of(problem, first=False)
    if blocks is None or not _input_rows_fit(problem, blocks):
        return None
    source = blocks.input_bytes(problem)
    return Primitive(_NAME, source, blocks.weight_bytes(problem), blocks.output_bytes(problem))


def _input_rows_fit(problem: Problem, blocks: Blocks) -> bool:
    width, step = problem.input[2], problem.stride[2]
    reach, end = problem.extent[2] - 1, problem.end_padding[2]
    left = max(0, int((reach - problem.padding[2]) / step))
    unrolled = input_pixels(width, step, share(blocks.channels, blocks.block), left, _REGISTERS)
    if not unrolled or left * step > unrolled:
        return False
    tail = width % unrolled
    right = max(0, int((reach - max(0, end + tail)) / step))
    if right * step > unrolled:
        return False
    return width <= unrolled or not (unrolled % step or end + tail < 0)


def input_pixels(width: int, step: int, blocks: int, left: int, registers: int) -> int:
    """Pixels of a row of the input that are computed at a time, for the most products."""
    best, most = 0, 0
    for at_a_time in range(1, 5):
        if blocks % at_a_time:
            continue
        for reach in range(step, width + step, step):
            if reach * at_a_time + reach // step > registers:
                break
            pixels = min(reach, width)
            if left * step > pixels and pixels != width:
                continue
            products = share(pixels, step) * at_a_time
            if products > most or (products == most and pixels > best):
                best, most = pixels, products
    return best


# -- gradient of the weight ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Threads:
    images: int
    filters: int
    channels: int
    groups: int

    @property
    def total(self) -> int:
        return self.images * self.filters * self.channels * self.groups


def backward_weights(problem: Problem) -> Primitive | None:
    """Rows of operands turned for every thread on images, and the sums of each in float."""
    if not problem.bfloat16 or not _within_bounds(problem):
        return None
    first = is_first(problem)
    blocks = _weight_blocks(problem, first)
    if blocks is None:
        return None
    filters = round_up(blocks.filters, VECTOR)
    channels = round_up(blocks.channels, blocks.channel_block)
    turned = _Turned(problem, blocks)
    threads = _division(problem, blocks, turned)
    entries: list[int | tuple[int, int]] = []
    if not turned.nothing:
        entries += turned.entries(threads)
    weight = problem.groups * filters * channels * problem.taps
    bias = problem.groups * filters if problem.bias else 0
    entries.append((weight + bias) * threads.images * _FLOAT)
    if not turned.by_rows:
        entries.append(BARRIER)
    return Primitive(
        _NAME,
        blocks.input_bytes(problem),
        weight * _SIZE,
        blocks.output_bytes(problem),
        booked(*entries),
    )


def _weight_blocks(problem: Problem, first: bool) -> Blocks | None:
    channels, filters = problem.group_channels, problem.group_filters
    if problem.channels_last:
        return Blocks(VECTOR, channels, filters, first)
    if first:
        # A first layer is not padded: its filters have to fill blocks.
        return Blocks(VECTOR, channels, filters, first) if filters % VECTOR == 0 else None
    if not problem.grouped:
        return Blocks(VECTOR, round_up(channels, VECTOR), round_up(filters, VECTOR), first)
    if channels % VECTOR or filters % VECTOR:
        return None
    return Blocks(VECTOR, channels, filters, first)


def _within_bounds(problem: Problem) -> bool:
    gaps, steps, extent = problem.dilation, problem.stride, problem.extent
    start, end = problem.padding, [max(0, amount) for amount in problem.end_padding]
    if any(gap != 1 and step != 1 for gap, step in zip(gaps, steps, strict=True)):
        return False
    if gaps[1] != 1 and extent[1] > problem.input[1]:
        return False
    if gaps[0] != 1 and (start[0] or end[0]):
        return False
    if start[2] >= extent[2] or end[2] >= extent[2]:
        return False
    if max(start[1], end[1]) > extent[1] // 2:
        return False
    if start[0] >= extent[0] or end[0] >= extent[0]:
        return False
    first = is_first(problem)
    long = first and problem.output[2] > _LONGEST_ROW
    if long and (start[2] >= _LONGEST_ROW or extent[2] > problem.output[2]):
        return False
    return problem.kernel[2] <= (24 if first else 14)


class _Turned:
    """The operands in rows where two pixels lie side by side."""

    def __init__(self, problem: Problem, blocks: Blocks) -> None:
        start, end = problem.padding[2], max(0, problem.end_padding[2])
        self.problem, self.blocks = problem, blocks
        self.nothing = (
            not blocks.first
            and problem.dims == 3
            and not problem.channels_last
            and problem.kernel[2] == 1
            and problem.stride[2] == 1
        )
        """Volumes whose kernel is one pixel wide are turned as they are read."""
        self.input = not self.nothing and not (
            blocks.first and (not problem.channels_last or problem.channels == 1)
        )
        self.guard = round_up(max(start, end + 1), 2)
        width, step = problem.input[2], problem.stride[2]
        self.input_width = round_up(share(width, step) + self.guard, 2) * step
        if not self.input:
            self.input_width = width
        self.output_width = problem.output[2]
        if not self.nothing:
            self.output_width = round_up(self.output_width, 2)
        self.by_rows = self._by_rows()

    def _by_rows(self) -> bool:
        """Large results of first layers are turned part by part, for each thread."""
        problem = self.problem
        depth, height, width = problem.output
        size = self.blocks.filters * depth * height * width
        long = width >= 124 and height > 1
        if problem.dims == 3:
            long = width * height >= 64 * 124 and depth > 1
        room = L2 // _FLOAT
        large = problem.channels_last and size >= 2 * room and min(problem.kernel) >= 6
        return self.blocks.first and not large and size >= room and long

    def entries(self, threads: _Threads) -> list[int | tuple[int, int]]:
        """Buffers of the turned operands, and barriers among the threads that fill them."""
        problem, blocks = self.problem, self.blocks
        depth, height, _ = problem.input
        rows = problem.output[0] * problem.output[1]
        channel_blocks = share(blocks.channels, blocks.channel_block)
        filter_blocks = share(blocks.filters, VECTOR)
        source = self.input_width * blocks.channel_block * height * depth if self.input else 0
        result = self.output_width * VECTOR * rows
        shared = threads.images * problem.groups
        sources = threads.total if self.by_rows else shared * channel_blocks
        results = threads.total if self.by_rows else shared * filter_blocks
        entries: list[int | tuple[int, int]] = [(sources * source + self.guard) * _SIZE]
        if not self.by_rows and threads.filters > 1:
            entries.append((threads.total // threads.filters * BARRIER[0], BARRIER[1]))
        entries.append(results * result * _SIZE)
        if not self.by_rows and threads.channels > 1:
            entries.append((threads.total // threads.channels * BARRIER[0], BARRIER[1]))
        return entries


def _division(problem: Problem, blocks: Blocks, turned: _Turned) -> _Threads:
    """The threads with the least memory to read and write: ``balance``."""
    if problem.threads < problem.groups:
        return _Threads(1, 1, 1, problem.threads)
    threads = problem.threads // problem.groups
    images = problem.batch * _parts(problem, blocks, turned)
    filter_blocks = share(blocks.filters, VECTOR)
    channel_blocks = share(blocks.channels, blocks.channel_block)
    best = (1, 1, 1)
    cost = _cost(problem, blocks, turned, images)
    least = cost(*best)
    for on_images in range(1, min(threads, images) + 1):
        each = threads // on_images
        for on_filters in range(1, min(each, filter_blocks) + 1):
            on_channels = min(each // on_filters, channel_blocks)
            found = cost(on_images, on_filters, on_channels)
            if found <= least:
                best, least = (on_images, on_filters, on_channels), found
    if threads // 2 < best[0] < threads:
        best = (min(images, threads), *best[1:])
    return _Threads(*best, problem.groups)


def _parts(problem: Problem, blocks: Blocks, turned: _Turned) -> int:
    """Parts of an image that threads share: rows, or slices of a volume."""
    if problem.dims == 3:
        return problem.output[0]
    start, end = problem.padding, [max(0, amount) for amount in problem.end_padding]
    row = (blocks.channel_block * turned.input_width + VECTOR * turned.output_width) * _SIZE
    whole = (
        problem.input == problem.output
        and 1 not in problem.kernel[1:]
        and not problem.strided
        and not problem.dilated
        and start[2] == problem.kernel[2] // 2
        and start[1] == problem.kernel[1] // 2
        and not blocks.first
        and row * max(1, end[1], start[1]) <= 48 * 1024
        and blocks.channels >= 128
    )
    return 1 if whole else problem.output[1]


def _cost(
    problem: Problem, blocks: Blocks, turned: _Turned, images: int
) -> Callable[[int, int, int], float]:
    """What a thread reads and writes, weighed, for threads on images, filters and channels."""
    depth, height, _ = problem.input
    result_rows = problem.output[0] * problem.output[1]
    source = problem.batch * blocks.channels * depth * height * turned.input_width * 2
    result = problem.batch * blocks.filters * result_rows * turned.output_width * 2
    weight = blocks.filters * blocks.channels * problem.taps * 4
    compensation = 0.5 * (result + source) / weight
    filter_blocks = share(blocks.filters, VECTOR)
    channel_blocks = share(blocks.channels, blocks.channel_block)
    ratio = filter_blocks / channel_blocks
    source_weight = max(1 / ratio, 1.0) * (4 if compensation < 1 else 1)
    result_weight, weight_weight = max(ratio, 1.0), max(compensation, 1.0)
    steps = problem.stride[0] * problem.stride[1] * problem.stride[2]

    def cost(on_images: int, on_filters: int, on_channels: int) -> float:
        part = share(images, on_images)
        filters, channels = share(filter_blocks, on_filters), share(channel_blocks, on_channels)
        read = source_weight * part * channels * problem.batch * blocks.channel_block
        read *= depth * height * turned.input_width / images / steps
        written = weight_weight * filters * channels * problem.taps
        written *= blocks.channel_block * VECTOR
        gradient = result_weight * part * filters * problem.batch * VECTOR
        gradient *= result_rows * turned.output_width / images
        return float(read + written + gradient)

    return cost
