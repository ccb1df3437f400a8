"""A convolution as oneDNN sees it, and a kernel's scratchpad for it; src/common/convolution_pd.hpp,
src/common/memory_tracking.hpp.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pytest_torchmem.operators.geometry import FLOAT
from pytest_torchmem.operators.workspace import Workspace, estimate
from pytest_torchmem.targets.host import Host

Sizes = tuple[int, int, int]
"""Depth, height and width; of an image the depth is 1."""

Entry = int | tuple[int, int]
"""Bytes of a buffer in a scratchpad; with the alignment where that is more than 128."""

VECTOR = 16
"""Floats in a vector of AVX512: the channels of one block."""

PAGE = 4096

BARRIER = (PAGE, PAGE)
"""The context of a barrier among threads, ``simple_barrier::ctx_t``."""


def booked(*entries: Entry) -> int:
    """Bytes of a scratchpad: every buffer has room to be aligned; ``registry_t::book``."""
    pairs = [(entry, 128) if isinstance(entry, int) else entry for entry in entries]
    return sum(size + alignment for size, alignment in pairs if size)


@dataclass(frozen=True, repr=False)
class Problem:
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
    def grouped(self) -> bool:
        return self.groups > 1

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def group_filters(self) -> int:
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

    def reach(self, axis: int, positions: int) -> int:
        """How far so many positions reach beyond the input, or below 0: calculate_end_padding."""
        last = (positions - 1) * self.stride[axis] + self.extent[axis]
        return last - (self.input[axis] + self.padding[axis])

    @property
    def end_padding(self) -> Sizes:
        """How far all positions of the kernel reach beyond the input."""
        depth, height, width = map(self.reach, range(3), self.output)
        return depth, height, width

    @property
    def strided(self) -> bool:
        """Whether the kernel moves by more than one pixel in a direction."""
        return self.stride != (1, 1, 1)

    @property
    def dilated(self) -> bool:
        """Whether the kernel has gaps."""
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
        """Bytes of the weight."""
        return self.filters * self.group_channels * self.taps * self.element_size


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


def by_onednn(host: Host, dtype: torch.dtype, nbytes: int) -> int | Workspace:
    """Return a workspace of oneDNN's: an estimate, on a host that was not checked."""
    return nbytes if host.is_checked(dtype) else estimate(nbytes)
