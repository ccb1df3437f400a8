"""Pooling: arguments in the memory format that the kernels want.

CPU: native/AveragePool2d.cpp, AveragePool3d.cpp, AdaptiveAveragePooling.cpp, DilatedMaxPool2d.cpp,
DilatedMaxPool3d.cpp, AdaptiveMaxPooling2d.cpp and 3d, FractionalMaxPool2d.cpp and 3d,
MaxUnpooling.cpp; CUDA: the files of these names in native/cuda.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.formats import CONTIGUOUS, SUGGESTED, copied, made_like, shaped_by
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
