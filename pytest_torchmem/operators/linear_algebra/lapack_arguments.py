"""What LAPACK is given: matrices with their columns first, work arrays, room for its answers."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_column_major(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Make matrices of the same shape with their columns first."""
    memory_format = torch.contiguous_format
    return torch.empty_like(matrices.mT, dtype=dtype, memory_format=memory_format).mT


def column_major_clone(matrices: Tensor) -> Tensor:
    """``cloneBatchedColumnMajor``; native/LinearAlgebraUtils.h."""
    return matrices.mT.clone(memory_format=torch.contiguous_format).mT


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


def any_error(infos: Tensor) -> None:
    """_linalg_check_errors: ``info.any()``."""
    torch.any(infos)
