"""Matrices as LAPACK and cuSOLVER are given them, with their columns first, many at once; and what
linear algebra takes on CUDA: pointers to the matrices of a batch, copies, and cuBLAS's buffer.

ATen chooses among cuSOLVER, cuBLAS and MAGMA by shape; native/cuda/linalg/BatchLinearAlgebra.cpp,
BatchLinearAlgebraLib.cpp, BatchLinearAlgebraLibBlas.cpp. What cuSOLVER asks for beside is not
known. MAGMA takes memory of its own past torch's allocator, and the handle of cuBLAS.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.libraries.nvidia import beside_buffer
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, contiguous_copy, dense_bytes, unknown
from pytest_torchmem.targets.gpus import Gpu


def is_column_major(matrices: Tensor) -> bool:
    """Whether matrices are dense with their columns first."""
    return matrices.mT.is_contiguous()


def batch_count(matrices: Tensor) -> int:
    return matrices.shape[:-2].numel()


def copied_triangle(input: Tensor, B: Tensor) -> int:
    """A copy of a triangle that is broadcast, or dense in no order; linalg_solve_triangular_out."""
    triangle = input.expand(*torch.broadcast_shapes(input.shape[:-2], B.shape[:-2]), -1, -1)
    dense = triangle.is_contiguous() or triangle.mT.is_contiguous()
    return 0 if dense else dense_bytes(triangle)


_POINTER = _LONG = 8
_INFO = torch.int32.itemsize


def _pointers(batch: int, arrays: int = 2) -> tuple[int, ...]:
    """``get_device_pointers`` of the matrices of a batch."""
    return (_POINTER * batch,) * arrays


def _checked(batch: int) -> tuple[int, ...]:
    """_linalg_check_errors: infos, and whether any is an error."""
    return (batch * _INFO, 1, int(batch == 1))


def _columns_first(matrices: Tensor) -> int:
    """Bytes of a copy of what has not its columns first."""
    return 0 if is_column_major(matrices) else dense_bytes(matrices)


def _of_triangle(batch: int, order: int) -> tuple[int, ...]:
    """triangular_solve_kernel: cuBLAS by one matrix after the other, cuBLAS by batches, MAGMA."""
    alone = (batch <= 8 and order >= 64) or order > 512
    return () if alone else _pointers(batch)


@operator("aten::linalg_solve_triangular").workspace("cuda")
def solve_triangular(machine: Gpu, input: Tensor, B: Tensor) -> Workspace:
    """A copy as on the CPU; linalg_solve_triangular_out. Of matrices of nothing there are no
    pointers, and the buffer is there all the same.
    """
    batch = torch.broadcast_shapes(input.shape[:-2], B.shape[:-2]).numel()
    order = input.shape[-1]
    requests = _of_triangle(batch, order)[: 2 if B.numel() else min(1, order)]
    return beside_buffer(machine, copied_triangle(input, B), *requests)


@operator("aten::triangular_solve").workspace("cuda")
def triangular_solve(machine: Gpu, outputs: tuple[Tensor, Tensor]) -> Workspace:
    """In its outputs, one of which is the copy of the triangle."""
    _, triangle = outputs
    if not triangle.numel():
        return beside_buffer(machine)
    return beside_buffer(machine, *_of_triangle(batch_count(triangle), triangle.shape[-1]))


@operator("aten::linalg_lu_factor_ex").workspace("cuda")
def lu_factor(machine: Gpu, A: Tensor, pivot: bool = True) -> Workspace | int:
    """lu_factor: cuSOLVER for one matrix and large ones, cuBLAS for few small ones, else MAGMA.
    Without pivots the rows are counted afterwards.
    """
    batch, (rows, columns) = batch_count(A), A.shape[-2:]
    if not A.numel():
        return 0
    counted = 0 if pivot else min(rows, columns) * _INFO
    few = batch == 1 or rows <= 16 or (rows <= 128 and batch <= 16)
    if rows != columns or not few:
        return beside_buffer(machine, counted)
    if batch == 1 or rows >= 512:
        return unknown(counted)
    return beside_buffer(machine, max(counted, *_pointers(batch)))


@operator("aten::linalg_lu_solve").workspace("cuda")
def lu_solve(
    machine: Gpu, LU: Tensor, pivots: Tensor, B: Tensor, left: bool = True, adjoint: bool = False
) -> Workspace | int | tuple[int, ...]:
    """linalg_lu_solve_out, lu_solve_kernel: cuSOLVER, cuBLAS, or by two triangles."""
    if not B.numel():
        return 0
    order, columns = LU.shape[-1], B.shape[-1 if left else -2]
    shape = torch.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    batch, transposed = shape.numel(), adjoint == left
    copies: tuple[int, ...] = (contiguous_copy(pivots), _columns_first(LU))
    if shape != LU.shape[:-2]:  # maybe_expand_lu, maybe_expand_pivots
        copies = (*copies, batch * order**2 * LU.element_size(), batch * order * _INFO)
    alone = order <= 64 and (columns <= 64 or transposed or order <= 32)
    alone = batch <= 2 and (alone or (order <= 128 and columns <= 2))
    if order != columns and order > 8 and alone:
        return (*copies, _INFO)
    batched = columns <= 8 if order <= 64 else columns <= 2 and order <= 128
    if order <= 16 if order == columns else order <= 8 or batched:
        return beside_buffer(machine, *copies, *_pointers(batch))
    permuted, whole = batch * order * _LONG, batch * order * columns * B.element_size()
    pointers = _of_triangle(batch, order)
    if transposed:
        found = pointers if sum(pointers) > whole else (whole,)
        return beside_buffer(machine, *copies, permuted, *found)
    counted = order * _LONG
    return beside_buffer(machine, *copies, permuted, counted, permuted, whole, *pointers)


@operator("aten::linalg_cholesky_ex", "aten::cholesky").workspace("cuda")
def cholesky(input: Tensor, check_errors: bool | None = None) -> Workspace | tuple[int, ...]:
    """cholesky_helper_cusolver; without ``check_errors`` with infos, and whether they are an
    error.
    """
    if not input.numel():
        return ()
    batch = batch_count(input)
    checked = _checked(batch) if check_errors is None else ()
    return (*checked[:1], *_pointers(batch, 1)) if batch != 1 else unknown(*checked)


@operator("aten::cholesky_inverse").workspace("cuda")
def cholesky_inverse(machine: Gpu, input: Tensor) -> Workspace | tuple[int, ...]:
    """cholesky_inverse_kernel_impl: a copy, from which the identity is solved for."""
    batch, copied = batch_count(input), dense_bytes(input)
    if batch == 1:
        return (copied, _INFO, copied)
    pointers = _of_triangle(batch, input.shape[-1]) if copied else ()
    return beside_buffer(machine, copied, *pointers)


@operator("aten::_cholesky_solve_helper").workspace("cuda")
def cholesky_solve(machine: Gpu, self: Tensor, A: Tensor) -> Workspace | tuple[int, ...]:
    """_cholesky_solve_helper_cuda: a copy for cuSOLVER, of a batch two triangles."""
    batch = batch_count(self)
    if batch == 1:
        return (_INFO, dense_bytes(A))
    return solve_triangular(machine, A, self)


def _by_batches(rows: int, batch: int) -> bool:
    """geqrf_kernel, lstsq_kernel: whether cuBLAS takes a batch."""
    return rows <= 256 and batch >= max(2, rows // 16)


@operator("aten::geqrf").workspace("cuda")
def geqrf(machine: Gpu, input: Tensor, before: Sequence[int] = (), after: int = 0) -> Workspace:
    """geqrf_kernel while ``before`` is there, and ``after`` is a part of it by cuSOLVER."""
    batch, rows = batch_count(input), input.shape[-2]
    if not _by_batches(rows, batch):
        return unknown(*before, _INFO)
    found = beside_buffer(machine, *before, *_pointers(batch))
    return Workspace(found.requests, unknown().confidence, found.kept) if after else found


@operator("aten::linalg_qr").workspace("cuda")
def linalg_qr(
    machine: Gpu, outputs: tuple[Tensor, Tensor], A: Tensor, mode: str = "reduced"
) -> Workspace | int:
    """TORCH_IMPL_FUNC(linalg_qr_out): in Q or R where either has the shape of the input."""
    Q, R = outputs
    rows, columns = A.shape[-2:]
    with_q = mode != "r"
    if not A.numel():
        return 0
    reflectors = batch_count(A) * min(rows, columns) * A.element_size()
    apart = not (with_q and Q.shape[-1] == columns) and R.shape[-2] != rows
    return geqrf(machine, A, (reflectors, dense_bytes(A) * apart), with_q * Q.numel())


# linalg_householder_product_out_helper, orgqr_helper_cusolver
operator("aten::linalg_householder_product").workspace("cuda")(
    lambda tau: unknown(contiguous_copy(tau), _INFO)
)
# ormqr_out_helper, ormqr_cusolver
operator("aten::ormqr").workspace("cuda")(
    lambda input, input2: unknown(_columns_first(input), contiguous_copy(input2), _INFO)
)


@operator("aten::_linalg_eigh", order={"cuda": (1, 0)}).workspace("cuda")
def linalg_eigh(A: Tensor, compute_v: bool = True) -> Workspace | int:
    """TORCH_IMPL_FUNC(_linalg_eigh_out): in the eigenvectors' place, or on a copy."""
    if not A.numel():
        return 0
    return unknown(0 if compute_v else dense_bytes(A), *_checked(batch_count(A)))


