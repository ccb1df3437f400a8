"""Convolutions with a kernel of one pixel, ``jit_1x1``;
src/cpu/x64/jit_avx512_common_1x1_conv_kernel.cpp.
"""

from __future__ import annotations

import math

from pytest_torchmem.operators.libraries.onednn.problem import (
    BARRIER,
    VECTOR,
    Primitive,
    Problem,
    booked,
    share,
)
from pytest_torchmem.operators.libraries.onednn.sharing import (
    Work,
    bias_reduction,
    least_memory,
)
from pytest_torchmem.operators.rounding import round_up

_NAME = "jit_1x1"
_FLOAT = 4


def takes(problem: Problem) -> bool:
    """One group, no padding; strides only where the copy without them divides the image."""
    if problem.grouped or problem.taps != 1 or any(problem.padding):
        return False
    if not problem.strided:
        return problem.input == problem.output
    return _is_thinned(problem)


def _is_thinned(problem: Problem) -> bool:
    """Whether the image is copied without what the strides leave out; ``rtus_prepare``."""
    return (
        problem.strided
        and problem.dims == 2
        and all(
            result * step == size
            for result, step, size in zip(
                problem.output, problem.stride, problem.input, strict=True
            )
        )
    )


def best_divider(value: int, smallest: int, largest: int, larger: bool, step: int = 1) -> int:
    """The divider in these bounds with the least rest; src/cpu/x64/jit_uni_1x1_conv_utils.hpp."""
    largest = max(1, min(largest, value))
    best, least = largest, math.inf
    for divider in range(largest, max(1, min(smallest, largest)) - 1, -step):
        filled = round_up(value, divider)
        waste = (filled - value) / filled
        if waste < least or (not larger and waste == least):
            best, least = divider, waste
    return best


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Bytes of input, weight and output in blocks."""
    channels, filters = round_up(problem.channels, VECTOR), round_up(problem.filters, VECTOR)
    weight = channels * filters * _FLOAT
    if problem.channels_last:
        return 0, weight, 0
    return problem.input_bytes(channels), weight, problem.output_bytes(filters)


def forward(problem: Problem) -> Primitive | None:
    """A bias that is not whole blocks is copied; so is an image that strides thin out."""
    if problem.bfloat16 or not takes(problem):
        return None
    source, weight, result = _sizes(problem)
    entries = []
    if problem.bias and not problem.channels_last and problem.filters % VECTOR:
        entries.append(round_up(problem.filters, VECTOR) * _FLOAT)
    if problem.strided:
        entries.append(thinned_bytes(problem, round_up(problem.channels, VECTOR), problem.threads))
    return Primitive(_NAME, source, weight, result, booked(*entries))


def thinned_bytes(problem: Problem, channels: int, threads: int) -> int:
    """Bytes of the images that strides leave, of every thread: ``rtus_prepare_space_info``."""
    if problem.channels_last:
        channels = problem.channels
    return threads * problem.output_space * channels * problem.element_size


def backward_data(problem: Problem) -> Primitive | None:
    """As the forward; strides are left to the strided kernels."""
    if problem.bfloat16 or not takes(problem) or problem.strided:
        return None
    return Primitive(_NAME, *_sizes(problem))


def backward_weights(problem: Problem) -> Primitive | None:
    """Threads that share the pixels have a copy of the weight's gradient each."""
    if problem.bfloat16 or not takes(problem):
        return None
    source, weight, result = _sizes(problem)
    on_pixels, threads = _division(problem)
    entries: list[int | tuple[int, int]] = []
    if problem.bias and problem.filters % VECTOR:
        entries.append(round_up(problem.filters, VECTOR) * _FLOAT)
    if on_pixels > 1:
        entries += [weight * (on_pixels - 1), BARRIER]
    if problem.bias:
        blocks = share(problem.filters, VECTOR)
        entries += bias_reduction(threads, VECTOR, blocks, problem.batch)
    if problem.strided:
        entries.append(thinned_bytes(problem, _bcast_blocking(problem), threads))
    return Primitive(_NAME, source, weight, result, booked(*entries))


def _bcast_blocking(problem: Problem) -> int:
    blocks = share(problem.channels, VECTOR)
    return best_divider(blocks, 5, blocks, False) * VECTOR


def _reduce_block(problem: Problem) -> int:
    pixels, width = problem.output_space, problem.output[2]
    block = best_divider(pixels, 7, 16, True)
    if pixels % block:
        block = best_divider(width, 4, width, False)
    return 1 if block > 256 else block


def _division(problem: Problem) -> tuple[int, int]:
    """Threads on blocks of pixels, and threads in all: ``balance``."""
    block = _reduce_block(problem)
    parts = problem.batch * share(problem.output_space, block)
    work = Work(
        threads=problem.threads,
        images=parts,
        most_on_images=parts,
        filter_blocks=share(problem.filters, VECTOR),
        channel_blocks=share(problem.channels, VECTOR),
        input=VECTOR * block,
        output=VECTOR * block,
        weight=VECTOR * VECTOR,
        weight_cost=12,
    )
    division = least_memory(work, work.memory)
    on_pixels = division[0]
    if problem.threads // 2 < on_pixels < problem.threads:
        on_pixels = min(problem.batch, problem.threads)
    return on_pixels, on_pixels * math.prod(division[1:])
