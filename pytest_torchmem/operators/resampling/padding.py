"""Padding by reflection and replication.

native/ReflectionPad.cpp, ReplicationPadding.cpp and cpu/PaddingKernel.cpp keep the memory format of
the input; native/cuda/ReflectionPad.cu and ReplicationPadding.cu make contiguous outputs.

Patches of images as columns, and pixels as channels and back.

native/Im2Col.cpp, native/Col2Im.cpp, and as well cuda/*.cu; native/PixelShuffle.cpp,
ChanelShuffle.cpp: the CPU has kernels that keep the memory format of the input; CUDA reshapes and
permutes (``math_pixel_shuffle``, ``math_channel_shuffle``), and the output is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall, meta_result
from pytest_torchmem.operators.formats import (
    CONTIGUOUS,
    SUGGESTED,
    copied,
    dense_copy,
    made_like,
    shaped_by,
)
from pytest_torchmem.operators.geometry import contiguous_copy, suggested_format
from pytest_torchmem.operators.registry import aten, operator

_aten: Any = torch.ops.aten

lines = operator("aten::reflection_pad1d", "aten::replication_pad1d")
images = operator("aten::reflection_pad2d", "aten::replication_pad2d")
volumes = operator("aten::reflection_pad3d", "aten::replication_pad3d")
lines_backward = operator("aten::reflection_pad1d_backward", "aten::replication_pad1d_backward")
_PADS = "reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d"
backward = operator(*aten(_PADS, "_backward"))

for _name in _PADS.split():
    _overload = getattr(_aten, _name).default
    operator(f"aten::{_name}").meta("cpu")(shaped_by(_overload, SUGGESTED))
    operator(f"aten::{_name}").meta("cuda")(shaped_by(_overload, CONTIGUOUS))

lines.workspace("cpu")(copied(self=CONTIGUOUS))
images.workspace("cpu")(copied(self=SUGGESTED))
lines_backward.workspace("cpu")(copied(grad_output=CONTIGUOUS))
backward.workspace("cpu")(copied(grad_output=SUGGESTED, outputs="grad_output"))
# ``zeros_like(input, input.suggest_memory_format())``; native/ReflectionPad.cpp, …
backward.meta("cpu")(made_like(self=SUGGESTED))
backward.meta("cuda")(made_like(self=CONTIGUOUS))
for _dimensions in (1, 2, 3):
    _reflection = f"aten::reflection_pad{_dimensions}d"
    operator(_reflection).workspace("cuda")(copied(self=CONTIGUOUS))
    if _dimensions < 3:  # the gradient of volumes is read where it lies
        operator(f"{_reflection}_backward").workspace("cuda")(copied(grad_output=CONTIGUOUS))


@volumes.workspace("cpu")
def volume_copies(outputs: Tensor, input: Tensor) -> int:
    """Volumes in their own format, one alone contiguous; native/cpu/PaddingKernel.cpp."""
    if input.dim() == 5:
        return dense_copy(input, suggested_format(input))
    return contiguous_copy(input) + contiguous_copy(outputs)


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
