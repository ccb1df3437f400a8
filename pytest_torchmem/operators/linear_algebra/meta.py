"""Factorisations."""

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


@operator("aten::_compute_linear_combination").meta()
def compute_linear_combination(input: Tensor, coefficients: Tensor) -> Tensor:
    """native/LinearAlgebra.cpp."""
    return like(input, (coefficients.shape[0], *input.shape[1:]))
