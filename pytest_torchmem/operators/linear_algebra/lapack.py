"""What LAPACK computes: LU, with determinants, systems of equations and inverses, QR, eigenvalues
and singular values, triangular factors that are solved for, and least squares.

native/BatchLinearAlgebra.cpp, native/LinearAlgebra.cpp. LAPACK is given matrices with their columns
first, work arrays, and room for its answers.

Distances between points are exact, native/Distance.cpp and native/cuda/DistanceKernel.cu; those of
``cdist`` with p=2 and more than 25 points are products of matrices, and composite.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall, empty_as, meta_result, outputs, proxy
from pytest_torchmem.operators.elementwise import sum_buffers
from pytest_torchmem.operators.libraries.lapack import Lapack
from pytest_torchmem.operators.linear_algebra import cusolver
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.operators.workspace import (
    ALL,
    CONTIGUOUS,
    Request,
    Workspace,
    contiguous_copy,
    copied,
    dense_bytes,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_aten: Any = torch.ops.aten


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


def infos_of(matrices: Tensor) -> Tensor:
    """What LAPACK says of every matrix of a batch."""
    return torch.zeros((max(1, cusolver.batch_count(matrices)),), dtype=torch.int32)


def any_error(info: Tensor) -> None:
    """_linalg_check_errors: ``info.any()``."""
    torch.any(info)


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
        LU_ = LU if cusolver.is_column_major(LU) else column_major_clone(LU)
        torch.all(pivots_ > 0)
        torch.all(pivots_ <= LU_.shape[-2])
        del written


def _permutation(pivots: Tensor, rows: int) -> None:
    """lu_unpack_out: permutations in numbers, from which the matrices are made."""
    batch = pivots.shape[:-1]
    torch.arange(rows).expand(*batch, rows).contiguous()


@operator("aten::lu_unpack").decomposition()
def lu_unpack(
    call: GivenCall, LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool, unpack_pivots: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(lu_unpack_out)."""
    P, L, U = outputs(call)
    if unpack_data:
        rows, columns = LU_data.shape[-2:]
        if rows > columns:
            torch.triu(LU_data.narrow(-2, 0, columns), out=U)
            torch.tril(LU_data, -1, out=L)
        else:
            torch.tril(LU_data if rows == columns else LU_data.narrow(-1, 0, rows), -1, out=L)
            torch.triu(LU_data, out=U)
    if unpack_pivots:
        _permutation(LU_pivots, LU_data.shape[-2])
    return P, L, U