@operator("aten::_linalg_svd", order={"cuda": (0, 2, 1)}).workspace("cuda")
def linalg_svd(A: Tensor, full_matrices: bool = False, compute_uv: bool = True) -> Workspace | int:
    """TORCH_IMPL_FUNC(_linalg_svd_out), svd_cusolver: a copy that is destroyed. Vectors that nobody
    asked for are written all the same, and small matrices have whole ones.
    """
    if not A.numel():
        return 0
    batch, (rows, columns), size = batch_count(A), A.shape[-2:], A.element_size()
    small, rank = max(rows, columns) <= 32, min(rows, columns)
    left, right = (rows, columns) if small else (rank, rank)
    vectors = (rows * left * size, columns * right * size)
    if compute_uv:
        apart = small and not full_matrices and rows != columns
        vectors = (batch * max(vectors), 0) if apart else (0, 0)
    elif small:
        vectors = (batch * vectors[0], batch * vectors[1])
    return unknown(batch * _INFO, dense_bytes(A), *vectors)


@operator("aten::linalg_ldl_solve").workspace("cuda")
def ldl_solve(outputs: Tensor, LD: Tensor, pivots: Tensor) -> Workspace | int:
    """ldl_solve_kernel: pivots as wide as cuSOLVER has them."""
    return unknown(_columns_first(LD), pivots.numel() * _LONG, _INFO) if outputs.numel() else 0


def least_squares(gpu: Gpu, matrices: Tensor, sides: torch.Size) -> Workspace:
    """lstsq_kernel: cuBLAS for a batch of small matrices, else QR and a triangle. ``sides`` are the
    dimensions of the batch of both sides.
    """
    rows, columns = matrices.shape[-2:]
    alone, batch, size = batch_count(matrices), sides.numel(), matrices.element_size()
    expanded = batch * rows * columns * size
    if rows >= columns and _by_batches(rows, batch):
        return beside_buffer(gpu, expanded, *_pointers(batch))
    reflectors = alone * min(rows, columns) * size
    transposed = dense_bytes(matrices) if rows < columns else 0
    triangle = _of_triangle(batch, min(rows, columns)) or (_INFO,)
    wider = expanded if batch != alone else 0
    found = beside_buffer(gpu, reflectors, transposed, wider, *triangle)
    return Workspace(found.requests, unknown().confidence, found.kept)
