"""Depthwise convolutions: one channel to a group.

``brdgmm_dw`` (src/cpu/x64/jit_brdgmm_dw_conv.cpp) runs channels last, ``jit_dw``
(jit_uni_dw_conv_kernel_utils.cpp) blocks of channels too.
"""

from __future__ import annotations

from pytest_torchmem.operators.libraries.onednn.problem import (
    VECTOR,
    Primitive,
    Problem,
    booked,
    share,
)
from pytest_torchmem.operators.rounding import round_up

_FLOAT = 4


def _weight(problem: Problem) -> int:
    return round_up(problem.groups, VECTOR) * problem.taps * problem.element_size


def _data(problem: Problem) -> tuple[int, int]:
    """Bytes of input and output in blocks of channels; none where they are channels last."""
    if problem.channels_last:
        return 0, 0
    padded = round_up(problem.channels, VECTOR)
    return problem.input_bytes(padded), problem.output_bytes(padded)


def forward_by_brdgmm(problem: Problem) -> Primitive | None:
    """``brdgmm_dw``: any volume, and images that are channels last."""
    if not problem.depthwise or problem.dilated:
        return None
    if not problem.channels_last and problem.dims == 2:
        return None
    own = not problem.channels_last
    return Primitive(
        "brdgmm_dw",
        problem.input_bytes(problem.channels) if own else 0,
        _weight(problem),
        problem.output_bytes(problem.filters) if own else 0,
        channels_last=own,
    )


def forward(problem: Problem) -> Primitive | None:
    """``jit_dw``, forward: a bias that is not whole vectors of floats is copied."""
    if not problem.depthwise or problem.dims != 2 or problem.misses_input:
        return None
    width, stride, extent = problem.output[2], problem.stride[2], problem.extent[2]
    unrolled = _unrolled_width(problem)
    tail = width % unrolled
    end = (width - tail - 1) * stride + extent - (problem.input[2] + problem.padding[2])
    if problem.padding[2] > unrolled or end > unrolled:
        return None
    scratchpad = 0
    channels = problem.groups if problem.channels_last else round_up(problem.groups, VECTOR)
    if problem.bias and (problem.bfloat16 or channels != problem.groups):
        scratchpad = booked(channels * _FLOAT)
    source, result = _data(problem)
    return Primitive("jit_dw", source, _weight(problem), result, scratchpad)


def _unrolled_width(problem: Problem) -> int:
    """Pixels of a row that the kernel computes at a time."""
    width, taps, stride = problem.output[2], problem.kernel[2], problem.stride[2]
    unrolled = min(6, width)
    if not problem.channels_last:
        return unrolled
    blocks = min(4, share(problem.groups, VECTOR))
    shared = (31 - taps + stride) // (blocks + stride)
    if not problem.bfloat16 and stride < taps <= 5 and problem.dilation[2] == 1 and shared >= 2:
        unrolled = min(width, shared)
    if problem.groups * problem.input[2] * problem.element_size % 1024 == 0:
        unrolled = min(unrolled, 7 if width > 7 else 4)
    return unrolled


def backward_data(problem: Problem) -> Primitive | None:
    """``jit_dw``, gradient of the input."""
    if not problem.depthwise or problem.dims != 2 or problem.dilated:
        return None
    source, result = _data(problem)
    return Primitive("jit_dw", source, _weight(problem), result)


def backward_weights(problem: Problem) -> Primitive | None:
    """``jit_dw``, gradient of the weight: a copy of it for every thread that shares a batch."""
    if not problem.depthwise or problem.dims != 2 or problem.dilated:
        return None
    if problem.kernel[2] > 3 or problem.stride[2] > problem.kernel[2]:
        return None
    if not _within_bounds(problem):
        return None
    source, result = _data(problem)
    reduction = _reduction(problem)
    return Primitive("jit_dw", source, _weight(problem), result, reduction)


def _within_bounds(problem: Problem) -> bool:
    starts = problem.padding[1:]
    ends = [max(0, end) for end in problem.end_padding[1:]]
    for taps, start, end in zip(problem.kernel[1:], starts, ends, strict=True):
        if start > taps // 2 or end > taps // 2:
            return False
    step, top, bottom = problem.stride[1], starts[0], ends[0]
    if problem.input[1] < problem.kernel[1] + -top % step:
        return False
    return not (top > 1 and top % step) and not (bottom > 1 and bottom % step)


def _reduction(problem: Problem) -> int:
    """``jit_uni_dw_conv_bwd_weights_kernel_t::init_scratchpad``."""
    padded = round_up(problem.groups, VECTOR)
    weight = padded * problem.taps * _FLOAT
    entries: list[int] = []
    if problem.channels_last:
        threads = _threads_channels_last(problem)
        copies = threads if problem.bfloat16 else threads - 1
        channels = problem.groups
        if copies:
            entries.append(weight * copies)
            if problem.bias:
                entries.append(channels * copies * _FLOAT)
    else:
        channels = padded
        on_channels = min(padded // VECTOR, problem.threads)
        on_batch = min(max(1, problem.threads // on_channels), problem.batch)
        if on_batch > 1 or problem.bfloat16:
            entries.append(weight * (on_batch if problem.bfloat16 else on_batch - 1))
        if on_batch > 1 and problem.bias:
            entries.append(channels * (on_batch - 1) * _FLOAT)
    if problem.bias and problem.bfloat16:
        entries.append(channels * _FLOAT)
    return booked(*entries)


def _threads_channels_last(problem: Problem) -> int:
    """Threads on blocks of channels, images and rows: the most that can work at a time, and of
    those the most even; ``partition_nthr_nxc``.
    """
    unroll = 1 if problem.bfloat16 else min(4, 31 // (2 * problem.kernel[2]))
    blocks = share(problem.groups, VECTOR)
    outer = share(blocks, min(blocks, unroll))
    threads, batch, rows = problem.threads, problem.batch, problem.output[1]
    best = 0
    for on_channels in range(min(outer, threads), 0, -1):
        per_group = threads // on_channels
        for on_batch in range(min(batch, per_group), 0, -1):
            most = min(rows, per_group // on_batch)
            best = max(best, on_channels * on_batch * most)
    return best
