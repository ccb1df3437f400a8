"""Products with a result of another type than their operands (``torch.mm(..., out_dtype=)``).

native/cuda/Blas.cpp, ``_mm_dtype_cuda``, ``_bmm_dtype_cuda``, ``_addmm_dtype_cuda`` and
``_baddbmm_dtype_cuda``: cuBLAS adds up in float32 and does not round. The CPU has no such kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator


@operator("aten::mm.dtype", "aten::bmm.dtype").values("cuda")
def product(input: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product, of operands in the type of the result."""
    return input.to(out_dtype) @ mat2.to(out_dtype)


@operator("aten::mm.dtype_out", "aten::bmm.dtype_out").values("cuda")
def product_into(input: Tensor, mat2: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    """As ``product``."""
    return out.copy_(product(input, mat2, out_dtype))


@operator("aten::addmm.dtype").values("cuda")
def added_product(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """The product and what is added to it."""
    return _sum(input, product(mat1, mat2, out_dtype), beta, alpha)


@operator("aten::addmm.dtype_out").values("cuda")
def added_product_into(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    """As ``added_product``."""
    return out.copy_(_sum(input, product(mat1, mat2, out_dtype), beta, alpha))


@operator("aten::baddbmm.dtype").values("cuda")
def added_products(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """The products and what is added to them."""
    return _sum(input, product(batch1, batch2, out_dtype), beta, alpha)


@operator("aten::baddbmm.dtype_out").values("cuda")
def added_products_into(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    """As ``added_products``."""
    return out.copy_(_sum(input, product(batch1, batch2, out_dtype), beta, alpha))


@operator("aten::baddbmm.dtype").meta()
def added_products_geometry(batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A matrix for each pair; torch's own decomposition of every overload takes the type for
    ``beta`` (torch/_decomp/decompositions.py, ``baddbmm``).
    """
    return batch1.new_empty(batch1.shape[0], batch1.shape[1], batch2.shape[2], dtype=out_dtype)


@operator("aten::baddbmm.dtype_out").meta()
def given_for_products(batch1: Tensor, batch2: Tensor, out: Tensor) -> Tensor:
    """What is given, in their shape."""
    return out.resize_(batch1.shape[0], batch1.shape[1], batch2.shape[2])


def _sum(input: Tensor, found: Tensor, beta: float, alpha: float) -> Tensor:
    found = found * alpha
    return found if beta == 0 else found + input.to(found.dtype) * beta
