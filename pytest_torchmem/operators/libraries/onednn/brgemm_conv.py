"""Convolutions as batches of matrix products, ``brgconv``: channels last.

src/cpu/x64/jit_brgemm_conv_utils.cpp (forward, and gradients of the input of stride 1, which run as
forwards), jit_brgemm_conv_bwd_utils.cpp (strided gradients of the input), jit_brgemm_conv_bwd.cpp.
"""

import math

from pytest_torchmem.operators.libraries.onednn.problem import PAGE, VECTOR, Primitive, Problem
from pytest_torchmem.operators.workspace import FLOAT, Entry, booked, ceil_div, round_up

_ELEMENT = 40
"""Bytes that describe one product of a batch, ``brgemm_batch_element_t``."""


def _batch(threads: int, products: int) -> Entry:
    """Lists of products of every thread, on pages of their own."""
    each = ceil_div(round_up(products * _ELEMENT, PAGE), _ELEMENT)
    return threads * each * _ELEMENT, PAGE


def _is_refused(problem: Problem, reduced: int, most: int = VECTOR) -> bool:
    """Groups of few channels are left to direct kernels, where those accept them."""
    if problem.groups == 1 or reduced > most:
        return False
    fours = problem.group_channels % 4 == 0 and problem.group_filters % 4 == 0
    return not problem.bfloat16 or fours


def _paired(problem: Problem, channels: int) -> int:
    """In bfloat16 two channels are multiplied at a time."""
    return round_up(channels, 2) if problem.bfloat16 else channels


def _weight(problem: Problem, outer: int, inner: int, block: int) -> int:
    return problem.groups * round_up(outer, block) * _paired(problem, inner) * problem.taps


def _block(problem: Problem, outer: int, spatial: int, steps: int, avx2: bool = False) -> int:
    """Filters of a block: the most of 64, 48, 32 and 16 that divide them or are few enough."""
    if avx2:
        return next((8 * size for size in (4, 3, 2) if round_up(outer, 8) % (8 * size) == 0), 8)
    whole = round_up(outer, VECTOR)
    size = whole * problem.element_size
    if whole % 64 == 0 and size < 192 * FLOAT:
        return 64
    if whole % 48 == 0 and size <= 384 * FLOAT and spatial > 81 * steps:
        return 48
    return 32 if whole >= 32 else VECTOR


def forward(problem: Problem, avx2: bool = False, inverted: bool = False) -> Primitive | None:
    """``brgconv_1x1`` and ``brg_conv_fwd``: the filters in blocks; ``inverted`` where the kernel
    is turned round for a gradient of the input. Those of AVX2 take groups of few channels, too.
    """
    if not problem.channels_last or problem.depthwise:
        return None
    channels, filters = problem.group_channels, problem.group_filters
    if problem.bfloat16 if avx2 else _is_refused(problem, channels):
        return None
    if not (avx2 or inverted) and _is_lowered(problem):
        return _lowered(problem)
    block = _block(problem, filters, problem.input_space, math.prod(problem.stride), avx2)
    weight = _weight(problem, filters, channels, block)
    return problem.primitive(weight, _batch(problem.threads, problem.taps))


def _is_lowered(problem: Problem) -> bool:
    """A single channel, whose pixels under the kernel are laid side by side (``relo_whi``)."""
    return (
        problem.group_channels == 1
        and problem.dims == 2
        and not problem.dilated
        and min(problem.kernel[1:]) > 1
        and problem.output[2] > 4
        and not _is_merged(problem)
    )


def _is_merged(problem: Problem) -> bool:
    """Whether strides across are taken for channels, of which there is one: ``trans_dim_koef``."""
    if problem.groups > 1 or problem.bfloat16 or problem.padding[2] > 0:
        return False
    across = problem.kernel[2], problem.stride[2], problem.input[2]
    return any(
        (factor <= problem.vector or factor % problem.vector == 0)
        and not any(size % factor for size in across)
        for factor in range(2, min(across) + 1)
    )


