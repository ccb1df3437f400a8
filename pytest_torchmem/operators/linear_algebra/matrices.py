"""Matrices as LAPACK and cuSOLVER are given them: with their columns first, many at once."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import dense_bytes


def empty_column_major(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Make matrices of the same shape with their columns first."""
    memory_format = torch.contiguous_format
    return torch.empty_like(matrices.mT, dtype=dtype, memory_format=memory_format).mT


def column_major_clone(matrices: Tensor) -> Tensor:
    """``cloneBatchedColumnMajor``; native/LinearAlgebraUtils.h."""
    return matrices.mT.clone(memory_format=torch.contiguous_format).mT


def column_major_copy(matrices: Tensor) -> Tensor:
    """``copyBatchedColumnMajor``: the same, and not by blocks of a transposed copy."""
    return empty_column_major(matrices).copy_(matrices)


def is_column_major(matrices: Tensor) -> bool:
    """Whether matrices are dense with their columns first."""
    return matrices.mT.is_contiguous()


def work_array(like: Tensor, elements: int) -> Tensor:
    """A work array of the type of the matrices."""
    return like.new_empty((elements,))


def batch_count(matrices: Tensor) -> int:
    """How many matrices there are."""
    return matrices.shape[:-2].numel()


def infos_of(matrices: Tensor) -> Tensor:
    """What LAPACK says of every matrix of a batch."""
    return torch.zeros((max(1, batch_count(matrices)),), dtype=torch.int32)


def any_error(info: Tensor) -> None:
    """_linalg_check_errors: ``info.any()``."""
    torch.any(info)


def copied_triangle(input: Tensor, B: Tensor) -> int:
    """A copy of a triangle that is broadcast, or dense in neither order;
    linalg_solve_triangular_out.
    """
    triangle = input.expand(*torch.broadcast_shapes(input.shape[:-2], B.shape[:-2]), -1, -1)
    dense = triangle.is_contiguous() or triangle.mT.is_contiguous()
    return 0 if dense else dense_bytes(triangle)
