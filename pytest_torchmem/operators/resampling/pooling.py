"""Pooling and padding: arguments in the memory format that the kernels want.

CPU: native/AveragePool2d.cpp, AveragePool3d.cpp, AdaptiveAveragePooling.cpp, DilatedMaxPool2d.cpp,
DilatedMaxPool3d.cpp, AdaptiveMaxPooling2d.cpp and 3d, FractionalMaxPool2d.cpp and 3d,
MaxUnpooling.cpp; CUDA: the files of these names in native/cuda.

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

from pytest_torchmem.operators.calls import CompositeCall, GivenCall, meta_result
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

operator(*aten("avg_pool2d max_pool2d_with_indices max_pool3d_with_indices")).workspace(
    "cpu", "cuda"
)(copied(self=SUGGESTED))
operator("aten::_adaptive_avg_pool2d").workspace("cpu", "cuda")(copied(first=True, self=SUGGESTED))
operator(
    "aten::avg_pool3d", "aten::fractional_max_pool2d", "aten::fractional_max_pool3d"
).workspace("cpu", "cuda")(copied(self=CONTIGUOUS))
operator(
    "aten::avg_pool3d_backward",
    "aten::adaptive_max_pool3d_backward",
    "aten::fractional_max_pool2d_backward",
).workspace("cpu", "cuda")(copied(grad_output=CONTIGUOUS))
operator("aten::fractional_max_pool3d_backward").workspace("cpu")(copied(grad_output=CONTIGUOUS))
operator("aten::_adaptive_avg_pool3d").workspace("cuda")(copied(first=True, self=CONTIGUOUS))
operator("aten::adaptive_max_pool3d").workspace("cuda")(copied(self=CONTIGUOUS))

average2d_backward = operator("aten::avg_pool2d_backward")
average2d_backward.workspace("cpu")(copied(grad_output=SUGGESTED, outputs="grad_output"))
average2d_backward.workspace("cuda")(copied(self=SUGGESTED, grad_output="self"))

max2d_backward = operator("aten::max_pool2d_with_indices_backward")
max3d_backward = operator("aten::max_pool3d_with_indices_backward")
for _max_backward in (max2d_backward, max3d_backward):
    _max_backward.workspace("cpu")(
        copied(grad_output=SUGGESTED, indices="grad_output", outputs="grad_output")
    )
max2d_backward.workspace("cuda")(copied(self=SUGGESTED, grad_output="self", indices="self"))
max3d_backward.workspace("cuda")(copied(grad_output="self", indices="self"))

adaptive_average2d_backward = operator("aten::_adaptive_avg_pool2d_backward")
adaptive_average3d_backward = operator("aten::_adaptive_avg_pool3d_backward")
adaptive_average2d_backward.workspace("cpu")(copied(grad_output=SUGGESTED, outputs="grad_output"))
adaptive_average3d_backward.workspace("cpu")(copied(grad_output=CONTIGUOUS))


@adaptive_average2d_backward.workspace("cuda")
@adaptive_average3d_backward.workspace("cuda")
def adaptive_average_backward(grad_output: Tensor, input: Tensor) -> int:
    """A dense gradient, but for images with channels last, of which it is read as it lies."""
    last = suggested_format(input) == torch.channels_last
    return 0 if last else contiguous_copy(grad_output)


adaptive_max2d = operator("aten::adaptive_max_pool2d")
adaptive_max2d.workspace("cpu")(copied(self=SUGGESTED))


@adaptive_max2d.workspace("cuda")
def adaptive_max_copies(outputs: tuple[Tensor, Tensor], input: Tensor) -> tuple[int, ...]:
    """A dense input, and dense results before they are copied to where they belong.

    AdaptiveMaxPooling2d.cu, ``adaptive_max_pool2d_out_cuda``.
    """
    copy = contiguous_copy(input) if input.dim() == 4 else 0
    return (copy, *map(contiguous_copy, outputs))


adaptive_max2d_backward = operator("aten::adaptive_max_pool2d_backward")
adaptive_max2d_backward.workspace("cpu")(copied(grad_output="self", indices="self"))
adaptive_max2d_backward.workspace("cuda")(
    copied(grad_output=CONTIGUOUS, indices=CONTIGUOUS, outputs=CONTIGUOUS)
)

unpool2d = operator("aten::max_unpool2d")
unpool2d.meta("cpu")(shaped_by(torch.ops.aten.max_unpool2d.default, SUGGESTED))
unpool2d.meta("cuda")(shaped_by(torch.ops.aten.max_unpool2d.default, CONTIGUOUS))
unpool2d.workspace("cpu")(copied(self=SUGGESTED, indices="self"))
unpool2d.workspace("cuda")(copied(self=CONTIGUOUS, indices=CONTIGUOUS))
operator("aten::max_unpool3d").workspace("cpu", "cuda")(copied(self=CONTIGUOUS, indices=CONTIGUOUS))


operator("aten::fractional_max_pool3d_backward").meta()(made_like(self=CONTIGUOUS))


@operator("aten::max_pool1d").path("cuda")
def max_pool1d(call: CompositeCall) -> Any:
    """With indices, also where no gradient is needed; native/MaxPooling.cpp, max_pool1d."""
    return torch.ops.aten.max_pool1d_with_indices.default(*call.args, **call.kwargs)[0]


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
