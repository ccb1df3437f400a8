"""Convolutions as matrix products of columns, ``gemm:jit``: what no vectorised kernel takes;
src/cpu/gemm_convolution_utils.cpp and src/cpu/x64/gemm_bf16_convolution.cpp.
"""

from __future__ import annotations

from pytest_torchmem.operators.geometry import round_up
from pytest_torchmem.operators.libraries.onednn.gemm_convolution_blocks import (
    columns_channels_first,
    columns_channels_last,
    is_plain,
    runs_outer,
    runs_outer_channels_last,
)
from pytest_torchmem.operators.libraries.onednn.problem import FLOAT, Primitive, Problem, booked

_LIMIT = 1 << 30


def _weight(problem: Problem) -> int:
    """Channels last wants the filters innermost."""
    return problem.weight_bytes if problem.channels_last else 0


def forward(problem: Problem) -> Primitive | None:
    """Columns of one block for every thread; in bfloat16 the block's result in float as well."""
    columns = columns_channels_last if problem.channels_last else columns_channels_first
    return Primitive(0, _weight(problem), 0, booked(*columns(problem)))


def backward_data(problem: Problem) -> Primitive | None:
    """Columns of one image in float for every thread that has an image."""
    channels, taps = problem.group_channels, problem.taps
    pixels, result = problem.input[1] * problem.input[2], problem.output[1] * problem.output[2]
    image = problem.input[0] * pixels * channels
    columns = 0 if is_plain(problem) else channels * taps * result
    if problem.channels_last:
        used = problem.threads if runs_outer_channels_last(problem, pixels) else 1
        entries = [used * columns * problem.output[0] * FLOAT]
        if problem.grouped or problem.bfloat16:
            entries.append(used * image * FLOAT)
        return Primitive(0, _weight(problem), 0, booked(*entries))
    outer = (
        (result // problem.threads < 512 or taps < 64)
        and (problem.batch != 1 or problem.groups > 2)
        and runs_outer(problem, problem.groups * problem.batch, (pixels, channels), pixels)
    )
    used = problem.threads if outer else 1
    entries = [used * round_up(image, 16) * FLOAT] if problem.bfloat16 else []
    entries.append(_within_limit(problem, entries, used, columns, FLOAT, 0.1))
    return Primitive(0, 0, 0, booked(*entries))


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
    return Primitive(0, _weight(problem), 0, booked(*entries))


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
