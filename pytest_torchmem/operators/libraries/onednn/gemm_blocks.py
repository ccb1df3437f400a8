"""Blocks of columns in which gemm convolutions run forward;
src/cpu/gemm_convolution_utils.cpp, ``init_conf``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_torchmem.operators.libraries.onednn.problem import L2, Problem, share
from pytest_torchmem.operators.rounding import round_up

_FLOAT = 4
_SMALL = 64 * 1024


def _round_down(amount: int, multiple: int) -> int:
    return amount // multiple * multiple


def columns_channels_last(problem: Problem, plain: bool) -> list[int]:
    """Buffers of a forward that is channels last: columns, sums in float, images and bias."""
    size = problem.element_size
    vector, threads = 64 // size, problem.threads
    channels, filters = problem.group_channels, problem.group_filters
    rows, width = problem.output[1:]
    height_block, width_block = rows, width
    columns = 0 if plain else channels * problem.taps * rows * width
    outer = False
    cache = L2 // size
    weight = filters * channels * problem.kernel[1] * problem.kernel[2]
    flat = problem.dims == 2 and not problem.dilated and not problem.depthwise
    if columns and flat and weight < cache // 2:
        tried_rows, tried_width, busy = _image_blocks(problem, cache, vector)
        inner = share(rows * width, vector) * share(filters, vector)
        if busy >= inner / round_up(inner, threads) / 2:
            height_block, width_block, outer = tried_rows, tried_width, True
        if height_block != 1:
            width_block = width
        columns = channels * problem.taps * height_block * width_block
    if not outer and problem.dims == 2:
        pixels = problem.input[1] * problem.input[2]
        work = problem.groups * problem.batch
        inner = share(pixels, vector) * share(channels, vector)
        even = work / round_up(work, threads) >= inner / round_up(inner, threads)
        small = rows * width * channels * filters // threads < _SMALL
        many = problem.depthwise or (pixels // threads < 64 and problem.batch != 1)
        outer = many and (even or small)
    used = threads if outer else 1
    entries = [used * columns * size]
    if problem.bfloat16:
        entries.append(used * height_block * width_block * filters * _FLOAT)
    entries.append(used * problem.input_space * channels * size)
    if problem.bfloat16 and problem.bias:
        entries.append(problem.filters * _FLOAT)
    return entries


def _image_blocks(problem: Problem, cache: int, vector: int) -> tuple[int, int, float]:
    """Rows and columns of a block, and how busy they keep the threads."""
    size, threads = problem.element_size, problem.threads
    channels, filters = problem.group_channels, problem.group_filters
    rows, width, source = problem.output[1], problem.output[2], problem.input[2]
    row = channels * width * problem.taps * size + 2 * (channels * source + filters * width) * size
    row = row * 5 + filters * width * size + channels * source * size
    height = min(max(1, share(cache, row)), rows)
    across = width
    if height == 1:
        column = channels * problem.taps * size + 2 * (channels + filters) * size
        across = min(max(1, share(cache, column)), width)
    if height != rows:
        height = max(1, _round_down(height, 4))
    if across != width:
        across = max(1, _round_down(across, vector))
    busy = 0.0
    outer = problem.groups * problem.batch

    def balance(work: int, length: int, block: int) -> float:
        return (work / round_up(work, threads) + length / round_up(length, block)) / 2

    if across == width:
        while height > 0:
            busy = balance(outer * problem.output[0] * share(rows, height), rows, height)
            if busy >= 0.9:
                break
            height = 0 if height < 4 else _round_down(height - 4, 4)
    if busy < 0.9:
        height = 1
        while across > 0:
            busy = balance(outer * rows * share(width, across), width, across)
            if busy > 0.9:
                break
            across = 0 if across < vector else _round_down(across - vector, vector)
    return max(1, height), max(1, across), busy


def columns_channels_first(problem: Problem, plain: bool) -> list[int]:
    """Buffers of a forward with the channels first: columns, and in bfloat16 sums and bias."""
    size, threads = problem.element_size, problem.threads
    channels, filters = problem.group_channels, problem.group_filters
    pixels = problem.output[1] * problem.output[2]
    columns = not plain
    block = _Block(filters, pixels, channels)
    if _is_blocked(problem, columns):
        block = _Search(problem, columns).best()
        outer = True
    else:
        vector = 64 // size
        work = problem.groups * problem.batch * problem.output[0]
        inner = share(pixels, vector) * share(filters, vector)
        even = work / round_up(work, threads) >= inner / round_up(inner, threads)
        small = pixels * channels * filters // threads < _SMALL
        single = problem.output[0] == 1 and problem.batch == 1 and problem.groups <= 2
        outer = pixels // threads < 512 and not single and (even or small)
    used = threads if outer else 1
    entries: list[int] = []
    if problem.bfloat16:
        entries.append(used * round_up(block.filters * block.pixels, 16) * _FLOAT)
        if problem.bias:
            entries.append(problem.filters * _FLOAT)
    if columns:
        entries.append(used * block.channels * problem.taps * block.pixels * size)
    return entries


def _is_blocked(problem: Problem, columns: bool) -> bool:
    vector = 64 // problem.element_size
    channels, filters = problem.group_channels, problem.group_filters
    pixels = problem.output[1] * problem.output[2]
    outer = problem.batch * problem.groups * problem.output[0]
    if problem.dims == 3:
        return False
    worthwhile = (
        not columns
        or outer * pixels >= problem.threads * vector
        or pixels < outer
        or (problem.stride[2] == 1 and channels * problem.taps <= 0.05 * filters)
    )
    image = problem.input[1] * problem.input[2]
    return worthwhile and (
        columns or (channels // filters < 42 and channels * filters * image < 1024)
    )


@dataclass(frozen=True)
class _Block:
    filters: int
    pixels: int
    channels: int


class _Search:
    """The block that a weighted product of efficiencies likes best."""

    def __init__(self, problem: Problem, columns: bool) -> None:
        self.problem, self.columns = problem, columns
        self.vector = 64 // problem.element_size
        self.cache = L2 // problem.element_size
        self.channels, self.filters = problem.group_channels, problem.group_filters
        self.pixels = problem.output[1] * problem.output[2]
        self.space = problem.batch * problem.groups * problem.output[0] * self.pixels
        self.depth = self.channels * problem.taps
        self.step = problem.stride[1] * problem.stride[2]
        self.efficiency = 0.0
        self.found = _Block(1, 1, self.channels)

    def best(self) -> _Block:
        """Return the block that is chosen."""
        threads = self.problem.threads
        for on_filters in range(1, threads + 1):
            filters = share(self.filters, on_filters)
            pixels = share(self.space, threads // on_filters)
            if self.columns:
                self._with_columns(on_filters, filters, pixels)
            else:
                self._explore(
                    on_filters,
                    filters,
                    int((self.cache - self.depth) / (self.step * self.channels)),
                )
        return self.found

    def _with_columns(self, on_filters: int, filters: int, pixels: int) -> None:
        self._try(on_filters, filters, pixels)
        if self.found == _Block(filters, pixels, self.channels):
            return
        row = self.step + self.problem.taps
        weight = self.problem.taps * filters
        depth, cache = self.channels, self.cache

        def fitting_pixels(channels: int, block: int) -> int:
            return int((cache - weight * channels) / (row * channels + block))

        block = _between(
            8, filters, int((cache - row * depth * self.vector - weight * depth) / self.vector)
        )
        self._explore(
            on_filters, block, _between(self.vector, pixels, fitting_pixels(depth, block))
        )
        most = max(1, cache // (2 * 8 * row + 2 * weight))
        if most < depth:
            channels = depth // max(1, depth // most)
            across = max(1, int((cache - 2 * weight * channels) / (2 * channels * row)))
            block = cache // 2 // across
            if block > filters:
                block = filters
                across = _between(self.vector, pixels, fitting_pixels(channels, block))
            elif across > pixels:
                across = pixels
                rest = cache - row * channels * across - weight * channels
                block = _between(8, filters, int(rest / across))
            self._explore(on_filters, block, across)
        across = _round_down(fitting_pixels(depth, filters), self.vector)
        self._explore(on_filters, filters, max(self.vector, across))

    def _explore(self, on_filters: int, filters: int, pixels: int) -> None:
        eights = round_up(filters, 8)
        self._try(on_filters, filters, pixels)
        self._try(on_filters, _round_down(filters, 8), _round_down(pixels, 48))
        self._try(on_filters, eights, _round_down(pixels, 48))
        self._try(on_filters, eights, round_up(pixels, self.vector))
        self._try(on_filters, eights, round_up(pixels, 48))

    def _try(self, on_filters: int, filters: int, pixels: int) -> None:
        threads, vector, taps = self.problem.threads, self.vector, self.problem.taps
        each_filters = share(self.filters, on_filters)
        each_pixels = share(self.space, threads // on_filters)
        filters = min(each_filters, _between(8, each_filters, filters))
        most_pixels = min(self.pixels, each_pixels)
        pixels = min(most_pixels, _between(vector, each_pixels, pixels))
        fitting = self._fitting_channels(filters, pixels, each_filters, each_pixels)
        cost = 20 if fitting < 1 else 1
        channels = max(1, self.channels // share(self.channels, max(1, fitting)))
        parts = share(self.channels, channels)
        depth = channels * taps
        pixels_aligned, depth_aligned = round_up(pixels, vector), round_up(depth, vector)
        result = each_filters * round_up(each_pixels, vector)
        written = cost * result * (1 if channels == self.channels else 2 * parts - 1)
        source = self.channels * round_up(each_pixels * self.step, vector)
        read = cost * taps * source
        copied = 0
        if self.columns:
            tail = pixels_aligned / pixels
            copied = int(cost * (taps * source * tail + taps * source * tail))
            copied *= 8 if self.problem.stride[2] != 1 else 1
        weight = cost * each_filters * round_up(self.depth, vector)
        memory = each_pixels / vector * each_filters * self.depth
        memory /= read + copied + weight + written
        part = pixels * filters * depth / (each_filters * each_pixels * self.depth)
        reuse = pixels / vector * filters * depth
        reuse /= pixels_aligned * depth + filters * depth_aligned + filters * pixels_aligned
        efficiency = (
            self._balance(on_filters) ** 8
            * (each_filters / round_up(each_filters, filters))
            * (most_pixels / round_up(most_pixels, pixels))
            * (self.channels / round_up(self.channels, channels))
            * (pixels / round_up(pixels, 3 * vector))
            * memory
            * part**0.5
            * reuse
        )
        if efficiency > self.efficiency:
            self.efficiency = efficiency
            self.found = _Block(filters, pixels, channels)

    def _balance(self, on_filters: int) -> float:
        """Work of the least busy thread, by that of the busiest."""
        threads = self.problem.threads
        most_filters = share(self.filters, on_filters)
        least_filters = max(1, self.filters // on_filters)
        fewer, more = threads // on_filters, share(threads, on_filters)
        most_pixels = share(self.space, fewer)
        if self.filters % on_filters > threads % on_filters:
            largest = most_filters * most_pixels
        else:
            largest = max(most_filters * share(self.space, more), least_filters * most_pixels)
        least_pixels = max(1, self.space // more)
        if threads % on_filters > self.filters % on_filters:
            smallest = least_filters * least_pixels
        else:
            smallest = min(most_filters * least_pixels, least_filters * (self.space // fewer))
        return smallest / largest

    def _fitting_channels(
        self, filters: int, pixels: int, each_filters: int, each_pixels: int
    ) -> int:
        taps, cache = self.problem.taps, self.cache
        source, columns = self.step * pixels, taps * pixels
        all_weight = taps * each_filters
        result = filters * pixels
        if not self.columns:
            return cache // (source if pixels >= each_pixels else source + all_weight)
        split = int((cache - result) / (source + columns + all_weight))
        if pixels < each_pixels:
            return split
        fitting = cache // (source + columns)
        if filters < each_filters:
            fitting = min(fitting, int((cache - result) / (columns + taps * filters)))
        return split if fitting < self.channels else fitting


def _between(smallest: int, largest: int, value: int) -> int:
    return max(smallest, min(largest, value))
