"""Convolutions with a kernel of one pixel, ``jit_1x1`` and ``jit_bf16_1x1``;
src/cpu/x64/jit_avx512_common_1x1_conv_kernel.cpp, jit_avx512_core_bf16_1x1_conv_kernel.cpp and
jit_uni_1x1_conv_utils.hpp.

In bfloat16 results are summed in float before they are written, block by block of every thread.
"""

import math
from typing import NamedTuple

from pytest_torchmem.operators.libraries.onednn.problem import (
    BARRIER,
    VECTOR,
    Blocks,
    Primitive,
    Problem,
    bias_reduction,
    blocks_of,
    cheapest,
    divisions,
)
from pytest_torchmem.operators.workspace import FLOAT, Entry, ceil_div, round_up

_SIZE = 2
_LONGEST_BLOCK = 256


def _blocks(problem: Problem) -> Blocks | None:
    """Of one group, without padding; of strides that divide the image (``rtus_prepare``)."""
    if problem.groups > 1 or problem.taps != 1 or any(problem.padding):
        return None
    pairs = zip(problem.output, problem.stride, strict=True)
    if tuple(result * step for result, step in pairs) != problem.input:
        return None
    return blocks_of(problem, first=False) if problem.dims == 2 or not problem.strided else None


def _best_divider(value: int, smallest: int, largest: int, larger: bool, step: int = 1) -> int:
    """The divider in these bounds with the least rest, and of several the ``larger``."""

    def waste(divider: int) -> float:
        return (round_up(value, divider) - value) / round_up(value, divider)

    largest = max(1, min(largest, value))
    dividers = range(largest, max(1, min(smallest, largest)) - 1, -step)
    return min(dividers if larger else reversed(dividers), key=waste)


def _thinned(problem: Problem, channels: int, threads: int) -> int:
    """Bytes of the images that strides leave, of every thread: ``rtus_prepare_space_info``."""
    if not problem.strided:
        return 0
    if problem.channels_last:
        channels = problem.channels
    return threads * problem.output_space * channels * problem.element_size


def _threads_on_pixels(problem: Problem, block: int, weight_cost: int) -> tuple[int, int]:
    """Threads on blocks of pixels, and threads in all: ``balance``."""
    threads = problem.threads
    filters, channels = ceil_div(problem.filters, VECTOR), ceil_div(problem.channels, VECTOR)
    parts = problem.batch * ceil_div(problem.output_space, block)

    def memory(on_pixels: int, on_filters: int, on_channels: int) -> int:
        each, across = ceil_div(filters, on_filters), ceil_div(channels, on_channels)
        moved = ceil_div(parts, on_pixels) * (each + across) * block
        return moved + weight_cost * each * across * VECTOR

    on_pixels, *others = cheapest(divisions(threads, parts, filters, channels), memory)
    if threads // 2 < on_pixels < threads:
        on_pixels = min(problem.batch, threads)
    return on_pixels, on_pixels * math.prod(others)


def forward(problem: Problem) -> Primitive | None:
    """A bias that is not whole blocks is copied; so is an image that strides thin out."""
    blocks = _blocks(problem)
    if blocks is None:
        return None
    threads, sums = problem.threads, 0
    if problem.bfloat16:
        product = _Product(problem, blocks.filters, blocks.channels)
        threads, sums = product.threads, product.buffer_bytes()
    thinned = _thinned(problem, blocks.channels, threads)
    return blocks.primitive(blocks.padded_bias, sums, thinned)


def backward_data(problem: Problem) -> Primitive | None:
    """As the forward; strides are left to the strided kernels."""
    blocks = None if problem.strided else _blocks(problem)
    if blocks is None:
        return None
    product = _Product(problem, blocks.channels, blocks.filters)
    return blocks.primitive(product.buffer_bytes() if problem.bfloat16 else 0)


def backward_weights(problem: Problem) -> Primitive | None:
    """Threads that share the pixels have a copy of the weight's gradient each."""
    blocks = _blocks(problem)
    if blocks is None:
        return None
    if problem.bfloat16:
        return _weights_of_bfloat16(blocks)
    on_pixels, threads = _threads_on_pixels(problem, _pixel_block(problem, 7, 16, False), 12)
    padded = problem.bias and problem.filters % VECTOR
    entries: list[Entry] = [blocks.padded_filters * FLOAT if padded else 0]
    if on_pixels > 1:
        entries += [blocks.weight * FLOAT * (on_pixels - 1), BARRIER]
    if problem.bias:
        entries += bias_reduction(threads, blocks.filter_blocks, problem.batch)
    channels = _divided_blocks(problem.channels, 5) * VECTOR
    return blocks.primitive(*entries, _thinned(problem, channels, threads))


