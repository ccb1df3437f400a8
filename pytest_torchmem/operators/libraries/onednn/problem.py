"""A convolution as oneDNN sees it, and a kernel's scratchpad for it; src/common/convolution_pd.hpp,
src/common/memory_tracking.hpp.

How oneDNN shares the gradient of a weight, and the sum of a bias's, among threads;
src/cpu/x64/jit_avx512_common_conv_kernel.cpp (``balance``), cpu_reducer.cpp.

Blocks of channels, and of the pixels of a row, in direct kernels: ``init_conf`` of
src/cpu/x64/jit_avx512_common_conv_kernel.cpp, jit_avx512_core_bf16_conv_kernel.cpp and
jit_avx2_conv_kernel_f32.cpp.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from pytest_torchmem.operators.workspace import FLOAT, Entry, booked, ceil_div, round_up
from pytest_torchmem.targets.host import Host

Sizes = tuple[int, ...]
"""Depth, height and width; of an image the depth is 1."""

VECTOR = 16
"""Floats in a vector of AVX512: the channels of one block."""

PAGE = 4096

BARRIER = (PAGE, PAGE)
"""The context of a barrier among threads, ``simple_barrier::ctx_t``."""


class Primitive(NamedTuple):
    """What a kernel wants of a convolution: bytes of the input, weight and output in its own
    layout, 0 where it takes them as the caller has them; and of its scratchpad.

    ``channels_last`` of input and output where the caller did not ask for it.
    """

    input: int
    weight: int
    output: int
    scratchpad: int = 0
    channels_last: bool = False


class Problem(NamedTuple):
    """One convolution. A transposed one is represented by the convolution whose gradient it is:
    ``input`` and ``channels`` are then those of its output.
    """

    host: Host
    dtype: torch.dtype
    dims: int
    """Dimensions in space, 2 or 3: ATen gives lines as images of height 1."""
    batch: int
    groups: int
    channels: int
    filters: int
    input: Sizes
    output: Sizes
    kernel: Sizes
    stride: Sizes
    dilation: Sizes
    padding: Sizes
    """On both sides: ATen pads alike, so that the kernel's last position never reaches farther."""
    bias: bool
    channels_last: bool
    """The caller insists on channels last; else the kernel chooses."""
    float_gradient: bool = False
    """The gradient of the input is written in float, whatever the operands are."""

    @property
    def threads(self) -> int:
        return self.host.threads

    @property
    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of the input's gradient."""
        return FLOAT if self.float_gradient else self.element_size

    @property
    def vector(self) -> int:
        """Elements in a vector of AVX512, which are those of a cache line too."""
        return 64 // self.element_size

    @property
    def bfloat16(self) -> bool:
        return self.dtype == torch.bfloat16

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def group_filters(self) -> int:
        return self.filters // self.groups

    @property
    def depthwise(self) -> bool:
        """Whether every channel is a group of its own, with one filter."""
        return self.groups > 1 and self.group_channels == self.group_filters == 1

    @property
    def taps(self) -> int:
        """Positions of the kernel in space."""
        return math.prod(self.kernel)

    @property
    def input_space(self) -> int:
        """Pixels of one channel of the input."""
        return math.prod(self.input)

    @property
    def output_space(self) -> int:
        """Pixels of one channel of the output."""
        return math.prod(self.output)

    @property
    def extent(self) -> Sizes:
        """Of the kernel with its gaps: ``calculate_extended_filter_size``."""
        pairs = zip(self.kernel, self.dilation, strict=True)
        return tuple((taps - 1) * gap + 1 for taps, gap in pairs)

    def reach(self, axis: int, positions: int) -> int:
        """How far so many positions reach beyond the input, or below 0: calculate_end_padding."""
        last = (positions - 1) * self.stride[axis] + self.extent[axis]
        return last - (self.input[axis] + self.padding[axis])

    @property
    def end_padding(self) -> Sizes:
        """How far all positions of the kernel reach beyond the input."""
        return tuple(map(self.reach, range(3), self.output))

    @property
    def strided(self) -> bool:
        """Whether the kernel moves by more than one pixel in a direction."""
        return self.stride != (1, 1, 1)

    @property
    def dilated(self) -> bool:
        return self.dilation != (1, 1, 1)

    def moves_gaps(self, axes: int = 3) -> bool:
        """Whether a kernel has gaps in a direction in which it moves by more than one pixel."""
        pairs = zip(self.dilation[:axes], self.stride, strict=False)
        return any(gap != 1 and step != 1 for gap, step in pairs)

    @property
    def misses_input(self) -> bool:
        """A kernel that at some position lies on padding alone."""
        return any(extent <= most for extent, most in zip(self.extent, self.padding, strict=True))

    def input_bytes(self, channels: int) -> int:
        """Bytes of the input with so many channels."""
        return self.batch * channels * self.input_space * self.element_size

    def output_bytes(self, filters: int) -> int:
        """Bytes of the output with so many channels."""
        return self.batch * filters * self.output_space * self.element_size

    @property
    def weight_bytes(self) -> int:
        return self.filters * self.group_channels * self.taps * self.element_size

    def primitive(
        self, weight: int, *scratchpad: Entry, channels: int = 0, filters: int = 0
    ) -> Primitive:
        """Return what a kernel wants: a weight of so many elements, and, where operands are not
        channels last, an input and an output with so many channels; 0 for one as the caller has it.
        """
        if self.channels_last:
            channels = filters = 0
        source, result = self.input_bytes(channels), self.output_bytes(filters)
        return Primitive(source, weight * self.element_size, result, booked(*scratchpad))


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
    return min(reversed([(1, 1, 1), *choices]), key=lambda choice: cost(*choice))


