"""Convolutions with a kernel of one pixel in bfloat16, ``jit_bf16_1x1``;
src/cpu/x64/jit_avx512_core_bf16_1x1_conv_kernel.cpp.

Results are summed in float before they are written, block by block of every thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_torchmem.operators.libraries.onednn.pointwise import (
    best_divider,
    takes,
    thinned_bytes,
)
from pytest_torchmem.operators.libraries.onednn.problem import (
    BARRIER,
    L2,
    VECTOR,
    Primitive,
    Problem,
    booked,
    share,
)
from pytest_torchmem.operators.libraries.onednn.sharing import Work, least_memory
from pytest_torchmem.operators.rounding import round_up

_NAME = "jit_bf16_1x1"
_FLOAT = 4
_SIZE = 2


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Bytes of input, weight and output in blocks."""
    channels, filters = round_up(problem.channels, VECTOR), round_up(problem.filters, VECTOR)
    weight = channels * filters * _SIZE
    if problem.channels_last:
        return 0, weight, 0
    return problem.input_bytes(channels), weight, problem.output_bytes(filters)


@dataclass(frozen=True)
class _Product:
    """The products of a forward or of a gradient of the input: ``rows`` of the result, channels
    that it has (``load_dim``) and that are summed (``reduce_dim``).
    """

    problem: Problem
    rows: int
    height: int
    results: int
    summed: int

    def row_block(self) -> int:
        """Rows that are computed at a time, ``ur``."""
        rows, height = self.rows, self.height
        largest, smallest = 30, 9
        if self.explicit:
            largest, smallest = 9, 6
            if 128 < self.results < 256 and 10 < height < 28:
                largest, smallest = 6, 5
        length = height if height >= 14 else rows
        for block in range(largest, smallest - 1, -1):
            if length % block == 0:
                return block
        best, rest = min(largest, rows), rows % largest
        for block in range(largest, smallest - 1, -1):
            tail = rows % block
            if tail > rest or tail == 0:
                best, rest = block, tail
                if tail == 0:
                    break
        return best

    @property
    def explicit(self) -> bool:
        """Whether a pixel is broadcast by an instruction of its own."""
        problem = self.problem
        return self.summed % VECTOR % 2 == 0 and 8 * problem.batch // problem.threads >= 1

    def buffer_bytes(self) -> int:
        """Bytes of the sums of all threads: ``key_conv_store_wsp``."""
        problem = self.problem
        block = self.row_block()
        parts, loads = share(self.rows, block), share(self.results, VECTOR)
        groups = self._load_groups(parts, loads, block)
        threads = self.threads
        used = share(threads, share(threads, groups))
        if problem.channels_last:
            channels = round_up(self.results, VECTOR)
        else:
            channels = round_up(share(self.results, used), VECTOR)
        return threads * round_up(self.rows, block) * channels * _FLOAT

    @property
    def threads(self) -> int:
        """Threads that take part."""
        block, problem = self.row_block(), self.problem
        parts, loads = share(self.rows, block), share(self.results, VECTOR)
        input = _SIZE * problem.batch * self.rows * self.summed
        if input < 8192 and problem.threads > 1 and parts * loads < problem.threads:
            return min(problem.threads, max(parts, loads))
        return problem.threads

    def _load_groups(self, parts: int, loads: int, block: int) -> int:
        """Groups of threads, each with channels of its own."""
        problem = self.problem
        threads, batch = problem.threads, problem.batch
        weight = self.results * self.summed
        if threads <= 28 and batch < threads and loads * parts > threads:
            groups = self._cheapest(parts, loads, block)
        else:
            least = share(threads, batch * parts)
            groups = best_divider(threads, least, 2 * least, False)
        if self.explicit and self.rows <= 64 and weight >= L2 // _SIZE:
            return max(groups, 4)
        few = self.rows <= 49 and batch <= threads
        if few and self.results > 512 and self.results // self.summed >= 4:
            return max(groups, 2)
        return groups

    def _cheapest(self, parts: int, loads: int, block: int) -> int:
        problem, threads = self.problem, self.problem.threads
        input = problem.batch * self.rows * self.summed
        heavy = self.results * self.summed > input

        def cost(filters: int, others: int, weight: float) -> float:
            rows = problem.batch * share(parts, others) * block
            computed = rows * filters * VECTOR * self.summed
            moved = (rows + filters * VECTOR) * self.summed
            return 0.01 * computed + weight * moved

        best, least = (threads if heavy else 1), math.inf
        order = range(threads, 0, -1) if heavy else range(1, threads + 1)
        for groups in order:
            most, fewest = share(threads, groups), threads // groups
            weight = 1.0 if most == 1 else 1.3
            if threads % groups < loads % groups:
                found = cost(share(loads, groups), fewest, weight)
            else:
                found = max(
                    cost(share(loads, groups), most, weight),
                    cost(loads // groups, fewest, weight),
                )
            if found < least:
                best, least = groups, found
        return best


def forward(problem: Problem) -> Primitive | None:
    """Sums in float, a bias in whole blocks, and the image that strides leave."""
    if not problem.bfloat16 or not takes(problem):
        return None
    channels, filters = _padded(problem)
    depth, height, _ = problem.output
    product = _Product(problem, problem.output_space, depth * height, filters, channels)
    entries = []
    if problem.bias and not problem.channels_last and problem.filters % VECTOR:
        entries.append(filters * _SIZE)
    entries.append(product.buffer_bytes())
    if problem.strided:
        entries.append(thinned_bytes(problem, channels, product.threads))
    return Primitive(_NAME, *_sizes(problem), booked(*entries))


def _padded(problem: Problem) -> tuple[int, int]:
    if problem.channels_last:
        return problem.channels, problem.filters
    return round_up(problem.channels, VECTOR), round_up(problem.filters, VECTOR)


def backward_data(problem: Problem) -> Primitive | None:
    """Sums in float; strides are left to the strided kernels."""
    if not problem.bfloat16 or not takes(problem) or problem.strided:
        return None
    channels, filters = _padded(problem)
    depth, height, _ = problem.input
    product = _Product(problem, problem.output_space, depth * height, channels, filters)
    return Primitive(_NAME, *_sizes(problem), booked(product.buffer_bytes()))


def backward_weights(problem: Problem) -> Primitive | None:
    """Sums of weight and bias in float for every thread on pixels, and both operands turned, where
    two pixels do not lie together anyway.
    """
    if not problem.bfloat16 or not takes(problem):
        return None
    channels, filters = _padded(problem)
    source, weight, result = _sizes(problem)
    _, height, width = problem.output
    apart = (
        not problem.channels_last
        and min(height, width) > 14
        and (problem.dims == 2 or filters <= 64)
    )
    on_pixels, threads = _division(problem, channels, filters, apart)
    entries: list[int | tuple[int, int]] = []
    if problem.bias and problem.filters % VECTOR:
        entries.append(filters * _SIZE)
    bias = round_up(filters, VECTOR) if problem.bias else 0
    entries.append((weight // _SIZE + bias) * on_pixels * _FLOAT)
    if on_pixels > 1:
        entries.append(BARRIER)
    channel_blocks = best_divider(share(channels, VECTOR), 5, share(channels, VECTOR), False)
    filter_blocks = best_divider(share(filters, VECTOR), 16, share(filters, VECTOR), False)
    if not apart:
        pixels = threads * round_up(problem.output_space, 2) * VECTOR * _SIZE
        entries += [pixels * filter_blocks, pixels * channel_blocks]
    if problem.strided:
        entries.append(thinned_bytes(problem, channel_blocks * VECTOR, threads))
    return Primitive(_NAME, source, weight, result, booked(*entries))


def _division(problem: Problem, channels: int, filters: int, apart: bool) -> tuple[int, int]:
    """Threads on blocks of pixels, and threads in all: ``balance``."""
    pixels, width = problem.output_space, problem.output[2]
    if apart:
        block = best_divider(pixels, 7, min(256, pixels), True, step=2)
    else:
        block = best_divider(pixels, 8, 16, True, step=2)
    if pixels % block:
        block = best_divider(width, 4, width, apart, step=2)
    if block > 256:
        block = 1
    if not apart:
        block = round_up(block, 2)
    parts = problem.batch * share(pixels, block)
    work = Work(
        threads=problem.threads,
        images=parts,
        most_on_images=parts,
        filter_blocks=share(filters, VECTOR),
        channel_blocks=share(channels, VECTOR),
        input=VECTOR * block,
        output=VECTOR * block,
        weight=VECTOR * VECTOR,
        weight_cost=4 * max(1, filters // channels),
    )
    division = least_memory(work, work.memory)
    on_pixels = division[0]
    if problem.threads // 2 < on_pixels < problem.threads:
        on_pixels = min(problem.batch, problem.threads)
    return on_pixels, on_pixels * math.prod(division[1:])
