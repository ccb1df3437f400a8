"""Direct convolutions in bfloat16, ``jit_bf16``;
src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp.

Blocks as in float32. Gradients of the weight are summed in float, from rows of both operands in
which two pixels lie side by side.
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
    blocks_of,
    cheapest,
    divisions,
    input_row_fits,
    input_row_pixels,
    is_first,
    weights_take_padding,
)
from pytest_torchmem.operators.workspace import FLOAT, Entry, ceil_div, round_up

_SIZE = 2
_REGISTERS = 31
_LONGEST_ROW = 28
_ROWS_IN_CACHE = 48 * 1024


def forward(problem: Problem) -> Primitive | None:
    """A bias in whole blocks; a first layer has a plain input, and channels of weights in pairs."""
    blocks = blocks_of(problem, is_first(problem), smaller=(8, 4))
    if not problem.bfloat16 or problem.misses_input or blocks is None:
        return None
    width, start = problem.output[2], problem.padding[2]
    at_a_time = min(4, blocks.filter_blocks)
    while at_a_time > 1:
        pixels = _REGISTERS // (at_a_time + 1)
        even = blocks.filter_blocks % at_a_time == 0
        if even and start <= pixels and (width == 1 or width % pixels != 1):
            break
        at_a_time -= 1
    if start > min(width, _REGISTERS // (at_a_time + 1)):
        return None
    found = blocks.primitive(blocks.padded_bias)
    if not blocks.first:
        return found
    return found._replace(weight=found.weight // blocks.channels * round_up(blocks.channels, 2))


def backward_data(problem: Problem) -> Primitive | None:
    """As the forward, blocked on both sides."""
    blocks = blocks_of(problem, first=False, smaller=(8, 4))
    if not problem.bfloat16 or problem.misses_input or problem.moves_gaps() or blocks is None:
        return None
    pixels = input_row_pixels(blocks, _REGISTERS)
    return blocks.primitive() if pixels and input_row_fits(problem, pixels) else None


# -- gradient of the weight ----------------------------------------------------------------------


def backward_weights(problem: Problem) -> Primitive | None:
    """Rows of operands turned for every thread on images, and the sums of each in float."""
    blocks = blocks_of(problem, is_first(problem))
    if not problem.bfloat16 or blocks is None or not _weights_fit(blocks):
        return None
    turned = _Turned(blocks)
    groups, division = problem.threads, (1, 1, 1)
    if problem.threads >= problem.groups:
        groups, division = problem.groups, _division(turned)
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


def _division(turned: _Turned) -> Division:
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
