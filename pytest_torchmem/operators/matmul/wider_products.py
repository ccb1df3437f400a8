"""Products with a result of another type than their operands (``torch.mm(..., out_dtype=)``).

native/cuda/Blas.cpp, ``_mm_dtype_cuda``, ``_bmm_dtype_cuda``, ``_addmm_dtype_cuda`` and
``_baddbmm_dtype_cuda``: cuBLAS adds up in float32 and does not round. The CPU has no such kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


@operator("aten::addmm.dtype", "aten::baddbmm.dtype").values("cuda")
def added_product(arguments: Mapping[str, Any]) -> Tensor:
    """The product and what is added to it."""
    names = ("mat1", "mat2") if "mat1" in arguments else ("batch1", "batch2")
    first, second = (arguments[name] for name in names)
    found: Tensor = product(first, second, arguments["out_dtype"]) * arguments.get("alpha", 1)
    beta = arguments.get("beta", 1)
    return found if beta == 0 else found + arguments["self"].to(found.dtype) * beta


@operator("aten::addmm.dtype_out", "aten::baddbmm.dtype_out").values("cuda")
def added_product_into(arguments: Mapping[str, Any], out: Tensor) -> Tensor:
    """As ``added_product``."""
    return out.copy_(added_product(arguments))


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
