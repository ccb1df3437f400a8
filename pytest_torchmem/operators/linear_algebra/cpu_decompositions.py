"""Factorisations and solvers; native/BatchLinearAlgebra.cpp, native/LinearAlgebra.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.libraries import lapack
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.structured import empty_as, meta_result, outputs, proxy

_aten: Any = torch.ops.aten


def column_major_clone(matrices: Tensor) -> Tensor:
    """``cloneBatchedColumnMajor``; native/LinearAlgebraUtils.h."""
    return matrices.mT.clone(memory_format=torch.contiguous_format).mT


def _is_column_major(matrices: Tensor) -> bool:
    return matrices.mT.is_contiguous()


def _work(like: Tensor, elements: int) -> Tensor:
    return like.new_empty((elements,))


def _batch(matrices: Tensor) -> int:
    return matrices.shape[:-2].numel()


def _infos(matrices: Tensor) -> Tensor:
    """What LAPACK says of every matrix of a batch."""
    return torch.zeros((max(1, _batch(matrices)),), dtype=torch.int32)


def _check_errors(infos: Tensor) -> None:
    """_linalg_check_errors: ``info.any()``."""
    torch.any(infos)


# -- LU ------------------------------------------------------------------------------------------


def _lu_factor_out(LU: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """linalg_lu_factor_ex_out into ``LU``; pivots and infos come back."""
    geometry = meta_result(_aten.linalg_lu_factor_ex.default, A)
    written = proxy(LU, geometry[0])
    pivots, infos = empty_as(geometry[1]), empty_as(geometry[2])
    written.copy_(A)
    return pivots, infos


def _permutation(pivots: Tensor, rows: int) -> None:
    """lu_unpack_out: permutations in numbers, from which the matrices are made."""
    batch = pivots.shape[:-1]
    torch.arange(rows).expand(*batch, rows).contiguous()


def _unpack(LU: Tensor, pivots: Tensor, L: Tensor, U: Tensor) -> None:
    rows, columns = LU.shape[-2:]
    if rows > columns:
        torch.triu(LU.narrow(-2, 0, columns), out=U)
        torch.tril(LU, -1, out=L)
    else:
        torch.tril(LU if rows == columns else LU.narrow(-1, 0, rows), -1, out=L)
        torch.triu(LU, out=U)


@operator("aten::lu_unpack").decomposition("cpu")
def lu_unpack(
    LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(lu_unpack_out)."""
    P, L, U = outputs(_aten.lu_unpack.default, LU_data, LU_pivots, unpack_data, unpack_pivots)
    if unpack_data:
        _unpack(LU_data, LU_pivots, L, U)
    if unpack_pivots:
        _permutation(LU_pivots, LU_data.shape[-2])
    return P, L, U


@operator("aten::linalg_lu").decomposition("cpu")
def linalg_lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_lu_out): factors into the larger of L and U, unpacked in place."""
    P, L, U = outputs(_aten.linalg_lu.default, A, pivot=pivot)
    LU = L if A.shape[-2] > A.shape[-1] else U
    factored = _lu_factor_out(LU, A)
    if pivot:
        _permutation(factored[0], A.shape[-2])
    del factored
    return P, L, U


def _determinant_of_permutation(pivots: Tensor) -> Tensor:
    """``lu_det_P``."""
    counted = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)
    moved = counted != pivots
    return moved.sum(-1, dtype=torch.int64).fmod_(2).mul_(-2).add_(1)


def _infos_of_lu(A: Tensor) -> Tensor:
    return torch.empty(A.shape[:-2], dtype=torch.int32)


@operator("aten::_linalg_det").decomposition("cpu")
def linalg_det(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_det_out)."""
    result, LU, pivots = outputs(_aten._linalg_det.default, A)
    infos = _infos_of_lu(A)
    product = torch.prod(LU.diagonal(0, -2, -1), -1)
    torch.mul(_determinant_of_permutation(pivots), product, out=result)
    del infos
    return result, LU, pivots


