"""Layouts that ``meta`` does not keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import suggested_format
from pytest_torchmem.operators.meta_functions import MetaFunction, laid_out, like, meta
from pytest_torchmem.torch_private.meta import run_structured


def _in_suggested_format(operator: Any) -> MetaFunction:
    def keep(input: Tensor, *arguments: Any, **options: Any) -> Any:
        result = operator(input, *arguments, **options)
        if input.dim() == result.dim():
            return laid_out(result, suggested_format(input))
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
    meta(f"aten::{_name}")(_in_suggested_format(getattr(torch.ops.aten, _name).default))


@meta(
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
)
def padding_backward(grad_output: Tensor, input: Tensor, padding: Sequence[int]) -> Tensor:
    """``zeros_like(input, input.suggest_memory_format())``; native/ReflectionPad.cpp, …"""
    return laid_out(input, suggested_format(input))


@meta("aten::hardswish_backward", "aten::mish_backward", "aten::native_dropout_backward")
def of_two_operands(first: Tensor, second: Tensor, *settings: Any) -> Tensor:
    """A TensorIterator of both: where they disagree, the first decides; native/Activation.cpp,
    native/Dropout.cpp.
    """
    result: Tensor = run_structured(torch.ops.aten.add.Tensor, first, second)
    return result


@meta("aten::glu_backward")
def glu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    """Contiguous; native/GatedLinearUnit.cpp, glu_backward_cpu."""
    return like(input)


@meta("aten::nonzero_static")
def nonzero_static(input: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Rows of indices; native/TensorAdvancedIndexing.cpp, nonzero_static_cpu."""
    return input.new_empty((size, input.dim()), dtype=torch.int64)


@meta("aten::fractional_max_pool3d_backward")
def fractional_max_pool3d_backward(grad_output: Tensor, input: Tensor, *rest: Any) -> Tensor:
    """native/FractionalMaxPool3d.cpp."""
    return like(input)