@operator("aten::linalg_lu").decomposition()
def linalg_lu(solver: Solver, A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_lu_out): linalg_lu_factor_ex_out into the larger of L and U."""
    P, L, U = outputs(solver.call)
    LU = L if A.shape[-2] > A.shape[-1] else U
    geometry = meta_result(_aten.linalg_lu_factor_ex.default, A)
    written = proxy(LU, geometry[0])
    pivots, infos = empty_as(geometry[1]), empty_as(geometry[2])
    written.copy_(A)
    solver.factor(written, pivot)
    if written is not LU:
        LU.copy_(written)
    del geometry, written
    if pivot:
        _permutation(pivots, A.shape[-2])
    del infos, pivots
    return P, L, U


def _determinant_of_permutation(pivots: Tensor) -> Tensor:
    """``lu_det_P``."""
    counted = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)
    moved = counted != pivots
    result = moved.sum(-1, dtype=torch.int64).fmod_(2).mul_(-2).add_(1)
    del moved, counted
    return result


@operator("aten::_linalg_det", "aten::_linalg_slogdet").decomposition()
def determinants(solver: Solver, A: Tensor) -> tuple[Tensor, ...]:
    """TORCH_IMPL_FUNC(_linalg_det_out) and, of a sign and a logarithm, (_linalg_slogdet_out)."""
    *results, LU, pivots = outputs(solver.call)
    infos = torch.empty(A.shape[:-2], dtype=torch.int32)
    solver.factor(LU)
    diagonal = LU.diagonal(0, -2, -1)
    if len(results) == 1:
        product = torch.prod(diagonal, -1)
        torch.mul(_determinant_of_permutation(pivots), product, out=results[0])
    else:
        permutation = _determinant_of_permutation(pivots)
        torch.mul(diagonal.sgn().prod(-1), permutation, out=results[0])
        del permutation
        torch.sum(diagonal.abs().log_(), -1, out=results[1])
    del infos
    return (*results, LU, pivots)


@operator("aten::linalg_lu_solve").decomposition("cpu")
def lu_solve(solver: Solver, LU: Tensor, pivots: Tensor, B: Tensor, left: bool = True) -> Tensor:
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
def linalg_inv_ex(solver: Solver, A: Tensor, check_errors: bool = False) -> tuple[Tensor, Tensor]:
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


@operator("aten::geqrf").meta()
def factors_and_tau(input: Tensor) -> tuple[Tensor, Tensor]:
    """geqrf_out_helper: columns first, as LAPACK has it."""
    factors = empty_column_major(input)
    return factors, input.new_empty((*input.shape[:-2], min(input.shape[-2:])))


@operator("aten::geqrf").decomposition("cpu")
def geqrf(machine: Host, input: Tensor) -> tuple[Tensor, Tensor]:
    """geqrf_out_helper, apply_geqrf."""
    made = factors_and_tau(input)
    input.new_empty((Lapack(machine, input.dtype).geqrf(*input.shape[-2:]),))
    return made


@operator("aten::linalg_qr").decomposition("cpu")
def qr(machine: Host, call: GivenCall, A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_qr_out): in Q or R where either has the shape of the input."""
    Q, R = outputs(call)
    rows, columns = A.shape[-2:]
    with_q = mode != "r"
    tau = A.new_empty((*A.shape[:-2], min(rows, columns)))
    QR = R
    if with_q and Q.shape[-1] == columns:
        QR = Q
    elif R.shape[-2] != rows:
        QR = empty_column_major(A)
    QR.copy_(A)
    lapack = Lapack(machine, A.dtype)
    A.new_empty((lapack.geqrf(rows, columns),))
    if QR is not R:
        torch.triu(QR.narrow(-2, 0, R.shape[-2]), out=R)
    if with_q and Q.numel():
        A.new_empty((lapack.orgqr(rows, Q.shape[-1], min(rows, columns)),))
    del tau
    return Q, R


@operator("aten::linalg_householder_product").decomposition("cpu")
def householder_product(machine: Host, input: Tensor, tau: Tensor) -> Tensor:
    """linalg_householder_product_out_helper, apply_orgqr."""
    result = empty_column_major(input)
    result.copy_(input)
    reflectors = tau.contiguous()
    if input.numel():
        rows, columns = input.shape[-2:]
        lapack = Lapack(machine, input.dtype)
        input.new_empty((lapack.orgqr(rows, columns, reflectors.shape[-1]),))
    return result


@operator("aten::ormqr").decomposition("cpu")
def ormqr(
    machine: Host,
    input: Tensor,
    input2: Tensor,
    input3: Tensor,
    left: bool = True,
    transpose: bool = False,
) -> Tensor:
    """ormqr_out_helper, apply_ormqr."""
    result = empty_column_major(input3)
    result.copy_(input3)
    if result.numel() == 0:
        return result
    factors = input if cusolver.is_column_major(input) else column_major_clone(input)
    reflectors = input2.contiguous()
    lapack = Lapack(machine, input.dtype)
    rows, columns = result.shape[-2:]
    input.new_empty((lapack.ormqr(left, transpose, rows, columns, reflectors.shape[-1]),))
    del factors
    return result


@operator("aten::_linalg_eigh").decomposition("cpu")
def linalg_eigh(
    machine: Host, call: GivenCall, A: Tensor, compute_v: bool = True
) -> tuple[Tensor, Tensor]:
    """_linalg_eigh_out, apply_lapack_eigh: in the eigenvectors' place, or on a copy."""
    values, vectors = outputs(call)
    if A.numel() == 0:
        return values, vectors
    copied = vectors.copy_(A) if compute_v else column_major_clone(A)
    infos = torch.zeros(A.shape[:-2], dtype=torch.int32)
    elements, integers, reals = Lapack(machine, A.dtype).syevd(A.shape[-1], compute_v)
    work = [A.new_empty((elements,)), torch.empty((integers,), dtype=torch.int32)]
    if A.is_complex():
        work.append(values.new_empty((reals,)))
    del work
    any_error(infos)
    del copied
    return values, vectors


