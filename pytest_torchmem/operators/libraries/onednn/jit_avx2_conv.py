"""Direct convolutions of AVX2 in float32, ``jit:avx2``, in blocks of 8 channels: on AVX512 machines
they take what the kernels of AVX512 refuse, few channels;
src/cpu/x64/jit_avx2_conv_kernel_f32.cpp.
"""

from pytest_torchmem.operators.libraries.onednn.problem import (
    Primitive,
    Problem,
    blocks_of,
    input_row_fits,
    input_row_pixels,
    reduction,
)
from pytest_torchmem.operators.workspace import FLOAT, Entry

_VECTOR = 8
_REGISTERS = 15
_REDUCTION_ROOM = 1 << 21


def forward(problem: Problem) -> Primitive | None:
    """Groups of fewer than 8 channels are taken as they are."""
    padded = problem.padding[1] or problem.padding[2]
    long = problem.kernel[2] > 7 and padded and problem.stride[1:] != (1, 1)
    if problem.padding[2] > min(3, problem.output[2]) or long:
        return None
    if problem.bfloat16 or problem.misses_input:
        return None
    blocks = blocks_of(problem, problem.group_channels < _VECTOR, _VECTOR)
    return blocks.primitive(blocks.padded_bias) if blocks is not None else None


def backward_weights(problem: Problem) -> Primitive | None:
    """Threads that share a batch sum into buffers of their own."""
    if problem.bfloat16 or problem.dilated or problem.kernel[2] >= 14 or not _is_within(problem):
        return None
    blocks = blocks_of(problem, problem.group_channels == 3, _VECTOR)
    if blocks is None:
        return None
    filter_blocks = problem.groups * blocks.filter_blocks
    block = blocks.weight // (filter_blocks * blocks.channel_blocks)
    rows = problem.batch * problem.output[0]
    jobs = [(block, filter_blocks * blocks.channel_blocks, rows)]
    entries: list[Entry] = []
    if problem.bias:
        if problem.group_filters % _VECTOR:
            entries.append(blocks.padded_filters * FLOAT)
        jobs.append((_VECTOR, filter_blocks, problem.batch))
    for job_size, number, images in jobs:
        entries += reduction(problem.threads, job_size, number, images, _REDUCTION_ROOM)
    return blocks.primitive(*entries)


def _is_within(problem: Problem) -> bool:
    (depth, *across), extent = problem.padding, problem.extent
    return (
        depth == 0
        and all(most < size for most, size in zip(across, extent[1:], strict=True))
        and problem.kernel[0] <= problem.input[0]
        and problem.kernel[1] <= problem.input[1]
    )


def backward_data(problem: Problem) -> Primitive | None:
    """As the forward, without copies of a bias."""
    depth, height, width = problem.stride
    if problem.bfloat16 or problem.misses_input or problem.moves_gaps():
        return None
    if depth != 1 or width != height:
        return None
    if problem.group_channels < _VECTOR and problem.kernel[2] > 3 and width > 1:
        return None
    blocks = blocks_of(problem, first=False, block=_VECTOR)
    pixels = input_row_pixels(blocks, _REGISTERS) if blocks is not None else 0
    if blocks is None or not pixels or not input_row_fits(problem, pixels):
        return None
    return blocks.primitive()
