"""Layouts that ``meta`` does not keep."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.meta import run_structured


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
