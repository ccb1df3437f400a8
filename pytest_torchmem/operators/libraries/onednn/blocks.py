"""How direct kernels block the channels of one group."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_torchmem.operators.libraries.onednn.problem import VECTOR, Problem
from pytest_torchmem.operators.rounding import round_up


@dataclass(frozen=True)
class Blocks:
    """Channels and filters of one group as a kernel pads them, and the block they come in."""

    block: int
    channels: int
    filters: int
    first: bool
    """Few input channels, which are not blocked: the first layer of a network."""

    @property
    def channel_block(self) -> int:
        """How many input channels lie beside each other in a block."""
        return self.channels if self.first else self.block

    def weight_bytes(self, problem: Problem) -> int:
        """Bytes of the weight; in bfloat16 an even number of channels."""
        channels = round_up(self.channels, self.channel_block)
        if problem.bfloat16:
            channels += channels % 2
        size = round_up(self.filters, self.block) * channels * problem.taps
        return problem.groups * size * problem.element_size

    def input_bytes(self, problem: Problem) -> int:
        """Bytes of the input in blocks, 0 where it is taken as it is."""
        if problem.channels_last or self.first:
            return 0
        return problem.input_bytes(problem.groups * self.channels)

    def output_bytes(self, problem: Problem) -> int:
        """Bytes of the output in blocks, 0 where it is channels last."""
        if problem.channels_last:
            return 0
        return problem.output_bytes(problem.groups * self.filters)


def is_first(problem: Problem) -> bool:
    """Return whether the input has too few channels for a block."""
    return problem.groups == 1 and problem.channels < VECTOR


def blocks_of(problem: Problem, first: bool) -> Blocks | None:
    """Blocks of 16, of 8 or 4 in groups too small for that; none where groups fill no block."""
    channels, filters, block = problem.group_channels, problem.group_filters, VECTOR
    if not problem.grouped and not problem.channels_last:
        padded = channels if first else round_up(channels, VECTOR)
        return Blocks(VECTOR, padded, round_up(filters, VECTOR), first)
    narrow = not problem.channels_last or (max(channels, filters) < VECTOR and problem.grouped)
    if narrow and not first and (channels % VECTOR or filters % VECTOR):
        block = next((size for size in (8, 4) if not channels % size | filters % size), VECTOR)
    if not problem.channels_last and (filters % block or (channels % block and not first)):
        return None
    return Blocks(block, channels, filters, first)
