"""A convolution as oneDNN sees it, and what one of its kernels takes for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Sizes = tuple[int, int, int]
"""Depth, height and width; of an image the depth is 1."""

VECTOR = 16
"""Floats in a vector of AVX512: the channels of one block."""

PAGE = 4096

L1 = 48 * 1024
L2 = 1024 * 1024
"""Bytes of a core's own caches, on which oneDNN decides how large its blocks are."""


def share(amount: int, parts: int) -> int:
    """Return the largest of ``parts`` parts: ``div_up``."""
    return -(-amount // parts)


def booked(*sizes: int | tuple[int, int]) -> int:
    """Bytes of a scratchpad: every buffer (or buffer and alignment) has room to be aligned;
    src/common/memory_tracking.hpp, ``registry_t::book``.
    """
    total = 0
    for entry in sizes:
        size, alignment = entry if isinstance(entry, tuple) else (entry, 128)
        total += size + max(alignment, 128) if size else 0
    return total


BARRIER = (PAGE, PAGE)
"""The context of a barrier among threads, ``simple_barrier::ctx_t``."""


@dataclass(frozen=True)
class Problem:
    """One convolution. A transposed one stands here as the convolution that it is the gradient of:
    ``input`` and ``channels`` are then what it returns.
    """

    threads: int
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
    bias: bool
    channels_last: bool
    """The caller insists on channels last; else the kernel chooses."""
    float_gradient: bool = False
    """The gradient of the input is written in float, whatever the operands are."""

    @property
    def element_size(self) -> int:
        """Bytes of an element of the operands."""
        return self.dtype.itemsize

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of the input's gradient."""
        return 4 if self.float_gradient else self.element_size

    @property
    def bfloat16(self) -> bool:
        """Whether the operands are bfloat16."""
        return self.dtype == torch.bfloat16

    @property
    def grouped(self) -> bool:
        """Whether there is more than one group."""
        return self.groups > 1

    @property
    def group_channels(self) -> int:
        """Input channels of one group."""
        return self.channels // self.groups

    @property
    def group_filters(self) -> int:
        """Output channels of one group."""
        return self.filters // self.groups

    @property
    def depthwise(self) -> bool:
        """Whether every channel is a group of its own, with one filter."""
        return self.grouped and self.group_channels == self.group_filters == 1

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
        depth, height, width = (
            (taps - 1) * gap + 1 for taps, gap in zip(self.kernel, self.dilation, strict=True)
        )
        return depth, height, width

    @property
    def end_padding(self) -> Sizes:
        """What the last position of the kernel reaches beyond the input; negative where it ends
        before: ``calculate_end_padding``.
        """
        depth, height, width = (
            (result - 1) * step + extent - (size + start)
            for result, step, extent, size, start in zip(
                self.output, self.stride, self.extent, self.input, self.padding, strict=True
            )
        )
        return depth, height, width

    @property
    def strided(self) -> bool:
        """Whether the kernel moves by more than one pixel in a direction."""
        return self.stride != (1, 1, 1)

    @property
    def dilated(self) -> bool:
        """Whether the kernel has gaps."""
        return self.dilation != (1, 1, 1)

    @property
    def misses_input(self) -> bool:
        """A kernel that at some position lies on padding alone."""
        return any(
            extent <= start or extent <= end
            for extent, start, end in zip(self.extent, self.padding, self.end_padding, strict=True)
        )

    def input_bytes(self, channels: int) -> int:
        """Bytes of the input with so many channels."""
        return self.batch * channels * self.input_space * self.element_size

    def output_bytes(self, filters: int) -> int:
        """Bytes of the output with so many channels."""
        return self.batch * filters * self.output_space * self.element_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.filters * self.group_channels * self.taps * self.element_size


@dataclass(frozen=True)
class Primitive:
    """What a kernel wants of a convolution: bytes of the input, weight and output in its own
    layout, 0 where it takes them as the caller has them; and of its scratchpad.

    ``channels_last`` of input and output where the caller did not ask for it.
    """

    name: str
    input: int
    weight: int
    output: int
    scratchpad: int = 0
    channels_last: bool = False