@operator("aten::linalg_eig", "aten::_linalg_eigvals").decomposition("cpu")
def eigenvalues(machine: Host, call: GivenCall, input: Tensor) -> Any:
    """linalg_eig_out and linalg_eigvals_out, linalg_eig_out_info, linalg_eig_kernel,
    apply_linalg_eig: of a real matrix real and imaginary parts come one after the other.
    """
    with_vectors = call.overload is _aten.linalg_eig.default
    if with_vectors:
        torch.all(torch.isfinite(input))
    infos, dtype = infos_of(input), input.dtype.to_complex()
    vectors = empty_column_major(input, dtype) if with_vectors else None
    values = input.new_empty(input.shape[:-1], dtype=dtype)
    order = input.shape[-1]
    parts: list[Tensor] = []
    if not input.is_complex():
        parts.append(input.new_empty((*input.shape[:-2], 2 * order)))
        if with_vectors:
            parts.append(empty_column_major(input))
    written = column_major_copy(input)
    if input.numel():
        elements = Lapack(machine, input.dtype).geev(order, with_vectors)
        work = [input.new_empty((elements,))]
        if input.is_complex():
            work.append(input.new_empty((2 * order,), dtype=input.real.dtype))
        del work
    del written
    if parts:
        torch.all(parts[0].narrow(-1, order, order) == 0)
    del parts
    any_error(infos)
    return (values, vectors) if with_vectors else values