def _lowered(problem: Problem) -> Primitive:
    """The input's pixels side by side, which of them are, and the weight laid out alike."""
    threads, size, height = problem.threads, problem.element_size, problem.kernel[1]
    rows, width = (
        problem.input[axis] + problem.padding[axis] + problem.end_padding[axis] for axis in (1, 2)
    )
    step = height * problem.stride[2]
    held = min(rows, height) + problem.padding[1] + max(0, problem.end_padding[1])
    pixels = height * held * width * problem.groups * step
    pixels += ((problem.output[1] - 1) * problem.stride[1] + 1) * step
    taps = _paired(problem, problem.taps)
    if problem.bfloat16 and problem.taps > 32:
        taps = round_up(problem.taps, 32)
    block = _block(problem, problem.group_filters, problem.input_space, 1)
    laid = problem.groups * round_up(problem.group_filters, block) * taps
    return problem.primitive(
        problem.groups * round_up(problem.group_filters, VECTOR) * problem.taps,
        _batch(threads, 1),
        (threads * round_up(pixels, PAGE) * size, PAGE),
        (threads * round_up(problem.output[1] * problem.groups, PAGE), PAGE),
        (round_up(laid, 1024) * size, PAGE),
    )


def as_forward(problem: Problem, avx2: bool = False) -> Primitive | None:
    """The forward, with the kernel turned round, that gives a gradient of the input."""
    if problem.strided:
        return None
    pairs = zip(problem.extent, problem.padding, strict=True)
    turned = problem._replace(
        channels=problem.filters,
        filters=problem.channels,
        input=problem.output,
        output=problem.input,
        padding=tuple(extent - 1 - start for extent, start in pairs),
        bias=False,
    )
    return forward(turned, avx2, inverted=True)


def backward_data(problem: Problem, avx2: bool = False) -> Primitive | None:
    """``brg_conv_bwd``, whose scratchpad holds that of a forward."""
    turned = as_forward(problem, avx2)
    return turned and turned._replace(scratchpad=booked(turned.scratchpad))


def backward_data_strided(
    problem: Problem, avx2: bool = False, transposed: bool = False
) -> Primitive | None:
    """``brgconv_strided``: the gradient of the output padded, for every thread. Transposed
    convolutions take it from oneDNN 3.13 on also where strides do not divide the image.
    """
    if not problem.strided or problem.dilated or (avx2 and problem.bfloat16):
        return None
    uneven = any(size % step for size, step in zip(problem.input, problem.stride, strict=True))
    if transposed and uneven and problem.host.onednn < (3, 13):
        return None
    if _is_refused(problem, problem.group_filters, 8 if avx2 else VECTOR):
        return None
    threads, width, step = problem.threads, problem.input[2], problem.stride[2]
    entries: list[Entry] = [
        _batch(threads, problem.taps),
        (threads * _padded_result(problem), PAGE),
        (threads * PAGE, PAGE),
    ]
    if width % step:
        row = round_up(width, step) * step * problem.channels
        entries.append((threads * round_up(row, PAGE) * problem.gradient_size, PAGE))
    channels, filters = problem.group_channels, problem.group_filters
    block = _block(problem, channels, problem.output_space, 1, avx2)
    if problem.gradient_size < FLOAT:
        entries.append((threads * block * ceil_div(width, step) * FLOAT, PAGE))
    weight = _weight(problem, channels, filters, block)
    found = problem.primitive(weight, *entries, channels=problem.channels, filters=problem.filters)
    return found._replace(channels_last=not problem.channels_last)


def _padded_result(problem: Problem) -> int:
    """Bytes of the gradient of one image with what its padding leaves room for."""
    size = 1
    for axis in range(3):
        reach, step = problem.extent[axis] - 1, problem.stride[axis]
        before = max(0, reach - problem.padding[axis]) // step
        after = max(0, reach - problem.end_padding[axis]) // step
        size *= problem.output[axis] + before + after
    filters = problem.group_filters
    if problem.input[2] % problem.stride[2]:
        filters = _paired(problem, filters)
    return round_up(size * problem.groups * filters, PAGE) * problem.element_size
