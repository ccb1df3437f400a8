"""How oneDNN shares the gradient of a weight, and the sum of a bias's, among threads;
src/cpu/x64/jit_avx512_common_conv_kernel.cpp (``balance``), cpu_reducer.cpp.

Blocks of channels, and of the pixels of a row, in direct kernels: ``init_conf`` of
src/cpu/x64/jit_avx512_common_conv_kernel.cpp, jit_avx512_core_bf16_conv_kernel.cpp and
jit_avx2_conv_kernel_f32.cpp.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pytest_torchmem.operators.geometry import FLOAT, ceil_div, round_up
from pytest_torchmem.operators.libraries.onednn.problem import (
    BARRIER,
    PAGE,
    VECTOR,
    Entry,
    Primitive,
    Problem,
    booked,
)

Division = tuple[int, int, int]
"""Threads on images, on blocks of filters and on blocks of channels."""


def efficiency(work: int, parts: int) -> float:
    """Work by that of so many parts, or threads, that all do as much as the busiest."""
    return work / round_up(work, parts)


def divisions(threads: int, images: int, filters: int, channels: int) -> Iterator[Division]:
    """Yield the divisions that are tried, for so many images and blocks."""
    for on_images in range(1, min(threads, images) + 1):
        each = threads // on_images
        for on_filters in range(1, min(each, filters) + 1):
            yield on_images, on_filters, min(each // on_filters, channels)


def cheapest(choices: Iterable[Division], cost: Callable[[int, int, int], float]) -> Division:
    """Return the last of the choices that cost the least."""
    best = (1, 1, 1)
    least = cost(*best)
    for choice in choices:
        found = cost(*choice)
        if found <= least:
            best, least = choice, found
    return best


_BIAS_ROOM = 3 * 5 * 5 * 16 * 16


def bias_reduction(threads: int, blocks: int, images: int) -> tuple[Entry, ...]:
    """Buffers in which threads sum a bias's gradient over the batch."""
    return reduction(threads, VECTOR, blocks, images, threads * _BIAS_ROOM)


def reduction(threads: int, job_size: int, jobs: int, images: int, room: int) -> tuple[Entry, ...]:
    """Buffers in which threads sum ``jobs`` of ``job_size`` floats over images, of at most
    ``room`` floats; ``reduce_balancer_t::balance``.
    """
    smallest = max(1, jobs // threads)
    largest = max(1, room // (threads * job_size))
    groups = min(jobs // smallest, threads)
    members = min(threads // groups, images)
    each = ceil_div(jobs, groups)
    least = jobs * job_size * images
    for size in range(smallest, jobs):
        tried = min(jobs // size, threads)
        in_group = min(threads // tried, images)
        most = ceil_div(jobs, tried)
        if in_group > 1 and most > largest:
            continue
        work = job_size * most * (ceil_div(images, in_group) + (in_group != 1))
        if work < least:
            groups, members, each, least = tried, in_group, most, work
    if members == 1:
        return ()
    return (groups * (members - 1) * each * job_size * FLOAT, PAGE), (groups * PAGE, BARRIER[1])


@dataclass(frozen=True)
class Blocks:
    """Channels and filters of one group as a kernel pads them, and the block they come in."""

    problem: Problem
    block: int
    channels: int
    filters: int
    first: bool
    """Few input channels, which are not blocked: the first layer of a network."""

    @property
    def channel_block(self) -> int:
        """How many input channels lie beside each other in a block."""
        return self.channels if self.first else self.block

    @property
    def channel_blocks(self) -> int:
        return ceil_div(self.channels, self.channel_block)

    @property
    def filter_blocks(self) -> int:
        return ceil_div(self.filters, self.block)

    @property
    def weight(self) -> int:
        """Elements of the weight, of all groups."""
        channels = self.channel_blocks * self.channel_block
        return self.padded_filters * channels * self.problem.taps

    @property
    def padded_filters(self) -> int:
        """Output channels of all groups, in whole blocks."""
        return self.problem.groups * self.filter_blocks * self.block

    @property
    def padded_bias(self) -> int:
        """Bytes of a bias that does not fill its blocks, and is copied into some that it does."""
        padded = self.problem.bias and self.filters != self.problem.group_filters
        return self.filters * self.problem.element_size if padded else 0

    def primitive(self, *scratchpad: Entry) -> Primitive:
        """Return operands in blocks, where they are not channels last, and a weight in blocks."""
        problem = self.problem
        source = problem.input_bytes(problem.groups * self.channels)
        result = problem.output_bytes(problem.groups * self.filters)
        return Primitive(
            0 if problem.channels_last or self.first else source,
            self.weight * problem.element_size,
            0 if problem.channels_last else result,
            booked(*scratchpad),
        )


def is_first(problem: Problem) -> bool:
    """Return whether the input has too few channels for a block."""
    return problem.groups == 1 and problem.channels < VECTOR


def blocks_of(
    problem: Problem, first: bool, block: int = VECTOR, smaller: tuple[int, ...] = ()
) -> Blocks | None:
    """Blocks that groups have to fill: ``smaller`` ones in groups too small for the usual."""
    channels, filters = problem.group_channels, problem.group_filters
    if not problem.grouped and not problem.channels_last:
        padded = channels if first else round_up(channels, block)
        return Blocks(problem, block, padded, round_up(filters, block), first)
    few = not problem.channels_last or (max(channels, filters) < block and problem.grouped)
    if few and not first and (channels % block or filters % block):
        block = next((size for size in smaller if not channels % size | filters % size), block)
    if not problem.channels_last and (filters % block or (channels % block and not first)):
        return None
    return Blocks(problem, block, channels, filters, first)


def overlaps(problem: Problem, pixels: int) -> tuple[int, int]:
    """Pixels of a row of the input's gradient whose products lie left and right of the output."""
    reach, step = problem.extent[2] - 1, problem.stride[2]
    end = max(0, problem.end_padding[2] + problem.input[2] % pixels)
    left, right = reach - problem.padding[2], reach - end
    return max(0, left) // step * step, max(0, right) // step * step


def input_row_fits(problem: Problem, pixels: int, any_left: bool = False) -> bool:
    """As of the output, for a gradient of the input."""
    width, step = problem.input[2], problem.stride[2]
    left, right = overlaps(problem, pixels)
    if right > pixels or (left > pixels and not any_left):
        return False
    whole = pixels % step == 0 and problem.end_padding[2] + width % pixels >= 0
    return width <= pixels or whole


def input_row_pixels(blocks: Blocks, registers: int) -> int:
    """Pixels of a row of the input that are computed at a time, for the most products."""
    problem = blocks.problem
    width, step = problem.input[2], problem.stride[2]
    left = overlaps(problem, 1)[0]
    best, most = 0, 0
    for at_a_time in range(1, 5):
        if blocks.channel_blocks % at_a_time:
            continue
        for reach in range(step, width + step, step):
            if reach * at_a_time + reach // step > registers:
                break
            pixels = min(reach, width)
            if left > pixels and pixels != width:
                continue
            products = ceil_div(pixels, step) * at_a_time
            if products > most or (products == most and pixels > best):
                best, most = pixels, products
    return best


def weights_take_padding(problem: Problem) -> bool:
    """Return whether kernels for a gradient of the weight accept the padding."""
    extent, (depth, height, width) = problem.extent, problem.padding
    if problem.dilation[1] != 1 and extent[1] > problem.input[1]:
        return False
    return depth < extent[0] and height <= extent[1] // 2 and width < extent[2]
