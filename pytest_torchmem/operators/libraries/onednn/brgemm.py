"""Convolutions as batches of matrix products, ``brgconv``: channels last.

src/cpu/x64/jit_brgemm_conv_utils.cpp (forward, and gradients of the input of stride 1, which run as
forwards) and jit_brgemm_conv_bwd_utils.cpp (strided gradients of the input).
"""

from __future__ import annotations

import math

from pytest_torchmem.operators.libraries.onednn.problem import (
    PAGE,
    VECTOR,
    Primitive,
    Problem,
    Sizes,
    booked,
    share,
)
from pytest_torchmem.operators.libraries.onednn.release import RELEASE
from pytest_torchmem.operators.rounding import round_up

_ELEMENT = 40
"""Bytes that describe one product of a batch, ``brgemm_batch_element_t``."""

_FLOAT = 4


def batch_bytes(threads: int, products: int) -> tuple[int, int]:
    """Lists of products of every thread, on pages of their own."""
    each = share(round_up(products * _ELEMENT, PAGE), _ELEMENT)
    return threads * each * _ELEMENT, PAGE


def _groups_refused(problem: Problem, reduced: int, most: int = VECTOR) -> bool:
    """Groups of few channels are left to direct kernels, where those accept them."""
    if not problem.grouped or reduced > most:
        return False
    fours = problem.group_channels % 4 == 0 and problem.group_filters % 4 == 0
    return not problem.bfloat16 or fours


def _even(problem: Problem, channels: int) -> int:
    """In bfloat16 two channels are multiplied at a time."""
    return channels + channels % 2 if problem.bfloat16 else channels


def _weight(problem: Problem, outer: int, inner: int, block: int) -> int:
    size = round_up(outer, block) * _even(problem, inner) * problem.taps
    return problem.groups * size * problem.element_size


def block_of(problem: Problem, outer: int, spatial: int, steps: int) -> int:
    """Filters of a block: the most of 64, 48, 32 and 16 that divide them or are few enough."""
    whole = round_up(outer, VECTOR)
    for block in (64, 48, 32):
        if block > whole:
            continue
        if block == 64 and whole % 64 == 0 and whole * problem.element_size < 192 * 4:
            return block
        if (
            block == 48
            and whole % 48 == 0
            and whole * problem.element_size <= 384 * 4
            and spatial > 81 * steps
        ):
            return block
        if block == 32:
            return block
    return VECTOR


def forward(problem: Problem, inverted: bool = False) -> Primitive | None:
    """``brgconv_1x1`` and ``brg_conv_fwd``: the filters in blocks; ``inverted`` where the kernel
    is turned round for a gradient of the input.
    """
    if not problem.channels_last or problem.depthwise:
        return None
    if _groups_refused(problem, problem.group_channels):
        return None
    if not inverted and _is_lowered(problem):
        return _lowered(problem)
    steps = math.prod(problem.stride)
    block = block_of(problem, problem.group_filters, problem.input_space, steps)
    weight = _weight(problem, problem.group_filters, problem.group_channels, block)
    entries = [batch_bytes(problem.threads, problem.taps)]
    return Primitive("brgconv", 0, weight, 0, booked(*entries))


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
    """Whether strides across are taken for channels: ``trans_dim_koef``."""
    taps, step, width = problem.kernel[2], problem.stride[2], problem.input[2]
    if problem.grouped or problem.dilation[2] != 1 or taps < 2 or step < 2:
        return False
    if problem.padding[2] > 0 or problem.end_padding[2] > 0:
        return False
    channels, vector = problem.channels, 64 // problem.element_size
    if _even(problem, channels) != channels or (channels > vector and channels % vector):
        return False
    for factor in range(2, min(taps, step, width) + 1):
        whole = channels * factor <= vector or channels * factor % vector == 0
        if whole and not (width % factor or taps % factor or step % factor):
            return True
    return False


def _lowered(problem: Problem) -> Primitive:
    """The input's pixels side by side, which of them are, and the weight laid out alike."""
    threads, size, height = problem.threads, problem.element_size, problem.kernel[1]
    top, bottom = problem.padding[1], max(0, problem.end_padding[1])
    rows = problem.input[1] + problem.padding[1] + problem.end_padding[1]
    width = problem.input[2] + problem.padding[2] + problem.end_padding[2]
    step = height * problem.stride[2]
    held = min(rows, height) + top + bottom
    pixels = height * held * width * problem.groups * step
    pixels += ((problem.output[1] - 1) * problem.stride[1] + 1) * step
    taps = _even(problem, problem.taps)
    if problem.bfloat16 and problem.taps > 32:
        taps = round_up(problem.taps, 32)
    filters = round_up(problem.group_filters, VECTOR)
    block = block_of(problem, problem.group_filters, problem.input_space, 1)
    laid = round_up(problem.groups * round_up(problem.group_filters, block) * taps, 1024)
    entries = [
        batch_bytes(threads, 1),
        (threads * round_up(pixels, PAGE) * size, PAGE),
        (threads * round_up(problem.output[1] * problem.groups, PAGE), PAGE),
        (laid * size, PAGE),
    ]
    weight = problem.groups * filters * problem.taps * size
    return Primitive("brgconv", 0, weight, 0, booked(*entries))


