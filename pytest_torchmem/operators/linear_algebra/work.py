"""The floating-point operations of factorizations and solutions.

native/BatchLinearAlgebraKernel.cpp and native/cuda/linalg/BatchLinearAlgebra.cpp call the routine
of LAPACK that is named, or the same of MAGMA and cuSOLVER. Leading terms of the counts in LAPACK
Working Note 41, appendix C; a batch has them for each of its matrices. What is iterated
(eigenvalues, singular values, least squares by them) has none: values decide how often.
"""

from math import prod

from torch import Tensor

from pytest_torchmem.operators.registry import operator


def _sizes(matrix: Tensor) -> tuple[int, int, int]:
    """Return the number of matrices, their rows and their columns."""
    *batch, rows, columns = matrix.shape
    return prod(batch), rows, columns


def _lu(matrix: Tensor) -> float:
    """GETRF."""
    batch, rows, columns = _sizes(matrix)
    less, more = sorted((rows, columns))
    return batch * less**2 * (more - less / 3)


def _qr(matrix: Tensor) -> float:
    """GEQRF."""
    batch, rows, columns = _sizes(matrix)
    less, more = sorted((rows, columns))
    return 2 * batch * less**2 * (more - less / 3)


@operator("aten::linalg_cholesky_ex").flops()
def cholesky(self: Tensor) -> int:
    """POTRF: a third of the cube."""
    batch, rows, _ = _sizes(self)
    return batch * rows**3 // 3


@operator("aten::linalg_lu_factor_ex", "aten::_linalg_det", "aten::_linalg_slogdet").flops()
def lu(A: Tensor) -> int:
    """GETRF; the product of the diagonal does not count beside it."""
    return int(_lu(A))


@operator("aten::_linalg_solve_ex").flops()
def solve(A: Tensor, outputs: tuple[Tensor, ...]) -> int:
    """GETRF, and GETRS for each column of the result."""
    return int(_lu(A)) + 2 * A.shape[-1] * outputs[0].numel()


@operator("aten::linalg_inv_ex").flops()
def inverse(A: Tensor) -> int:
    """GETRF and GETRI."""
    batch, rows, _ = _sizes(A)
    return 2 * batch * rows**3


@operator("aten::linalg_lu_solve").flops()
def lu_solve(LU: Tensor, outputs: Tensor) -> int:
    """GETRS: two triangles."""
    return 2 * LU.shape[-1] * outputs.numel()


@operator("aten::_cholesky_solve_helper").flops()
def cholesky_solve(A: Tensor, outputs: Tensor) -> int:
    """POTRS: two triangles."""
    return 2 * A.shape[-1] * outputs.numel()


@operator("aten::linalg_solve_triangular").flops()
def solve_triangular(self: Tensor, outputs: Tensor) -> int:
    """TRTRS: one triangle."""
    return self.shape[-1] * outputs.numel()


@operator("aten::geqrf").flops()
def householder_vectors(self: Tensor) -> int:
    """GEQRF."""
    return int(_qr(self))


@operator("aten::linalg_qr").flops()
def qr(A: Tensor, outputs: tuple[Tensor, Tensor]) -> int:
    """GEQRF, and ORGQR where Q is asked for."""
    q = outputs[0]
    return int(_qr(A)) + (int(_orthogonal(q, min(A.shape[-2:]))) if q.numel() else 0)


@operator("aten::linalg_householder_product").flops()
def householder_product(input: Tensor, tau: Tensor) -> int:
    """ORGQR."""
    return int(_orthogonal(input, tau.shape[-1]))


def _orthogonal(made: Tensor, vectors: int) -> float:
    """ORGQR: the first columns of the product of so many reflections."""
    batch, rows, columns = _sizes(made)
    both = (rows + columns) * vectors
    return batch * vectors * (4 * rows * columns - 2 * both + 4 * vectors**2 / 3)