_BIAS_ROOM = 3 * 5 * 5 * 16 * 16


def bias_reduction(threads: int, blocks: int, images: int) -> tuple[Entry, ...]:
    """Buffers in which threads sum a bias's gradient over the batch."""
    return reduction(threads, VECTOR, blocks, images, threads * _BIAS_ROOM)


def reduction(threads: int, job_size: int, jobs: int, images: int, room: int) -> tuple[Entry, ...]:
    """Buffers in which threads sum jobs over images, in floats; ``reduce_balancer_t::balance``."""
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


class Blocks(NamedTuple):
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
        groups = self.problem.groups
        channels = 0 if self.first else groups * self.channels
        filters = groups * self.filters
        return self.problem.primitive(self.weight, *scratchpad, channels=channels, filters=filters)


def is_first(problem: Problem) -> bool:
    """Return whether the input has too few channels for a block."""
    return problem.groups == 1 and problem.channels < VECTOR


def blocks_of(
    problem: Problem, first: bool, block: int = VECTOR, smaller: tuple[int, ...] = ()
) -> Blocks | None:
    """Blocks that groups have to fill: ``smaller`` ones in groups too small for the usual."""
    channels, filters = problem.group_channels, problem.group_filters
    if problem.groups == 1 and not problem.channels_last:
        padded = channels if first else round_up(channels, block)
        return Blocks(problem, block, padded, round_up(filters, block), first)
    few = not problem.channels_last or (max(channels, filters) < block and problem.groups > 1)
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
    choices = [
        (ceil_div(pixels, step) * at_a_time, pixels)
        for at_a_time in range(1, 5)
        if blocks.channel_blocks % at_a_time == 0
        for reach in range(step, width + step, step)
        for pixels in [min(reach, width)]
        if reach * at_a_time + reach // step <= registers and (left <= pixels or pixels == width)
    ]
    return max(choices, default=(0, 0))[1]


def weights_take_padding(problem: Problem) -> bool:
    """Return whether kernels for a gradient of the weight accept the padding."""
    extent, (depth, height, width) = problem.extent, problem.padding
    if problem.dilation[1] != 1 and extent[1] > problem.input[1]:
        return False
    return depth < extent[0] and height <= extent[1] // 2 and width < extent[2]