def _weights_of_bfloat16(blocks: Blocks) -> Primitive:
    """Sums in float for every thread on pixels; operands turned, where two pixels lie apart."""
    problem, channels, filters = blocks.problem, blocks.channels, blocks.filters
    few = problem.dims == 2 or filters <= 64
    apart = not problem.channels_last and min(problem.output[1:]) > 14 and few
    block = _pixel_block(problem, 7 if apart else 8, _LONGEST_BLOCK if apart else 16, apart, step=2)
    cost = 4 * max(1, filters // channels)
    on_pixels, threads = _threads_on_pixels(problem, block if apart else round_up(block, 2), cost)
    bias = blocks.padded_filters if problem.bias else 0
    sums = (blocks.weight + bias) * on_pixels * FLOAT
    # A bias of channels last is copied as it is.
    padded = problem.bias and problem.filters % VECTOR
    entries: list[Entry] = [sums, filters * _SIZE if padded else 0]
    if on_pixels > 1:
        entries.append(BARRIER)
    channel_blocks, filter_blocks = _divided_blocks(channels, 5), _divided_blocks(filters, 16)
    if not apart:
        pixels = threads * round_up(problem.output_space, 2) * VECTOR * _SIZE
        entries += [pixels * filter_blocks, pixels * channel_blocks]
    entries.append(_thinned(problem, channel_blocks * VECTOR, threads))
    return blocks.primitive(*entries)


def _divided_blocks(channels: int, smallest: int) -> int:
    blocks = ceil_div(channels, VECTOR)
    return _best_divider(blocks, smallest, blocks, False)


def _pixel_block(problem: Problem, smallest: int, largest: int, larger: bool, step: int = 1) -> int:
    pixels, width = problem.output_space, problem.output[2]
    block = _best_divider(pixels, smallest, largest, True, step)
    if pixels % block:
        block = _best_divider(width, 4, width, larger, step)
    return 1 if block > _LONGEST_BLOCK else block


class _Product(NamedTuple):
    """The products of a forward or of a gradient of the input: channels that the result has
    (``load_dim``) and that are summed (``reduce_dim``), for each of its rows.
    """

    problem: Problem
    results: int
    summed: int

    @property
    def rows(self) -> int:
        """Pixels of the result, ``bcast_dim``."""
        return self.problem.output_space

    @property
    def row_block(self) -> int:
        """Rows that are computed at a time, ``ur``."""
        rows, height = self.rows, math.prod(self.problem.output[:2])
        largest, smallest = (9, 6) if self.explicit else (30, 9)
        if self.explicit and 128 < self.results < 256 and 10 < height < 28:
            largest, smallest = 6, 5
        sizes = range(largest, smallest - 1, -1)
        length = height if height >= 14 else rows
        for lengths in (length, rows):
            for size in sizes:
                if lengths % size == 0:
                    return size
        fullest = max(sizes, key=lambda size: rows % size)
        return fullest if rows % fullest > rows % largest else min(largest, rows)

    @property
    def explicit(self) -> bool:
        """Whether a pixel is broadcast by an instruction of its own."""
        problem = self.problem
        return self.summed % VECTOR % 2 == 0 and 8 * problem.batch // problem.threads >= 1

    @property
    def _blocks(self) -> tuple[int, int]:
        """Blocks of rows and of the result's channels."""
        return ceil_div(self.rows, self.row_block), ceil_div(self.results, VECTOR)

    @property
    def threads(self) -> int:
        """Threads that take part."""
        threads, (parts, loads) = self.problem.threads, self._blocks
        input = _SIZE * self.problem.batch * self.rows * self.summed
        if input < 8192 and parts * loads < threads:
            return max(parts, loads)
        return threads

    def buffer_bytes(self) -> int:
        """Bytes of the sums of all threads: ``key_conv_store_wsp``."""
        threads, channels = self.threads, self.results
        if not self.problem.channels_last:
            used = ceil_div(threads, ceil_div(threads, self._load_groups()))
            channels = ceil_div(channels, used)
        rows = round_up(self.rows, self.row_block)
        return threads * rows * round_up(channels, VECTOR) * FLOAT

    def _load_groups(self) -> int:
        """Groups of threads, each with channels of its own."""
        threads, batch = self.problem.threads, self.problem.batch
        parts, loads = self._blocks
        if threads <= 28 and batch < threads and loads * parts > threads:
            groups = self._cheapest(parts, loads)
        else:
            least = ceil_div(threads, batch * parts)
            groups = _best_divider(threads, least, 2 * least, False)
        weight = self.results * self.summed * _SIZE
        if self.explicit and self.rows <= 64 and weight >= self.problem.host.l2:
            return max(groups, 4)
        few = self.rows <= 49 and batch <= threads
        if few and self.results > 512 and self.results // self.summed >= 4:
            return max(groups, 2)
        return groups

    def _cheapest(self, parts: int, loads: int) -> int:
        problem, threads = self.problem, self.problem.threads
        heavy = self.results > problem.batch * self.rows

        def cost(filters: int, others: int, weight: float) -> float:
            rows = problem.batch * ceil_div(parts, others) * self.row_block
            computed = rows * filters * VECTOR * self.summed
            moved = (rows + filters * VECTOR) * self.summed
            return 0.01 * computed + weight * moved

        def cost_of(groups: int) -> float:
            most, fewest = ceil_div(threads, groups), threads // groups
            weight = 1.0 if most == 1 else 1.3
            if threads % groups < loads % groups:
                return cost(ceil_div(loads, groups), fewest, weight)
            crowded = cost(ceil_div(loads, groups), most, weight)
            return max(crowded, cost(loads // groups, fewest, weight))

        order = range(threads, 0, -1) if heavy else range(1, threads + 1)
        return min(order, key=cost_of)
