"""Patches of images as columns, and pixels as channels and back.

native/Im2Col.cpp, native/Col2Im.cpp, and as well cuda/*.cu; native/PixelShuffle.cpp,
ChanelShuffle.cpp: the CPU has kernels that keep the memory format of the input; CUDA reshapes and
permutes (``math_pixel_shuffle``, ``math_channel_shuffle``), and the output is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.formats import CONTIGUOUS, SUGGESTED, copied, shaped_by
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.structured import meta_result


@operator("aten::im2col", "aten::col2im").decomposition()
def resized(call: GivenCall, self: Tensor) -> Tensor:
    """A tensor like the input, then as large as the output: the larger storage stays;
    im2col_out_cpu_template, col2im_out_cpu_template.
    """
    result = torch.empty_like(self, memory_format=torch.contiguous_format)
    dense = self.contiguous()
    result.resize_(meta_result(call.overload, *call.args, **call.kwargs).shape)
    del dense
    return result


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
