"""Eigenvalues and singular values; native/BatchLinearAlgebra.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.libraries import lapack
from pytest_torchmem.operators.linear_algebra.lapack_arguments import (
    any_error,
    column_major_clone,
    empty_column_major,
    infos_of,
    work_array,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.structured import outputs

_aten: Any = torch.ops.aten


@operator("aten::_linalg_eigh").decomposition("cpu")
def linalg_eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_eigh_out), apply_lapack_eigh: in the eigenvectors' place, or on a
    copy.
    """
    values, vectors = outputs(_aten._linalg_eigh.default, A, UPLO, compute_v)
    if A.numel() == 0:
        return values, vectors
    copied = vectors.copy_(A) if compute_v else column_major_clone(A)
    infos = torch.zeros(A.shape[:-2], dtype=torch.int32)
    elements, integers = lapack.syevd(A.shape[-1], compute_v)
    work, integer_work = work_array(A, elements), torch.empty((integers,), dtype=torch.int32)
    del work, integer_work
    any_error(infos)
    del copied
    return values, vectors


@operator("aten::linalg_eig").decomposition("cpu")
def linalg_eig(input: Tensor) -> tuple[Tensor, Tensor]:
    """linalg_eig_out, linalg_eig_out_info: eigenvectors first as they come, real or complex."""
    torch.all(torch.isfinite(input))
    infos = infos_of(input)
    complex_type = input.dtype if input.is_complex() else (input.real.dtype.to_complex())
    vectors = empty_column_major(input, complex_type)
    values = input.new_empty(input.shape[:-1], dtype=complex_type)
    if input.is_complex():
        written = column_major_clone(input)
        del written
        any_error(infos)
        return values, vectors
    parts = input.new_empty((*input.shape[:-2], 2 * input.shape[-1]))
    real_vectors = empty_column_major(input)
    written = column_major_clone(input)
    if input.numel():
        work_array(input, lapack.geev(input.shape[-1]))
    del written
    torch.all(parts.narrow(-1, input.shape[-1], input.shape[-1]) == 0)
    del real_vectors, parts
    any_error(infos)
    return values, vectors


@operator("aten::_linalg_svd").decomposition("cpu")
def linalg_svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_svd_out): a copy that is destroyed; LAPACK's work is in vectors that
    torch's allocator does not see.
    """
    U, S, Vh = outputs(_aten._linalg_svd.default, A, full_matrices, compute_uv, driver=driver)
    if A.numel():
        infos = torch.zeros(A.shape[:-2], dtype=torch.int32)
        copied = column_major_clone(A)
        del copied
        any_error(infos)
    return U, S, Vh
