"""Layouts that ``meta`` does not keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import laid_out, like, suggested_format
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.meta import run_structured


def _in_suggested_format(overload: Any) -> Callable[..., Any]:
    def keep(arguments: Mapping[str, Any]) -> Any:
        first, result = next(iter(arguments.values())), overload(**arguments)
        if first.dim() == result.dim():
            return laid_out(result, suggested_format(first))
        return result

    keep.__doc__ = "The shape that meta gives, in the layout that the input suggests."
    return keep


for _name in (
    "channel_shuffle",
    "pixel_shuffle",
    "pixel_unshuffle",
    "max_unpool2d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad2d",
    "replication_pad3d",
):
    operator(f"aten::{_name}").meta()(_in_suggested_format(getattr(torch.ops.aten, _name).default))


@operator(
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
).meta()
def padding_backward(input: Tensor) -> Tensor:
    """``zeros_like(input, input.suggest_memory_format())``; native/ReflectionPad.cpp, …"""
    return laid_out(input, suggested_format(input))


@operator("aten::hardswish_backward", "aten::mish_backward", "aten::native_dropout_backward").meta()
def of_two_operands(tensors: list[Tensor]) -> Tensor:
    """A TensorIterator of both: where they disagree, the first decides; native/Activation.cpp,
    native/Dropout.cpp.
    """
    result: Tensor = run_structured(torch.ops.aten.add.Tensor, *tensors)
    return result


@operator("aten::glu_backward").meta()
def glu_backward(input: Tensor) -> Tensor:
    """Contiguous; native/GatedLinearUnit.cpp, glu_backward_cpu."""
    return like(input)


@operator("aten::nonzero_static").meta()
def nonzero_static(input: Tensor, *, size: int) -> Tensor:
    """Rows of indices; native/TensorAdvancedIndexing.cpp, nonzero_static_cpu."""
    return input.new_empty((size, input.dim()), dtype=torch.int64)


@operator("aten::fractional_max_pool3d_backward").meta()
def fractional_max_pool3d_backward(input: Tensor) -> Tensor:
    """native/FractionalMaxPool3d.cpp."""
    return like(input)
