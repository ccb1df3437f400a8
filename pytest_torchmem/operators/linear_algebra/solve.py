"""Triangular factors that are solved for, and least squares; native/BatchLinearAlgebra.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import dense_bytes
from pytest_torchmem.operators.libraries import lapack
from pytest_torchmem.operators.linear_algebra.lapack_arguments import (
    any_error,
    batch_count,
    column_major_clone,
    infos_of,
    work_array,
)
from pytest_torchmem.operators.registry import Kind, operator


@operator("aten::linalg_solve_triangular").workspace("cpu")
def solve_triangular(input: Tensor, B: Tensor) -> int:
    """A copy of a triangle that is broadcast, or dense in neither order;
    linalg_solve_triangular_out.
    """
    triangle = input.expand(*torch.broadcast_shapes(input.shape[:-2], B.shape[:-2]), -1, -1)
    dense = triangle.is_contiguous() or triangle.mT.is_contiguous()
    return 0 if dense else dense_bytes(triangle)


@operator("aten::_cholesky_solve_helper").decomposition("cpu")
def cholesky_solve(self: Tensor, A: Tensor) -> Tensor:
    """_cholesky_solve_helper_cpu: copies of both sides."""
    result = column_major_clone(self)
    factors = column_major_clone(A)
    infos = torch.zeros((batch_count(self),), dtype=torch.int32)
    any_error(infos)
    del factors
    return result


# Registered for every backend, and reading and writing data all the same.
@operator("aten::linalg_lstsq", kind=Kind.LEAF).decomposition("cpu")
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
    infos = infos_of(self)
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
    any_error(infos)
    result = solution.narrow(-2, 0, columns)
    return result.squeeze(-1) if vector else result, residuals, rank, values


def _least_squares_work(matrices: Tensor, sides: int, driver: str, batch: torch.Size) -> None:
    """apply_lstsq; the indices of every pair of matrices of the two batches; batch_iterator_with_
    broadcasting in native/LinearAlgebraUtils.h.
    """
    rows, columns = matrices.shape[-2:]
    if driver == "gelsd":
        elements, integers = lapack.gelsd(rows, columns, sides)
        kept = [work_array(matrices, elements), torch.empty((integers,), dtype=torch.int32)]
    elif driver == "gelsy":
        elements = lapack.gelsy(rows, columns, sides)
        kept = [torch.empty((columns,), dtype=torch.int32), work_array(matrices, elements)]
    else:
        asked = lapack.gels if driver == "gels" else lapack.gelss
        kept = [work_array(matrices, asked(rows, columns, sides))]
    pairs = torch.arange(batch_count(matrices)), torch.arange(batch.numel())
    del pairs, kept