@operator("aten::_linalg_slogdet").decomposition("cpu")
def linalg_slogdet(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_slogdet_out)."""
    sign, logarithm, LU, pivots = outputs(_aten._linalg_slogdet.default, A)
    infos = _infos_of_lu(A)
    diagonal = LU.diagonal(0, -2, -1)
    permutation = _determinant_of_permutation(pivots)
    torch.mul(diagonal.sgn().prod(-1), permutation, out=sign)
    del permutation
    torch.sum(diagonal.abs().log_(), -1, out=logarithm)
    del infos
    return sign, logarithm, LU, pivots


def _lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, result: Tensor, left: bool) -> None:
    """linalg_lu_solve_out and lu_solve_kernel, which checks that pivots are rows."""
    if result.numel() == 0:
        return
    geometry = meta_result(_aten.linalg_lu_solve.default, LU, pivots, B, left=left)
    written = proxy(result, geometry)
    pivots_ = pivots.contiguous()
    LU_ = LU if _is_column_major(LU) else column_major_clone(LU)
    torch.all(pivots_ > 0)
    torch.all(pivots_ <= LU_.shape[-2])
    del written


@operator("aten::linalg_lu_solve").decomposition("cpu")
def linalg_lu_solve(
    LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    """TORCH_IMPL_FUNC(linalg_lu_solve_out)."""
    result: Tensor = outputs(
        _aten.linalg_lu_solve.default, LU, pivots, B, left=left, adjoint=adjoint
    )
    _lu_solve(LU, pivots, B, result, left)
    return result


@operator("aten::_linalg_solve_ex").decomposition("cpu")
def linalg_solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_solve_ex_out)."""
    result, LU, pivots, infos = outputs(
        _aten._linalg_solve_ex.default, A, B, left=left, check_errors=check_errors
    )
    LU.copy_(A.mT if A.is_contiguous() and not A.is_complex() else A)
    if check_errors:
        _check_errors(infos)
    vector = result.dim() == A.dim() - 1
    columns = result.unsqueeze(-1) if vector else result
    _lu_solve(LU, pivots, B.unsqueeze(-1) if vector else B, columns, left)
    return result, LU, pivots, infos


