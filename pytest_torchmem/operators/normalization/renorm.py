"""Norms that are bounded; native/Normalization.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.structured import outputs

_aten: Any = torch.ops.aten


@operator("aten::renorm").decomposition("cpu")
def renorm(self: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """TORCH_IMPL_FUNC(renorm_out): the norms of 16-bit types in float, their factors in the type
    itself.
    """
    result: Tensor = outputs(_aten.renorm.default, self, p, dim, maxnorm)
    others = [axis for axis in range(self.dim()) if axis != dim % self.dim()]
    half = self.dtype in (torch.float16, torch.bfloat16)
    norms = torch.linalg.vector_norm(
        self, p, others, keepdim=True, dtype=torch.float32 if half else None
    )
    factors = norms
    if norms.dtype != self.dtype:
        factors = self.new_empty(norms.shape)
        converted = torch.empty_like(norms)  # TensorIterator computes in the common type
        del converted
    torch.mul(self, factors, out=result)
    return result
