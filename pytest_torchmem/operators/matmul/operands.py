"""Operands that a library cannot read as they lie, and that are copied for it."""

from __future__ import annotations

from torch import Tensor

from pytest_torchmem.operators.geometry import dense_bytes


def is_readable(matrices: Tensor) -> bool:
    """Whether BLAS reads a matrix, or those of a batch: one stride is 1, and the other at least the
    number of elements that it steps over.
    """
    rows, columns = matrices.shape[-2:]
    down, across = matrices.stride()[-2:]
    return bool((down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns)))


def blas_copy(matrix: Tensor) -> int:
    """Bytes of the clone for BLAS; native/LinearAlgebra.cpp, addmm_impl_cpu_; native/Blas.cpp and
    native/cuda/Blas.cpp, addmv.
    """
    return 0 if is_readable(matrix) else dense_bytes(matrix)


def cublas_copy(matrices: Tensor) -> int:
    """Bytes of the copy of a matrix or of a batch for cuBLAS; native/cuda/Blas.cpp,
    ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas``.
    """
    if matrices.is_contiguous() or (matrices.dim() == 2 and matrices.t().is_contiguous()):
        return 0
    return blas_copy(matrices)


def onednn_copy(matrices: Tensor) -> int:
    """Bytes of the copy for oneDNN, which takes no gaps between rows or columns;
    native/mkldnn/Utils.cpp, is_mkldnn_optimized_format.
    """
    if matrices.is_contiguous():
        return 0
    rows, columns = matrices.shape[-2:]
    down, across = matrices.stride()[-2:]
    dense = (across == 1 and down == columns) or (down == 1 and across == rows)
    if matrices.dim() == 3:
        dense = dense and matrices.stride(0) == rows * columns
    return 0 if dense else dense_bytes(matrices)