@operator("aten::_linalg_svd").decomposition("cpu")
def linalg_svd(call: GivenCall, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(_linalg_svd_out): a copy that is destroyed; LAPACK's work is in vectors that
    torch's allocator does not see. Rows first is what cuSOLVER has (torch/_meta_registrations.py).
    """
    *others, Vh_of_gpu = meta_result(call.overload, *call.args, **call.kwargs)
    without_vectors = Vh_of_gpu.dim() < 2
    Vh = Vh_of_gpu if without_vectors else Vh_of_gpu.mT.contiguous().mT
    U, S, Vh = map(empty_as, (*others, Vh))
    if A.numel():
        infos = torch.zeros(A.shape[:-2], dtype=torch.int32)
        copied = column_major_clone(A)
        del copied
        any_error(infos)
    return U, S, Vh


operator("aten::linalg_solve_triangular").workspace("cpu")(cusolver.copied_triangle)


@operator("aten::cholesky").workspace("cpu")
def cholesky(input: Tensor) -> tuple[int, ...]:
    """What LAPACK says, and whether it is an error; native/BatchLinearAlgebra.cpp, cholesky."""
    return cholesky_inverse(input) if input.numel() else ()


@operator("aten::cholesky_inverse").workspace("cpu")
def cholesky_inverse(input: Tensor) -> tuple[int, ...]:
    """The same, also of no matrix; cholesky_inverse."""
    infos = max(1, cusolver.batch_count(input))
    return (infos * torch.int32.itemsize, infos, 1)


@operator("aten::_cholesky_solve_helper").decomposition("cpu")
def cholesky_solve(self: Tensor, A: Tensor) -> Tensor:
    """_cholesky_solve_helper_cpu: copies of both sides."""
    result = column_major_clone(self)
    factors = column_major_clone(A)
    infos = torch.zeros((cusolver.batch_count(self),), dtype=torch.int32)
    any_error(infos)
    del factors
    return result


# Registered for every backend, and reading and writing data all the same.
@operator("aten::linalg_lstsq", kind=OperatorKind.LEAF).decomposition()
def linalg_lstsq(
    machine: Host | Gpu,
    take: Callable[[Workspace], None],
    self: Tensor,
    b: Tensor,
    *,
    driver: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """linalg_lstsq_out, linalg_lstsq_out_info: the solution has room for the right side; driver by
    driver, LAPACK's work, or what CUDA has.
    """
    on_gpu = isinstance(machine, Gpu)
    driver = driver or ("gels" if on_gpu else "gelsy")
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
    real = self.real.dtype
    values = self.new_empty(
        (*self.shape[:-2], min(rows, columns)) if with_values else (0,), dtype=real
    )
    copied = column_major_copy(self)
    if self.numel() and other.numel():
        if isinstance(machine, Gpu):
            take(cusolver.least_squares(machine, copied, batch))
        else:
            _least_squares_work(Lapack(machine, self.dtype), copied, sides, driver, batch)
    residuals = self.new_empty((0,), dtype=real)
    if rows > columns and driver != "gelsy":
        if not on_gpu:
            solved = torch.all(infos == 0) if not with_rank else torch.all(rank == columns)
            del solved
        raw = solution.narrow(-2, columns, rows - columns)
        residuals = (raw.mul_(raw.conj()).real if raw.is_complex() else raw.pow_(2)).sum(-2)
        del raw
    del copied
    any_error(infos)
    result = solution.narrow(-2, 0, columns)
    return result.squeeze(-1) if vector else result, residuals, rank, values


def _least_squares_work(
    lapack: Lapack, matrices: Tensor, sides: int, driver: str, batch: torch.Size
) -> None:
    """apply_lstsq; the indices of every pair of matrices of the two batches; batch_iterator_with_
    broadcasting in native/LinearAlgebraUtils.h.
    """
    rows, columns = matrices.shape[-2:]
    integers = reals = 0
    if driver == "gelsd":
        elements, integers, reals = lapack.gelsd(rows, columns, sides)
    elif driver == "gelsy":
        elements, integers, reals = lapack.gelsy(rows, columns, sides), columns, 2 * columns
    elif driver == "gelss":
        elements, reals = lapack.gelss(rows, columns, sides), 5 * min(rows, columns)
    else:
        elements = lapack.gels(rows, columns, sides)
    kept = [torch.empty((integers,), dtype=torch.int32), matrices.new_empty((elements,))]
    if matrices.is_complex():
        kept.append(matrices.new_empty((reals,), dtype=matrices.real.dtype))
    pairs = torch.arange(cusolver.batch_count(matrices)), torch.arange(batch.numel())
    del pairs, kept


@operator("aten::linalg_ldl_factor_ex").decomposition("cpu")
def linalg_ldl_factor(
    machine: Host,
    call: GivenCall,
    self: Tensor,
    hermitian: bool = False,
    check_errors: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """TORCH_IMPL_FUNC(linalg_ldl_factor_ex_out), apply_ldl_factor."""
    LD, pivots, info = outputs(call)
    if self.numel() == 0:
        return LD, pivots, info
    torch.tril(self, out=LD)
    self.new_empty((Lapack(machine, self.dtype).sytrf(self.shape[-1], hermitian),))
    if check_errors:
        any_error(info)
    return LD, pivots, info


def _expanded(first: Tensor, second: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return how many batches there are together, and both tensors expanded to them."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    found = (tensor.expand(*batch, *tensor.shape[-2:]) for tensor in (first, second))
    return math.prod(batch), *found


operator("aten::_cdist_forward").workspace("cpu")(copied(x1=CONTIGUOUS, x2=CONTIGUOUS))
operator("aten::_cdist_backward").workspace("cpu")(copied(x1=CONTIGUOUS, x2=CONTIGUOUS))


@operator("aten::_cdist_forward").workspace("cuda")
def cdist_forward(x1: Tensor, x2: Tensor) -> tuple[Request, ...]:
    """Dense copies of both, of all batches; ``cdist_impl``."""
    _, first, second = _expanded(x1, x2)
    return (contiguous_copy(first), contiguous_copy(second), ALL)


@operator("aten::_cdist_backward").workspace("cuda")
def cdist_backward(
    machine: Gpu, outputs: Tensor, grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor
) -> tuple[int, ...]:
    """Dense copies, and the gradient of every pair before the sum; cdist_backward_kernel_impl."""
    batches, x1, x2 = _expanded(x1, x2)
    copies = tuple(map(contiguous_copy, (x1, x2, cdist, grad)))
    if p == 0 or not grad.numel() or not x1.numel():
        return copies
    points, others, width = x1.shape[-2], x2.shape[-2], x1.shape[-1]
    pairs = batches * others * points * width * outputs.element_size()
    sums = sum_buffers(machine, (batches, others, points, width), 1, outputs.dtype)
    return (*copies, pairs, *sums)


@operator("aten::_pdist_backward").workspace("cuda")
def pdist_backward(
    machine: Gpu, outputs: Tensor, grad: Tensor, input: Tensor, p: float
) -> tuple[int, ...]:
    """The gradient of every pair before they are added up; ``pdist_backward_kernel_impl``."""
    points = input.shape[0]
    if p == 0 or not grad.numel() or not input.numel():
        return ()
    sums = sum_buffers(machine, (points - 1, *input.shape), 0, outputs.dtype)
    return ((points - 1) * dense_bytes(outputs), *sums)