def forward_narrow(problem: Problem) -> Primitive | None:
    """The kernels of AVX2: groups of few channels, in blocks of 8 filters."""
    if not problem.channels_last or problem.depthwise or problem.bfloat16:
        return None
    weight = _weight(
        problem, problem.group_filters, problem.group_channels, _narrow_block(problem.group_filters)
    )
    entries = [batch_bytes(problem.threads, problem.taps)]
    return Primitive("brgconv:avx2", 0, weight, 0, booked(*entries))


def _narrow_block(outer: int) -> int:
    return next((8 * size for size in (4, 3, 2) if round_up(outer, 8) % (8 * size) == 0), 8)


def _mirrored(problem: Problem) -> Problem:
    """The forward that computes a gradient of the input of stride 1."""
    padding: Sizes = tuple(  # type: ignore[assignment]
        extent - 1 - start for extent, start in zip(problem.extent, problem.padding, strict=True)
    )
    return Problem(
        threads=problem.threads,
        dtype=problem.dtype,
        dims=problem.dims,
        batch=problem.batch,
        groups=problem.groups,
        channels=problem.filters,
        filters=problem.channels,
        input=problem.output,
        output=problem.input,
        kernel=problem.kernel,
        stride=problem.stride,
        dilation=problem.dilation,
        padding=padding,
        bias=False,
        channels_last=problem.channels_last,
    )


def backward_data_unnested(problem: Problem, narrow: bool = False) -> Primitive | None:
    """The forward, with the kernel turned round, that gives a gradient of the input."""
    if problem.strided:
        return None
    turned = _mirrored(problem)
    return forward_narrow(turned) if narrow else forward(turned, inverted=True)


def backward_data(problem: Problem, narrow: bool = False) -> Primitive | None:
    """``brg_conv_bwd``, whose scratchpad holds that of a forward."""
    turned = backward_data_unnested(problem, narrow)
    if turned is None:
        return None
    return Primitive("brg_conv_bwd", 0, turned.weight, 0, booked(turned.scratchpad))


def backward_data_narrow(problem: Problem) -> Primitive | None:
    """The same of AVX2."""
    return backward_data(problem, narrow=True)


def backward_data_strided_narrow(problem: Problem) -> Primitive | None:
    """``brgconv_strided`` of AVX2."""
    return backward_data_strided(problem, narrow=True)


def backward_data_strided(
    problem: Problem, transposed: bool = False, narrow: bool = False
) -> Primitive | None:
    """``brgconv_strided``: the gradient of the output padded, for every thread.

    Transposed convolutions take it from oneDNN 3.13 on also where strides do not divide the image.
    """
    if not problem.strided or problem.dilated:
        return None
    uneven = any(size % step for size, step in zip(problem.input, problem.stride, strict=True))
    if transposed and uneven and RELEASE < (3, 13):
        return None
    if _groups_refused(problem, problem.group_filters, 8 if narrow else VECTOR):
        return None
    if narrow and problem.bfloat16:
        return None
    uneven_width = problem.input[2] % problem.stride[2] != 0
    entries = [batch_bytes(problem.threads, problem.taps)]
    entries.append((problem.threads * _padded_result(problem, uneven_width), PAGE))
    entries.append((problem.threads * PAGE, PAGE))
    width = problem.input[2]
    if uneven_width:
        row = round_up(width, problem.stride[2]) * problem.stride[2] * problem.channels
        entries.append((problem.threads * round_up(row, PAGE) * problem.gradient_size, PAGE))
    block = (
        _narrow_block(problem.group_channels)
        if narrow
        else block_of(problem, problem.group_channels, problem.output_space, 1)
    )
    if problem.gradient_size < _FLOAT:
        pixels = share(width, problem.stride[2])
        entries.append((problem.threads * block * pixels * _FLOAT, PAGE))
    own = not problem.channels_last
    return Primitive(
        "brgconv_strided",
        problem.input_bytes(problem.channels) if own else 0,
        _weight(problem, problem.group_channels, problem.group_filters, block),
        problem.output_bytes(problem.filters) if own else 0,
        booked(*entries),
        channels_last=own,
    )


def _padded_result(problem: Problem, uneven_width: bool) -> int:
    """Bytes of the gradient of one image with what its padding leaves room for."""
    size = 1
    for result, extent, start, end, step in zip(
        problem.output,
        problem.extent,
        problem.padding,
        problem.end_padding,
        problem.stride,
        strict=True,
    ):
        before = max(0, extent - 1 - start) // step
        size *= result + before + max(0, extent - 1 - end) // step
    filters = _even(problem, problem.group_filters) if uneven_width else problem.group_filters
    return round_up(size * problem.groups * filters, PAGE) * problem.element_size
