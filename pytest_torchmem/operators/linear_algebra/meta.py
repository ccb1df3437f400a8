"""Products, factorisations and attention's projections."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.registry import operator


@operator("aten::geqrf").meta()
def geqrf(input: Tensor) -> tuple[Tensor, Tensor]:
    """Columns first, as LAPACK has it; native/BatchLinearAlgebra.cpp."""
    factors = torch.empty_like(input.mT, memory_format=torch.contiguous_format).mT
    return factors, like(input, (*input.shape[:-2], min(input.shape[-2:])))


@operator("aten::_transform_bias_rescale_qkv").meta()
def transform_bias_rescale_qkv(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Three views of one tensor; native/transformers/attention.cpp."""
    batch, length = qkv.shape[:2]
    width = qkv.shape[2] // 3
    whole = like(qkv, (3, batch, num_heads, length, width // num_heads))
    return whole[0], whole[1], whole[2]


@operator("aten::_compute_linear_combination").meta()
def compute_linear_combination(input: Tensor, coefficients: Tensor) -> Tensor:
    """native/LinearAlgebra.cpp."""
    return like(input, (coefficients.shape[0], *input.shape[1:]))
