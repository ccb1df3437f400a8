"""Patches of images as columns, and pixels as channels and back.

native/Im2Col.cpp, native/Col2Im.cpp, and as well cuda/*.cu; native/PixelShuffle.cpp,
ChanelShuffle.cpp: the CPU has kernels that keep the memory format of the input; CUDA reshapes and
permutes (``math_pixel_shuffle``, ``math_channel_shuffle``), and the output is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.formats import CONTIGUOUS, SUGGESTED, copied, shaped_by
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.structured import meta_result

_aten: Any = torch.ops.aten


def _resized(operator: Any, input: Tensor, *arguments: Any) -> Tensor:
    """A tensor like the input, then as large as the output: the larger storage stays."""
    result = torch.empty_like(input, memory_format=torch.contiguous_format)
    dense = input.contiguous()
    result.resize_(meta_result(operator, input, *arguments).shape)
    del dense
    return result


@operator("aten::im2col").decomposition()
def im2col(
    self: Tensor,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """im2col_cpu, im2col_out_cpu_template."""
    return _resized(_aten.im2col.default, self, kernel_size, dilation, padding, stride)


@operator("aten::col2im").decomposition()
def col2im(
    self: Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """col2im_cpu, col2im_out_cpu_template."""
    return _resized(_aten.col2im.default, self, output_size, kernel_size, dilation, padding, stride)


@operator("aten::unfold_backward").workspace()
def unfold_backward(input_sizes: Sequence[int], dim: int, size: int, step: int) -> int:
    """An index of every position along the dimension where windows overlap;
    native/UnfoldBackward.h.
    """
    if step >= size:
        return 0
    return torch.int64.itemsize * (input_sizes[dim] if input_sizes else 1)


for _overload in (
    torch.ops.aten.channel_shuffle.default,
    torch.ops.aten.pixel_shuffle.default,
    torch.ops.aten.pixel_unshuffle.default,
):
    _shuffle = operator(_overload.name())
    _shuffle.meta("cpu")(shaped_by(_overload, SUGGESTED))
    _shuffle.meta("cuda")(shaped_by(_overload, CONTIGUOUS))
    _shuffle.workspace("cpu")(copied(self=SUGGESTED))
