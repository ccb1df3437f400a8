"""Convolutions as matrix products of columns, ``gemm:jit``: what no vectorised kernel takes;
src/cpu/gemm_convolution_utils.cpp and src/cpu/x64/gemm_bf16_convolution.cpp.
"""

from __future__ import annotations

from pytest_torchmem.operators.libraries.onednn.gemm_blocks import (
    columns_channels_first,
    columns_channels_last,
)
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, booked, share
from pytest_torchmem.operators.rounding import round_up

_NAME = "gemm:jit"
_FLOAT = 4
_LIMIT = 1 << 30
_SMALL = 64 * 1024
"""Multiplications for one thread, below which a product is not shared."""


def _vector(problem: Problem) -> int:
    return 64 // problem.element_size


def _is_plain(problem: Problem) -> bool:
    """Whether the input is its own columns."""
    return problem.taps == 1 and not problem.strided and problem.input == problem.output


def _image(size: tuple[int, int, int]) -> int:
    return size[1] * size[2]


def _limit(problem: Problem) -> int:
    tensors = (
        problem.input_bytes(problem.channels)
        + problem.weight_bytes
        + problem.output_bytes(problem.filters)
    )
    return min(_LIMIT, 15 * problem.threads * tensors)


def _outer_is_better(problem: Problem, inner: int) -> bool:
    """Groups and images keep threads as busy as parts of one product, or that is small."""
    threads = problem.threads
    outer = problem.groups * problem.batch
    busy_outer = outer / round_up(outer, threads)
    busy_inner = inner / round_up(inner, threads)
    pixels = _image(problem.input)
    work = pixels * problem.group_channels * problem.group_filters
    return busy_outer / busy_inner >= 1 or work // threads < _SMALL


def _weight(problem: Problem) -> int:
    """Channels last wants the filters innermost."""
    return problem.weight_bytes if problem.channels_last else 0


def forward(problem: Problem) -> Primitive | None:
    """Columns of one block for every thread; in bfloat16 the block's result in float as well."""
    if problem.channels_last:
        entries = columns_channels_last(problem, _is_plain(problem))
    else:
        entries = columns_channels_first(problem, _is_plain(problem))
    return Primitive(_NAME, 0, _weight(problem), 0, booked(*entries))


def backward_data(problem: Problem) -> Primitive | None:
    """Columns of one image in float for every thread that has an image."""
    vector, threads = _vector(problem), problem.threads
    pixels, channels = _image(problem.input), problem.group_channels
    taps, result = problem.taps, _image(problem.output)
    inner = share(pixels, vector) * share(channels, vector)
    columns = 0 if _is_plain(problem) else channels * taps * result
    entries: list[int] = []
    if problem.channels_last:
        columns *= problem.output[0]
        outer = (
            problem.dims == 2
            and (problem.depthwise or (pixels // threads < 64 and problem.batch != 1))
            and _outer_is_better(problem, inner)
        )
        used = threads if outer else 1
        entries.append(used * columns * _FLOAT)
        if problem.grouped or problem.bfloat16:
            entries.append(used * problem.input_space * channels * _FLOAT)
        return Primitive(_NAME, 0, _weight(problem), 0, booked(*entries))
    outer = (
        (result // threads < 512 or taps < 64)
        and (problem.batch != 1 or problem.groups > 2)
        and _outer_is_better(problem, inner)
    )
    used = threads if outer else 1
    if problem.bfloat16:
        entries.append(used * round_up(channels * problem.input_space, 16) * _FLOAT)
    entries.append(_within_limit(problem, entries, used, columns, _FLOAT, 0.1))
    return Primitive(_NAME, 0, 0, 0, booked(*entries))


def backward_weights(problem: Problem) -> Primitive | None:
    """Columns, and the weight's gradient, for every thread that has an image."""
    vector, threads, size = _vector(problem), problem.threads, problem.element_size
    channels, result = problem.group_channels, _image(problem.output)
    weight = problem.weight_bytes
    """What each thread keeps is as many floats as the weight has bytes."""
    columns = 0 if _is_plain(problem) else channels * problem.taps * result
    image = problem.input_space * channels * size
    bias = problem.filters * _FLOAT if problem.bfloat16 and problem.bias else 0
    estimate = _FLOAT * threads * weight
    if problem.bfloat16:
        estimate += _FLOAT * weight + bias
    if problem.channels_last:
        estimate += threads * (size * columns + image)
    else:
        estimate += size * threads * channels * problem.taps * vector
    outer = (
        estimate < _limit(problem)
        and result // threads < 256
        and (problem.batch != 1 or problem.groups > 2)
    )
    used = threads if outer else 1
    entries: list[int] = []
    if problem.channels_last:
        entries += [used * columns * size, used * weight * _FLOAT, used * image]
    else:
        entries.append(used * weight * _FLOAT)
    if problem.bfloat16:
        entries += [weight * _FLOAT, bias]
    if not problem.channels_last:
        entries.append(_within_limit(problem, entries, used, columns, size, 0.05))
    return Primitive(_NAME, 0, _weight(problem), 0, booked(*entries))


def _within_limit(
    problem: Problem, entries: list[int], used: int, columns: int, size: int, part: float
) -> int:
    """Bytes of the columns, or of fewer of them where a scratchpad would be too large."""
    room = _limit(problem) - booked(*entries)
    total = used * columns * size
    if room >= total:
        return total
    each = problem.group_channels * problem.taps
    most = room // (size * used * (columns // _image(problem.output)))
    return used * each * max(_vector(problem), int(most * part)) * size
