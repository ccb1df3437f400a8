"""QR: factors, and the matrices that Householder reflectors stand for;
native/BatchLinearAlgebra.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.libraries import lapack
from pytest_torchmem.operators.linear_algebra.lapack_arguments import (
    column_major_clone,
    empty_column_major,
    is_column_major,
    work_array,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.structured import outputs

_aten: Any = torch.ops.aten
_geqrf = operator("aten::geqrf")


@_geqrf.meta()
def factors_and_tau(input: Tensor) -> tuple[Tensor, Tensor]:
    """geqrf_out_helper: columns first, as LAPACK has it."""
    factors = empty_column_major(input)
    return factors, input.new_empty((*input.shape[:-2], min(input.shape[-2:])))


@_geqrf.decomposition("cpu")
def geqrf(input: Tensor) -> tuple[Tensor, Tensor]:
    """geqrf_out_helper, apply_geqrf."""
    made = factors_and_tau(input)
    work_array(input, lapack.geqrf(*input.shape[-2:]))
    return made


@operator("aten::linalg_qr").decomposition("cpu")
def linalg_qr(A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_qr_out): in Q or R where either has the shape of the input."""
    Q, R = outputs(_aten.linalg_qr.default, A, mode)
    rows, columns = A.shape[-2:]
    with_q = mode != "r"
    tau = A.new_empty((*A.shape[:-2], min(rows, columns)))
    QR = R
    if with_q and Q.shape[-1] == columns:
        QR = Q
    elif R.shape[-2] != rows:
        QR = empty_column_major(A)
    QR.copy_(A)
    work_array(A, lapack.geqrf(rows, columns))
    if QR is not R:
        torch.triu(QR.narrow(-2, 0, R.shape[-2]), out=R)
    if with_q:
        work_array(A, lapack.orgqr(Q.shape[-1], min(rows, columns)))
    del tau
    return Q, R


@operator("aten::linalg_householder_product").decomposition("cpu")
def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """linalg_householder_product_out_helper, apply_orgqr."""
    result = empty_column_major(input)
    result.copy_(input)
    reflectors = tau.contiguous()
    if input.numel():
        work_array(input, lapack.orgqr(input.shape[-1], reflectors.shape[-1]))
    return result


@operator("aten::ormqr").decomposition("cpu")
def ormqr(input: Tensor, input2: Tensor, input3: Tensor, left: bool = True) -> Tensor:
    """ormqr_out_helper, apply_ormqr."""
    result = empty_column_major(input3)
    result.copy_(input3)
    if result.numel() == 0:
        return result
    factors = input if is_column_major(input) else column_major_clone(input)
    reflectors = input2.contiguous()
    work_array(input, lapack.ormqr(input3.shape[-1 if left else -2], reflectors.shape[-1]))
    del factors
    return result
