"""LU: factors, determinants, systems of equations and inverses; native/BatchLinearAlgebra.cpp,
native/LinearAlgebra.cpp.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall, empty_as, meta_result, outputs, proxy
from pytest_torchmem.operators.linear_algebra import cusolver
from pytest_torchmem.operators.linear_algebra.cusolver import (
    any_error,
    column_major_clone,
    is_column_major,
)
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_aten: Any = torch.ops.aten

# Whether a factorisation succeeded decides nothing here.
operator("aten::_linalg_check_errors", kind=OperatorKind.PASS).decomposition()(any_error)


class Solver(NamedTuple):
    """LU factors, and systems solved by them: LAPACK's on the CPU, or what a GPU has."""

    machine: Host | Gpu
    take: Callable[[Any], None]
    call: GivenCall

    def factor(self, LU: Tensor, pivot: bool = True) -> None:
        """``lu_factor_stub``; LAPACK works in place."""
        if isinstance(self.machine, Gpu):
            self.take(cusolver.lu_factor(self.machine, LU, pivot))

    def factor_into(self, LU: Tensor, A: Tensor, pivot: bool) -> tuple[Tensor, Tensor]:
        """linalg_lu_factor_ex_out into ``LU``; pivots and infos come back."""
        geometry = meta_result(_aten.linalg_lu_factor_ex.default, A)
        written = proxy(LU, geometry[0])
        pivots, infos = empty_as(geometry[1]), empty_as(geometry[2])
        written.copy_(A)
        self.factor(written, pivot)
        if written is not LU:
            LU.copy_(written)
        return pivots, infos

    def solve(self, LU: Tensor, pivots: Tensor, B: Tensor, result: Tensor, left: bool) -> None:
        """linalg_lu_solve_out and lu_solve_kernel, which on the CPU checks that pivots are rows."""
        if result.numel() == 0:
            return
        geometry = meta_result(_aten.linalg_lu_solve.default, LU, pivots, B, left=left)
        written = proxy(result, geometry)
        if isinstance(self.machine, Gpu):
            self.take(cusolver.lu_solve(self.machine, LU, pivots, B, left))
            return
        pivots_ = pivots.contiguous()
        LU_ = LU if is_column_major(LU) else column_major_clone(LU)
        torch.all(pivots_ > 0)
        torch.all(pivots_ <= LU_.shape[-2])
        del written


def _permutation(pivots: Tensor, rows: int) -> None:
    """lu_unpack_out: permutations in numbers, from which the matrices are made."""
    batch = pivots.shape[:-1]
    torch.arange(rows).expand(*batch, rows).contiguous()


def _unpack(LU: Tensor, L: Tensor, U: Tensor) -> None:
    rows, columns = LU.shape[-2:]
    if rows > columns:
        torch.triu(LU.narrow(-2, 0, columns), out=U)
        torch.tril(LU, -1, out=L)
    else:
        torch.tril(LU if rows == columns else LU.narrow(-1, 0, rows), -1, out=L)
        torch.triu(LU, out=U)


@operator("aten::lu_unpack").decomposition()
def lu_unpack(
    call: GivenCall, LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool, unpack_pivots: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(lu_unpack_out)."""
    P, L, U = outputs(call)
    if unpack_data:
        _unpack(LU_data, L, U)
    if unpack_pivots:
        _permutation(LU_pivots, LU_data.shape[-2])
    return P, L, U


@operator("aten::linalg_lu").decomposition()
def linalg_lu(solver: Solver, A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_lu_out): factors into the larger of L and U, unpacked in place."""
    P, L, U = outputs(solver.call)
    LU = L if A.shape[-2] > A.shape[-1] else U
    factored = solver.factor_into(LU, A, pivot)
    if pivot:
        _permutation(factored[0], A.shape[-2])
    del factored
    return P, L, U


def _determinant_of_permutation(pivots: Tensor) -> Tensor:
    """``lu_det_P``."""
    counted = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)
    moved = counted != pivots
    result = moved.sum(-1, dtype=torch.int64).fmod_(2).mul_(-2).add_(1)
    del moved, counted
    return result


@operator("aten::_linalg_det").decomposition()
def linalg_det(solver: Solver, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_det_out)."""
    result, LU, pivots = outputs(solver.call)
    infos = torch.empty(A.shape[:-2], dtype=torch.int32)
    solver.factor(LU)
    product = torch.prod(LU.diagonal(0, -2, -1), -1)
    torch.mul(_determinant_of_permutation(pivots), product, out=result)
    del infos
    return result, LU, pivots


@operator("aten::_linalg_slogdet").decomposition()
def linalg_slogdet(solver: Solver, A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_slogdet_out)."""
    sign, logarithm, LU, pivots = outputs(solver.call)
    infos = torch.empty(A.shape[:-2], dtype=torch.int32)
    solver.factor(LU)
    diagonal = LU.diagonal(0, -2, -1)
    permutation = _determinant_of_permutation(pivots)
    torch.mul(diagonal.sgn().prod(-1), permutation, out=sign)
    del permutation
    torch.sum(diagonal.abs().log_(), -1, out=logarithm)
    del infos
    return sign, logarithm, LU, pivots


@operator("aten::linalg_lu_solve").decomposition("cpu")
def linalg_lu_solve(
    solver: Solver, LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True
) -> Tensor:
    """TORCH_IMPL_FUNC(linalg_lu_solve_out)."""
    result: Tensor = outputs(solver.call)
    solver.solve(LU, pivots, B, result, left)
    return result


@operator("aten::_linalg_solve_ex").decomposition()
def linalg_solve_ex(
    solver: Solver, A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_solve_ex_out)."""
    result, LU, pivots, infos = outputs(solver.call)
    LU.copy_(A.mT if A.is_contiguous() and not A.is_complex() else A)
    if A.numel():
        solver.factor(LU)
    if check_errors:
        any_error(infos)
    vector = result.dim() == A.dim() - 1
    columns = result.unsqueeze(-1) if vector else result
    sides = B.unsqueeze(-1) if vector else B
    solver.solve(LU, pivots, sides, columns, left)
    return result, LU, pivots, infos


@operator("aten::linalg_inv_ex").decomposition()
def linalg_inv_ex(
    solver: Solver, A: Tensor, *, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_inv_ex_out): the identity solved for."""
    result, infos = outputs(solver.call)
    _, LU, pivots, _ = meta_result(_aten._linalg_solve_ex.default, A, result)
    LU, pivots = empty_as(LU), empty_as(pivots)
    solver.factor(LU)
    solver.solve(LU, pivots, result, result, True)
    del pivots, LU
    if check_errors:
        any_error(infos)
    return result, infos