@operator("aten::linalg_inv_ex").decomposition("cpu")
def linalg_inv_ex(A: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_inv_ex_out): the identity solved for."""
    result, infos = outputs(_aten.linalg_inv_ex.default, A, check_errors=check_errors)
    _, LU, pivots, _ = meta_result(_aten._linalg_solve_ex.default, A, result)
    LU, pivots = empty_as(LU), empty_as(pivots)
    _lu_solve(LU, pivots, result, result, True)
    del LU, pivots
    if check_errors:
        _check_errors(infos)
    return result, infos


# -- Cholesky ------------------------------------------------------------------------------------


@operator("aten::_cholesky_solve_helper").decomposition("cpu")
def cholesky_solve(self: Tensor, A: Tensor) -> Tensor:
    """_cholesky_solve_helper_cpu: copies of both sides."""
    result = column_major_clone(self)
    factors = column_major_clone(A)
    infos = torch.zeros((_batch(self),), dtype=torch.int32)
    _check_errors(infos)
    del factors
    return result


# -- QR ------------------------------------------------------------------------------------------


@operator("aten::geqrf").decomposition("cpu")
def geqrf(input: Tensor) -> tuple[Tensor, Tensor]:
    """geqrf_out_helper, apply_geqrf."""
    factors = torch.empty_like(input.mT, memory_format=torch.contiguous_format).mT
    tau = input.new_empty((*input.shape[:-2], min(input.shape[-2:])))
    _work(input, lapack.geqrf(*input.shape[-2:]))
    return factors, tau


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
        QR = torch.empty_like(A.mT, memory_format=torch.contiguous_format).mT
    QR.copy_(A)
    _work(A, lapack.geqrf(rows, columns))
    if QR is not R:
        torch.triu(QR.narrow(-2, 0, R.shape[-2]), out=R)
    if with_q:
        _work(A, lapack.orgqr(Q.shape[-1], min(rows, columns)))
    del tau
    return Q, R


@operator("aten::linalg_householder_product").decomposition("cpu")
def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """linalg_householder_product_out_helper, apply_orgqr."""
    result = torch.empty_like(input.mT, memory_format=torch.contiguous_format).mT
    result.copy_(input)
    reflectors = tau.contiguous()
    if input.numel():
        _work(input, lapack.orgqr(input.shape[-1], reflectors.shape[-1]))
    return result


@operator("aten::ormqr").decomposition("cpu")
def ormqr(input: Tensor, input2: Tensor, input3: Tensor, left: bool = True) -> Tensor:
    """ormqr_out_helper, apply_ormqr."""
    result = torch.empty_like(input3.mT, memory_format=torch.contiguous_format).mT
    result.copy_(input3)
    if result.numel() == 0:
        return result
    factors = input if _is_column_major(input) else column_major_clone(input)
    reflectors = input2.contiguous()
    _work(input, lapack.ormqr(input3.shape[-1 if left else -2], reflectors.shape[-1]))
    del factors
    return result


# -- eigenvalues and singular values -------------------------------------------------------------


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
    work, integer_work = _work(A, elements), torch.empty((integers,), dtype=torch.int32)
    del work, integer_work
    _check_errors(infos)
    del copied
    return values, vectors


@operator("aten::linalg_eig").decomposition("cpu")
def linalg_eig(input: Tensor) -> tuple[Tensor, Tensor]:
    """linalg_eig_out, linalg_eig_out_info: eigenvectors first as they come, real or complex."""
    torch.all(torch.isfinite(input))
    infos = _infos(input)
    complex_type = input.dtype if input.is_complex() else (input.real.dtype.to_complex())
    vectors = torch.empty_like(
        input.mT, dtype=complex_type, memory_format=torch.contiguous_format
    ).mT
    values = input.new_empty(input.shape[:-1], dtype=complex_type)
    if input.is_complex():
        written = column_major_clone(input)
        del written
        _check_errors(infos)
        return values, vectors
    parts = input.new_empty((*input.shape[:-2], 2 * input.shape[-1]))
    real_vectors = torch.empty_like(input.mT, memory_format=torch.contiguous_format).mT
    written = column_major_clone(input)
    if input.numel():
        _work(input, lapack.geev(input.shape[-1]))
    del written
    torch.all(parts.narrow(-1, input.shape[-1], input.shape[-1]) == 0)
    del real_vectors, parts
    _check_errors(infos)
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
        _check_errors(infos)
    return U, S, Vh


# -- least squares -------------------------------------------------------------------------------


@operator("aten::linalg_lstsq").decomposition("cpu")
def linalg_lstsq(
    self: Tensor, b: Tensor, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """linalg_lstsq_out, linalg_lstsq_out_info, apply_lstsq: the solution has room for the right
    side; driver by driver, LAPACK's work.
    """
    driver = driver or "gelsy"
    rows, columns = self.shape[-2:]
    vector = b.dim() == 1 or (b.dim() == self.dim() - 1 and b.shape == self.shape[:-1])
    sides = 1 if vector else b.shape[-1]
    other = b.unsqueeze(-1) if vector else b
    batch = torch.broadcast_shapes(self.shape[:-2], other.shape[:-2])
    infos = _infos(self)
    solution = self.new_empty((*batch, sides, max(rows, columns))).mT
    with_rank = driver != "gels"
    rank = torch.empty(self.shape[:-2] if with_rank else (0,), dtype=torch.int64)
    with_values = driver in ("gelsd", "gelss")
    values = self.new_empty((*self.shape[:-2], min(rows, columns)) if with_values else (0,))
    copied = column_major_clone(self)
    if self.numel() and other.numel():
        _least_squares_work(copied, sides, driver, batch)
    residuals = self.new_empty((0,))
    if rows > columns and driver != "gelsy":
        solved = torch.all(infos == 0) if not with_rank else torch.all(rank == columns)
        del solved
        residuals = solution.narrow(-2, columns, rows - columns).pow_(2).sum(-2)
    del copied
    _check_errors(infos)
    result = solution.narrow(-2, 0, columns)
    return result.squeeze(-1) if vector else result, residuals, rank, values


def _least_squares_work(matrices: Tensor, sides: int, driver: str, batch: torch.Size) -> None:
    """apply_lstsq; the indices of every pair of matrices of the two batches; batch_iterator_with_
    broadcasting in native/LinearAlgebraUtils.h.
    """
    rows, columns = matrices.shape[-2:]
    kept: list[Tensor] = []
    if driver == "gels":
        kept.append(_work(matrices, lapack.gels(rows, columns, sides)))
    elif driver == "gelsy":
        kept.append(torch.empty((columns,), dtype=torch.int32))
        kept.append(_work(matrices, lapack.gelsy(rows, columns, sides)))
    elif driver == "gelss":
        kept.append(_work(matrices, lapack.gelss(rows, columns, sides)))
    else:
        elements, integers = lapack.gelsd(rows, columns, sides)
        kept.append(_work(matrices, elements))
        kept.append(torch.empty((integers,), dtype=torch.int32))
    pairs = torch.arange(_batch(matrices)), torch.arange(batch.numel())
    del pairs
