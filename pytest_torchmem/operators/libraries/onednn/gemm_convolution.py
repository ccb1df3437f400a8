"""Convolutions as matrix products of columns, ``gemm:jit``: what no vectorised kernel takes,
forward in blocks; src/cpu/gemm_convolution_utils.cpp (``init_conf``),
x64/gemm_bf16_convolution.cpp.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, efficiency
from pytest_torchmem.operators.workspace import FLOAT, booked, ceil_div, round_up

_SMALL = 64 * 1024
"""Multiplications for one thread, below which a product is not shared."""


def is_plain(problem: Problem) -> bool:
    """Return whether the input is its own columns."""
    return problem.taps == 1 and not problem.strided and problem.input == problem.output


def runs_outer(problem: Problem, outer: int, inner: tuple[int, int], pixels: int) -> bool:
    """Return whether groups and images keep threads as busy as parts of one product, of so many
    pixels and channels, or that is small.
    """
    threads, parts = problem.threads, _vectors(problem, *inner)
    even = efficiency(outer, threads) >= efficiency(parts, threads)
    return even or pixels * problem.group_channels * problem.group_filters // threads < _SMALL


def runs_outer_channels_last(problem: Problem, pixels: int) -> bool:
    """As ``runs_outer``, channels last: many groups, or images of few pixels."""
    image = problem.input[1] * problem.input[2]
    few = problem.depthwise or (image // problem.threads < 64 and problem.batch != 1)
    outer, inner = problem.groups * problem.batch, (image, problem.group_channels)
    return problem.dims == 2 and few and runs_outer(problem, outer, inner, pixels)


def _vectors(problem: Problem, pixels: int, channels: int) -> int:
    return ceil_div(pixels, problem.vector) * ceil_div(channels, problem.vector)


def _round_down(amount: int, multiple: int) -> int:
    return amount // multiple * multiple


def _between(smallest: int, largest: int, value: int) -> int:
    return max(smallest, min(largest, value))


# -- channels last -------------------------------------------------------------------------------


def columns_channels_last(problem: Problem) -> list[int]:
    """Buffers of a forward that is channels last: columns, sums in float, images and bias."""
    size, threads = problem.element_size, problem.threads
    channels, filters = problem.group_channels, problem.group_filters
    rows, width = problem.output[1:]
    pixels = rows * width
    outer, block = False, pixels
    weight = filters * channels * problem.kernel[1] * problem.kernel[2]
    flat = problem.dims == 2 and not problem.dilated and not problem.depthwise
    if not is_plain(problem) and flat and weight < problem.host.l2 // size // 2:
        height, across, busy = _image_block(problem)
        if busy >= efficiency(_vectors(problem, pixels, filters), threads) / 2:
            outer, block = True, height * (across if height == 1 else width)
    used = threads if outer or runs_outer_channels_last(problem, pixels) else 1
    columns = 0 if is_plain(problem) else channels * problem.taps * block
    entries = [used * columns * size, used * problem.input_space * channels * size]
    if problem.bfloat16:
        entries += [used * block * filters * FLOAT, problem.filters * FLOAT * problem.bias]
    return entries


def _image_block(problem: Problem) -> tuple[int, int, float]:
    """Rows and columns of a block, and how busy they keep the threads."""
    size, threads, vector = problem.element_size, problem.threads, problem.vector
    cache = problem.host.l2 // size
    channels, filters, taps = problem.group_channels, problem.group_filters, problem.taps
    rows, width, source = problem.output[1], problem.output[2], problem.input[2]
    operands = (channels * source + filters * width) * size
    row = (channels * width * taps * size + 2 * operands) * 5 + operands
    height = min(max(1, ceil_div(cache, row)), rows)
    across = width
    if height == 1:
        column = channels * taps * size + 2 * (channels + filters) * size
        across = min(max(1, ceil_div(cache, column)), width)
    if height != rows:
        height = max(1, _round_down(height, 4))
    if across != width:
        across = max(1, _round_down(across, vector))
    busy = 0.0
    outer = problem.groups * problem.batch

    def balance(work: int, length: int, block: int) -> float:
        return (efficiency(work * ceil_div(length, block), threads) + efficiency(length, block)) / 2

    if across == width:
        while height > 0:
            busy = balance(outer * problem.output[0], rows, height)
            if busy >= 0.9:
                break
            height = 0 if height < 4 else _round_down(height - 4, 4)
    if busy < 0.9:
        height = 1
        while across > 0:
            busy = balance(outer * rows, width, across)
            if busy > 0.9:
                break
            across = 0 if across < vector else _round_down(across - vector, vector)
    return max(1, height), max(1, across), busy


# -- channels first ------------------------------------------------------------------------------


class _Block(NamedTuple):
    filters: int
    pixels: int
    channels: int


def columns_channels_first(problem: Problem) -> list[int]:
    """Buffers of a forward with the channels first: columns, and in bfloat16 sums and bias."""
    threads, depth = problem.threads, problem.output[0]
    pixels = problem.output[1] * problem.output[2]
    block = _Block(problem.group_filters, pixels, problem.group_channels)
    if _is_blocked(problem):
        block, outer = _Search(problem).best(), True
    else:
        single = depth == 1 and problem.batch == 1 and problem.groups <= 2
        work, inner = problem.groups * problem.batch * depth, (pixels, problem.group_filters)
        small = pixels // threads < 512 and not single
        outer = small and runs_outer(problem, work, inner, pixels)
    used = threads if outer else 1
    entries: list[int] = []
    if problem.bfloat16:
        entries.append(used * round_up(block.filters * block.pixels, 16) * FLOAT)
        entries.append(problem.filters * FLOAT * problem.bias)
    if not is_plain(problem):
        columns = block.channels * problem.taps * block.pixels
        entries.append(used * columns * problem.element_size)
    return entries


def _is_blocked(problem: Problem) -> bool:
    channels, filters = problem.group_channels, problem.group_filters
    if problem.dims == 3:
        return False
    if is_plain(problem):
        image = problem.input[1] * problem.input[2]
        return channels // filters < 42 and channels * filters * image < 1024
    outer = problem.batch * problem.groups
    return (
        outer * problem.output_space >= problem.threads * problem.vector
        or problem.output_space < outer
        or (problem.stride[2] == 1 and channels * problem.taps <= 0.05 * filters)
    )


class _Search:
    """The block that a weighted product of efficiencies likes best, of an image."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.columns = problem, not is_plain(problem)
        self.vector = problem.vector
        self.cache = problem.host.l2 // problem.element_size
        self.channels, self.filters = problem.group_channels, problem.group_filters
        self.pixels = problem.output_space
        self.space = problem.batch * problem.groups * self.pixels
        self.depth = self.channels * problem.taps
        self.step = problem.stride[1] * problem.stride[2]
        self.efficiency = 0.0
        self.found = _Block(1, 1, self.channels)

    def best(self) -> _Block:
        threads = self.problem.threads
        for on_filters in range(1, threads + 1):
            filters = ceil_div(self.filters, on_filters)
            pixels = ceil_div(self.space, threads // on_filters)
            if self.columns:
                self._with_columns(on_filters, filters, pixels)
            else:
                pixels = int((self.cache - self.depth) / (self.step * self.channels))
                self._explore(on_filters, filters, pixels)
        return self.found

    def _with_columns(self, on_filters: int, filters: int, pixels: int) -> None:
        self._try(on_filters, filters, pixels)
        if self.found == _Block(filters, pixels, self.channels):
            return
        depth, cache, vector = self.channels, self.cache, self.vector
        row = self.step + self.problem.taps
        weight = self.problem.taps * filters

        def fitting_pixels(channels: int, block: int) -> int:
            return int((cache - weight * channels) / (row * channels + block))

        def fitting_filters(channels: int, across: int) -> int:
            return int((cache - row * channels * across - weight * channels) / across)

        block = _between(8, filters, fitting_filters(depth, vector))
        self._explore(on_filters, block, _between(vector, pixels, fitting_pixels(depth, block)))
        most = max(1, cache // (2 * 8 * row + 2 * weight))
        if most < depth:
            channels = depth // max(1, depth // most)
            across = max(1, int((cache - 2 * weight * channels) / (2 * channels * row)))
            block = cache // 2 // across
            if block > filters:
                block = filters
                across = _between(vector, pixels, fitting_pixels(channels, block))
            elif across > pixels:
                across = pixels
                block = _between(8, filters, fitting_filters(channels, across))
            self._explore(on_filters, block, across)
        across = _round_down(fitting_pixels(depth, filters), vector)
        self._explore(on_filters, filters, max(vector, across))

    def _explore(self, on_filters: int, filters: int, pixels: int) -> None:
        eights, down = round_up(filters, 8), _round_down(pixels, 48)
        self._try(on_filters, filters, pixels)
        self._try(on_filters, _round_down(filters, 8), down)
        for across in (down, round_up(pixels, self.vector), round_up(pixels, 48)):
            self._try(on_filters, eights, across)

    def _try(self, on_filters: int, filters: int, pixels: int) -> None:
        vector, taps = self.vector, self.problem.taps
        each_filters = ceil_div(self.filters, on_filters)
        each_pixels = ceil_div(self.space, self.problem.threads // on_filters)
        filters = min(each_filters, _between(8, each_filters, filters))
        most_pixels = min(self.pixels, each_pixels)
        pixels = min(most_pixels, _between(vector, each_pixels, pixels))
        fitting = self._fitting(filters, pixels, each_filters, each_pixels)
        cost = 20 if fitting < 1 else 1
        channels = max(1, self.channels // ceil_div(self.channels, max(1, fitting)))
        parts = ceil_div(self.channels, channels)
        depth = channels * taps
        pixels_aligned, depth_aligned = round_up(pixels, vector), round_up(depth, vector)
        result = each_filters * round_up(each_pixels, vector)
        written = cost * result * (1 if channels == self.channels else 2 * parts - 1)
        source = taps * self.channels * round_up(each_pixels * self.step, vector)
        copied = 0
        if self.columns:
            copied = int(2 * cost * (source * (pixels_aligned / pixels)))
            copied *= 8 if self.problem.stride[2] != 1 else 1
        weight = cost * each_filters * round_up(self.depth, vector)
        memory = each_pixels / vector * each_filters * self.depth
        memory /= cost * source + copied + weight + written
        part = pixels * filters * depth / (each_filters * each_pixels * self.depth)
        reuse = pixels / vector * filters * depth
        reuse /= pixels_aligned * depth + filters * depth_aligned + filters * pixels_aligned
        reached = (
            self._balance(on_filters) ** 8
            * efficiency(each_filters, filters)
            * efficiency(most_pixels, pixels)
            * efficiency(self.channels, channels)
            * efficiency(pixels, 3 * vector)
            * memory
            * part**0.5
            * reuse
        )
        if reached > self.efficiency:
            self.efficiency, self.found = reached, _Block(filters, pixels, channels)

    def _balance(self, on_filters: int) -> float:
        """Work of the least busy thread, by that of the busiest."""
        threads = self.problem.threads
        most_filters = ceil_div(self.filters, on_filters)
        least_filters = max(1, self.filters // on_filters)
        fewer, more = threads // on_filters, ceil_div(threads, on_filters)
        most_pixels, least_pixels = ceil_div(self.space, fewer), max(1, self.space // more)
        uneven, idle = self.filters % on_filters, threads % on_filters
        largest, smallest = most_filters * most_pixels, least_filters * least_pixels
        if uneven <= idle:
            largest = max(most_filters * ceil_div(self.space, more), least_filters * most_pixels)
        if idle <= uneven:
            smallest = min(most_filters * least_pixels, least_filters * (self.space // fewer))
        return smallest / largest

    def _fitting(self, filters: int, pixels: int, each_filters: int, each_pixels: int) -> int:
        taps, cache = self.problem.taps, self.cache
        source, columns = self.step * pixels, taps * pixels
        all_weight = taps * each_filters
        if not self.columns:
            return cache // (source if pixels >= each_pixels else source + all_weight)
        rest = cache - filters * pixels
        split = int(rest / (source + columns + all_weight))
        if pixels < each_pixels:
            return split
        fitting = cache // (source + columns)
        if filters < each_filters:
            fitting = min(fitting, int(rest / (columns + taps * filters)))
        return split if fitting < self.channels else fitting


_LIMIT = 1 << 30


def _primitive(problem: Problem, entries: Sequence[int]) -> Primitive:
    """Operands as they are; channels last wants the filters of a weight innermost."""
    weight = problem.weight_bytes if problem.channels_last else 0
    return Primitive(0, weight, 0, booked(*entries))


def forward(problem: Problem) -> Primitive | None:
    """Columns of one block for every thread; in bfloat16 the block's result in float as well."""
    columns = columns_channels_last if problem.channels_last else columns_channels_first
    return _primitive(problem, columns(problem))


def backward_data(problem: Problem) -> Primitive | None:
    """Columns of one image in float for every thread that has an image."""
    channels, taps = problem.group_channels, problem.taps
    pixels, result = problem.input[1] * problem.input[2], problem.output[1] * problem.output[2]
    image = problem.input[0] * pixels * channels
    columns = 0 if is_plain(problem) else channels * taps * result
    if problem.channels_last:
        used = problem.threads if runs_outer_channels_last(problem, pixels) else 1
        entries = [used * columns * problem.output[0] * FLOAT]
        if problem.groups > 1 or problem.bfloat16:
            entries.append(used * image * FLOAT)
        return _primitive(problem, entries)
    outer = (
        (result // problem.threads < 512 or taps < 64)
        and (problem.batch != 1 or problem.groups > 2)
        and runs_outer(problem, problem.groups * problem.batch, (pixels, channels), pixels)
    )
    used = problem.threads if outer else 1
    entries = [used * round_up(image, 16) * FLOAT] if problem.bfloat16 else []
    entries.append(_within_limit(problem, entries, used, columns, FLOAT, 0.1))
    return _primitive(problem, entries)


def backward_weights(problem: Problem) -> Primitive | None:
    """Columns, and the weight's gradient, for every thread that has an image."""
    threads, size = problem.threads, problem.element_size
    channels, result = problem.group_channels, problem.output[1] * problem.output[2]
    weight = problem.weight_bytes * FLOAT
    """What each thread keeps is as many floats as the weight has bytes."""
    columns = 0 if is_plain(problem) else channels * problem.taps * result
    image = problem.input_space * channels * size
    summed = [weight, problem.filters * FLOAT * problem.bias] if problem.bfloat16 else []
    if problem.channels_last:
        each = size * columns + image
    else:
        each = size * channels * problem.taps * problem.vector
    outer = (
        threads * (weight + each) + sum(summed) < _limit(problem)
        and result // threads < 256
        and (problem.batch != 1 or problem.groups > 2)
    )
    used = threads if outer else 1
    entries = [used * weight, *summed]
    if problem.channels_last:
        entries += [used * columns * size, used * image]
    else:
        entries.append(_within_limit(problem, entries, used, columns, size, 0.05))
    return _primitive(problem, entries)


def _limit(problem: Problem) -> int:
    source, result = problem.input_bytes(problem.channels), problem.output_bytes(problem.filters)
    return min(_LIMIT, 15 * problem.threads * (source + problem.weight_bytes + result))


def _within_limit(
    problem: Problem, entries: list[int], used: int, columns: int, size: int, part: float
) -> int:
    """Bytes of the columns, or of fewer of them where a scratchpad would be too large."""
    room, total = _limit(problem) - booked(*entries), used * columns * size
    if room >= total:
        return total
    each = problem.group_channels * problem.taps
    most = room // (size * used * each)
    return used * each * max(problem.vector, int(most * part)) * size
