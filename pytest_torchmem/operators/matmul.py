"""Matrix products: copies of operands that a library cannot read, and what the library takes.

On CUDA cuBLAS's buffer, which stays. On the CPU oneDNN's scratchpad in bfloat16
(native/mkldnn/Matmul.cpp); what MKL packs for itself is not seen by PyTorch's allocator and not
counted. The exponential of matrices; native/LinearAlgebra.cpp, ``mexp_impl``.

oneDNN takes ``brg_matmul:avx512_core_bf16`` (src/cpu/x64/matmul/brgemm_matmul_utils.cpp).
Every thread repacks a block of the right matrix, sums a block of the result in float, and turns a
block of the left matrix where that is transposed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.libraries.nvidia import beside_buffer
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    FLOAT,
    HALVES,
    LONG,
    SCALAR,
    Workspace,
    as_workspace,
    booked,
    bounded,
    by_onednn,
    ceil_div,
    contiguous_copy,
    dense_bytes,
    like,
    round_up,
    unknown,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.names import TORCH_VERSION

SMALLEST = 16 * 16 * 16
"""``mkldnn_gemm_min_size``: below it oneDNN is not asked."""

SCALE = 4
"""The factor of a product, where that is not 1, as a tensor of its own."""


def has_onednn_products(machine: Host, dtype: torch.dtype) -> bool:
    """Return whether products of that type may be oneDNN's; ``use_mkldnn_bf16_matmul``, and
    ``use_mkldnn_fp16_matmul`` where the processor computes in float16.
    """
    if machine.capability != "AVX512" or not machine.onednn:
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float16 and machine.computes_in_float16)


def uses_onednn(machine: Host, dtype: torch.dtype, size: int) -> bool:
    """Return whether a product of so many multiplications is oneDNN's."""
    return size > SMALLEST and has_onednn_products(machine, dtype)


def as_read(operand: Tensor, copied: bool) -> Tensor:
    """Return the operand, or its contiguous copy; a contiguous one is taken without odd strides of
    dimensions of one element.
    """
    if not copied and not operand.is_contiguous():
        return operand
    return torch.empty(operand.shape, dtype=operand.dtype, device="meta")


def onednn_product(
    machine: Host, first: Tensor, second: Tensor, taken: int, batch: int = 1
) -> int | Workspace:
    """Return ``taken`` and oneDNN's scratchpad for matrices in the layout they have, gaps between
    rows included.

    A row of its own counts as transposed (``matmul_helper_t::transA``), and is copied only where
    its elements are apart.
    """
    rows, depth = first.shape[-2:]
    columns = second.shape[-1]
    across = 1 if rows == depth == 1 else first.stride(-1)
    product = Product(
        host=machine,
        batch=batch,
        rows=rows,
        depth=depth,
        columns=columns,
        transposed=bool(rows == 1 or across != 1),
        turned=bool(across != 1),
        dense=not (_has_gaps(first) or _has_gaps(second)),
        across=bool(across != 1 if columns == 1 else second.stride(-1) == 1),
    )
    return by_onednn(machine, first.dtype, taken + product.scratchpad())


def _has_gaps(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    if 1 in (rows, columns):
        return bool(max(rows, columns) > 1 and (down if columns == 1 else across) != 1)
    return (down, across) not in ((columns, 1), (1, rows))


_SIZE = 2
_COLUMNS = 64
"""Columns of a block of the right matrix, ``get_default_n_block``."""

_ELEMENT = 640
"""Bytes of a thread's list of products, ``brgemm_batch_element_per_thr_sz``, of a block's depth."""


class Product(NamedTuple):
    """``batch`` products of matrices of ``rows`` by ``depth`` and ``depth`` by ``columns``.

    ``transposed`` where columns of the left matrices are dense, ``turned`` where they have to be
    copied for that.
    """

    host: Host
    batch: int
    rows: int
    depth: int
    columns: int
    transposed: bool
    turned: bool
    dense: bool
    """Without gaps between rows, or between columns."""
    across: bool
    """Of a matrix and a vector: whether the matrix is dense across what is summed."""

    def scratchpad(self) -> int:
        """Bytes of the scratchpad; ``init_aux_values``, ``init_scratchpad``."""
        if self.host.onednn >= (3, 13) and self.dense and 1 in (self.rows, self.columns):
            return self._vector_scratchpad()
        threads = self.host.threads
        depth = min(self.depth, 1024 if self.depth > 1024 and not self.transposed else 512)
        column_block = min(_COLUMNS, self.columns)
        # Rows whose length is a large power of two, of a tall matrix, are copied.
        power = self.depth & (self.depth - 1) == 0
        copied = self.turned or (power and self.depth >= 4096 and self.rows >= 1024)
        rows, chunk, on_depth = self._blocks(column_block, depth, copied)
        entries = [threads * _ELEMENT]
        if copied:
            # Columns of a turned block: whole cache lines, and no large power of two.
            turned = round_up(depth, 32)
            turned += 32 if turned >= 512 and turned & (turned - 1) == 0 else 0
            entries.append(threads * _SIZE * rows * turned)
        entries.append(threads * _SIZE * _COLUMNS * round_up(depth, 32))
        if on_depth > 1:
            entries.append(threads * FLOAT * self.columns * self.rows)
        else:
            parts = 1 if depth >= self.depth else chunk
            entries.append(threads * FLOAT * column_block * rows * parts)
        return booked(*entries)

    def _vector_scratchpad(self) -> int:
        """A matrix and a vector: nothing is repacked, and the sums are of a block of the result;
        ``is_gemv``, from 3.13 on.
        """
        threads, length = self.host.threads, max(self.rows, self.columns)
        standing = self._replace(rows=length, columns=1, transposed=False, turned=False)
        depth = min(self.depth, 16384)
        rows = standing._blocks(1, depth, False)[0]
        smallest = min(16 if threads > self.batch else 32, length)
        split = (  # is_gemv_k_split_needed
            self.across
            and self.batch == 1
            and length & (length - 1) == 0
            and length * self.depth * _SIZE > self.host.l2
            and ceil_div(length, smallest) <= 2 * threads
        )
        return booked(
            threads * _ELEMENT * ceil_div(self.depth, depth),
            threads * FLOAT * (length if split else rows),
        )

    def _blocks(self, column_block: int, depth: int, copied: bool) -> tuple[int, int, int]:
        """Rows of a block, blocks of columns that are computed together, and threads that share
        the depth: those that keep the threads most evenly busy;
        ``compute_blocking_heuristic_avx512``.
        """
        largest = min(256, self.rows)
        smallest = min(32, self.rows)
        across = ceil_div(self.columns, column_block)
        most_across = min(16 if copied else 1, across)
        on_depth = 1
        if self.host.threads > self.batch * across:
            smallest = min(16, self.rows)
            power = self.depth & (self.depth - 1) == 0
            if self.batch == 1 and self.transposed and power and self.depth >= 2048:
                on_depth = min(self.host.threads, 4)
        best, least = (0, 0, 0), 1.0
        for parts in range(on_depth, 0, -1):
            found = False
            threads = self.host.threads // parts
            for chunk in range(most_across, 0, -1):
                columns = ceil_div(self.columns, column_block * chunk)
                for rows in range(largest, smallest - 1, -1):
                    work = self.batch * ceil_div(self.rows, rows) * columns
                    if work < threads * 3 and work % threads and on_depth == 1:
                        continue
                    imbalance = self._imbalance(rows, chunk, column_block, depth, parts)
                    if imbalance < least:
                        best, least, found = (rows, chunk, parts), imbalance, True
            if not found:
                imbalance = self._imbalance(smallest, 1, column_block, depth, parts)
                if imbalance < least:
                    best, least = (smallest, 1, parts), imbalance
        return best

    def _imbalance(self, rows: int, chunk: int, column_block: int, depth: int, parts: int) -> float:
        threads = self.host.threads // parts
        across = ceil_div(self.columns, column_block)
        work = ceil_div(self.rows, rows) * ceil_div(self.columns, column_block * chunk) * self.batch
        total = _uneven(work, threads)
        total += rows * ceil_div(self.rows, rows) % self.rows / self.rows
        total += (ceil_div(across, chunk) * chunk - across) / across
        total += (self.host.threads - threads * parts) / self.host.threads
        total += _uneven(self.depth, parts * depth)
        return total / 5


def _uneven(work: int, threads: int) -> float:
    """``calculate_spatial_disbalance``."""
    rest = work % threads
    idle = threads - rest if work < threads else min(threads - rest, rest)
    return idle / threads


def is_readable(matrices: Tensor) -> bool:
    """Whether BLAS reads a matrix, or those of a batch: one stride is 1, and the other at least the
    number of elements that it steps over.
    """
    rows, columns = matrices.shape[-2:]
    down, across = matrices.stride()[-2:]
    return bool((down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns)))


def _resolved(matrices: Tensor) -> int:
    """Bytes of the copy of a conjugate, which is one only by a flag."""
    return dense_bytes(matrices) if matrices.is_conj() else 0


def _conjugate_copy(matrix: Tensor, by_rows: bool = True) -> int:
    """Bytes of the copy of a conjugated operand; BLAS reads only a transposed conjugate in place.

    ``by_rows``: how the result lies, and with it what counts as transposed;
    native/LinearAlgebra.cpp, addmm_impl_cpu_; native/cuda/cuBlasCommonArgs.h.
    """
    if not matrix.is_conj() or not is_readable(matrix):
        return 0  # or copied for BLAS, and conjugated with that
    lying = matrix if by_rows else matrix.mT
    plain = lying.stride(-1) == 1 and lying.stride(-2) >= max(1, lying.shape[-1])
    return dense_bytes(matrix) if plain else 0


def blas_copy(matrix: Tensor) -> int:
    """Bytes of the clone for BLAS; addmm_impl_cpu_ of LinearAlgebra.cpp, addmv of both Blas.cpp."""
    return 0 if is_readable(matrix) else dense_bytes(matrix)


def cublas_copy(matrices: Tensor) -> int:
    """Bytes of the copy of a matrix or of a batch for cuBLAS; native/cuda/Blas.cpp,
    ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas``.
    """
    if matrices.is_contiguous():
        return _resolved(matrices)
    if matrices.dim() == 2 and matrices.t().is_contiguous():
        return 0
    return blas_copy(matrices) + _conjugate_copy(matrices)


def onednn_copy(matrices: Tensor) -> int:
    """Bytes of the copy for oneDNN, which takes no gaps; is_mkldnn_optimized_format."""
    if matrices.is_contiguous():
        return 0
    rows, columns = matrices.shape[-2:]
    down, across = matrices.stride()[-2:]
    dense = (across == 1 and down == columns) or (down == 1 and across == rows)
    if matrices.dim() == 3:
        dense = dense and matrices.stride(0) == rows * columns
    return 0 if dense else dense_bytes(matrices)


_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SMALLEST_FOR_MKL = 400
"""``contraction_size * res_rows * res_cols``, below which a batch is multiplied by plain loops."""


def _factors(operands: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the last two tensors: what comes before them is added to their product."""
    *_, first, second = (one for one in operands if isinstance(one, Tensor))
    return first, second


@operator("aten::mm", "aten::baddbmm", "aten::baddbmm_").workspace("cuda")
def by_cublas(machine: Gpu, operands: list[Any], lt: bool = False) -> Workspace | int:
    """cuBLAS, and copies of operands; nothing where there is nothing to multiply;
    native/cuda/Blas.cpp, ``addmm_out_cuda_impl``, ``bmm_out_cuda_impl``.
    """
    first, second = _factors(operands)
    if not (first.numel() and second.numel()):
        return 0
    return beside_buffer(machine, cublas_copy(first), cublas_copy(second), lt=lt)


@operator("aten::bmm").workspace("cuda")
def batch_by_cublas(machine: Gpu, input: Tensor, mat2: Tensor) -> Workspace | int:
    """The same; Triton makes outer products since torch 2.13 and asks for nothing;
    torch/_native/ops/bmm_outer_product/triton_impl.py, ``_is_outer_product``.
    """
    outer = input.shape[2] == mat2.shape[1] == 1 and not input.is_complex()
    return 0 if outer and TORCH_VERSION >= (2, 13) else by_cublas(machine, [input, mat2])


@operator("aten::mm").workspace("cpu")
def matrix_product(
    machine: Host, outputs: Tensor, input: Tensor, mat2: Tensor, alpha: float = 1
) -> int | Workspace:
    """Copies of operands that BLAS cannot read; native/LinearAlgebra.cpp, addmm_impl_cpu_, whose
    gemm may be oneDNN's (native/CPUBlas.cpp, ``mkldnn_bf16_gemm``); a single column is a row of the
    product turned.
    """
    first, second = input, mat2
    (rows, depth), columns = first.shape, second.shape[1]
    if first.numel() == 0 or second.numel() == 0:
        return 0
    copies = blas_copy(first) + blas_copy(second)
    if not uses_onednn(machine, first.dtype, rows * depth * columns):
        by_rows = outputs.stride(0) != 1 or outputs.stride(1) < max(1, rows)
        return copies + _conjugate_copy(first, by_rows) + _conjugate_copy(second, by_rows)
    if outputs.stride(0) == 1 and (columns == 1 or outputs.stride(1) >= max(1, rows)):
        first, second = second.t(), first.t()
    if blas_copy(first):
        first = as_read(first, copied=True)
    scale = 0 if alpha == 1 else SCALE
    return onednn_product(machine, first, second, copies + scale)


# What is multiplied by ``beta=0``, NaN and all.
operator("addbmm addmm addmv addr baddbmm").unread()(lambda self, beta: [] if beta else [self])


@operator("aten::addmm", "aten::addmm_", "aten::_addmm_activation").workspace("cpu")
def addmm_on_cpu(
    machine: Host, outputs: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> int | Workspace:
    """As mm: the bias is copied into the result first; native/LinearAlgebra.cpp, addmm_out_cpu.
    Where there is nothing to multiply the bias is multiplied by a tensor of ``beta``.
    """
    if mat1.numel() == 0 and outputs.numel() and beta != 0:
        return SCALAR + outputs.element_size()
    return matrix_product(machine, outputs, mat1, mat2, alpha)


@operator("aten::addmm", "aten::addmm_", "aten::_addmm_activation").workspace("cuda")
def addmm_on_cuda(machine: Gpu, input: Tensor, mat1: Tensor, mat2: Tensor) -> Workspace | int:
    """CuBLASLt with the bias as its epilogue, else cuBLAS; ``isInputCompliesAddmmCudaLt``. Where it
    is not, the bias is copied into the result: nothing more.
    """
    epilogue = input.dim() == 1 and input.shape[0] == mat2.shape[1] and input.is_contiguous()
    return by_cublas(machine, [mat1, mat2], lt=epilogue and mat1.dtype in _LT_TYPES)


# A product and a sum in one iteration, of one type; native/LinearAlgebra.cpp, addr.
operator("aten::addr").workspace("cpu")(
    lambda input, vec1, vec2: 0 if input.dtype is vec1.dtype is vec2.dtype else unknown()
)


@operator("aten::addmv", "aten::addmv_").workspace("cpu")
def addmv_on_cpu(machine: Host, mat: Tensor, vec: Tensor) -> int | Workspace:
    """A copy of a matrix that gemv cannot read; native/Blas.cpp, addmv_out."""
    if not uses_onednn(machine, mat.dtype, mat.numel()):
        return blas_copy(mat)
    copied = onednn_copy(mat)
    column = torch.empty((vec.numel(), 1), dtype=vec.dtype, device="meta")
    return onednn_product(machine, as_read(mat, copied > 0), column, copied + contiguous_copy(vec))


@operator("aten::addmv", "aten::addmv_").workspace("cuda")
def addmv_on_cuda(machine: Gpu, mat: Tensor, vec: Tensor) -> Workspace | int:
    """A vector without stride is copied too; native/cuda/Blas.cpp, ``addmv_out_cuda``."""
    if not mat.numel():
        return 0
    return beside_buffer(machine, blas_copy(mat), 0 if vec.stride(0) else dense_bytes(vec))


@operator("aten::_compute_linear_combination").meta()
def linear_combination(input: Tensor, coefficients: Tensor) -> Tensor:
    """Sums of matrices, each times a coefficient; native/LinearAlgebra.cpp."""
    return like(input, (coefficients.shape[0], *input.shape[1:]))


@operator("aten::bmm", "aten::baddbmm", "aten::baddbmm_").workspace("cpu")
def batched_product(machine: Host, outputs: Tensor, operands: list[Any]) -> int | Workspace:
    """native/LinearAlgebra.cpp, bmm_out_or_baddbmm_: MKL reads batches of dense matrices; others
    are multiplied one by one, each copied. Conjugates are copied as a whole.
    """
    first, second = _factors(operands)
    (batch, rows, depth), columns = first.shape, second.shape[2]
    size = batch * rows * depth * columns
    if size == 0:
        return 0
    if uses_onednn(machine, first.dtype, size):
        copies = onednn_copy(first) + onednn_copy(second)
        first, second = (as_read(one, onednn_copy(one) > 0) for one in (first, second))
        return onednn_product(machine, first, second, copies, batch)
    conjugates = _resolved(first) + _resolved(second)
    if depth * rows * columns < _SMALLEST_FOR_MKL:
        return conjugates
    mkl = first.dtype.is_floating_point or first.dtype.is_complex
    mkl = mkl and first.dtype not in HALVES
    given = [one for one in (first, second) if not one.is_conj()]  # a copy can be read
    if mkl and all(map(is_readable, given)) and outputs.is_contiguous():
        return conjugates
    return conjugates + sum(map(blas_copy, given)) // batch


@operator("aten::addbmm", "aten::addbmm_").workspace("cpu")
def addbmm_on_cpu(
    machine: Host, outputs: Tensor, batch1: Tensor, batch2: Tensor, *, alpha: float = 1
) -> int | Workspace:
    """One addmm after another; native/LinearAlgebra.cpp, addbmm_impl_."""
    if batch1.numel() == 0 or batch2.numel() == 0:
        return 0
    return matrix_product(machine, outputs, batch1[0], batch2[0], alpha)


@operator("aten::dot", "aten::vdot").workspace("cpu")
def dot_on_cpu(machine: Host, operands: list[Any]) -> Workspace | int:
    """In bfloat16 oneDNN's product of a row and a column; Blas.cpp, dot and use_mkldnn_matmul."""
    if not uses_onednn(machine, operands[0].dtype, operands[0].numel()):
        return 0
    copies = [*map(contiguous_copy, operands)]
    row, column = (as_read(one, copy > 0) for one, copy in zip(operands, copies, strict=True))
    return onednn_product(machine, row.unsqueeze(0), column.unsqueeze(1), sum(copies))


# The handle, and so its buffer; native/cuda/Blas.cpp, ``dot_cuda``; ``addbmm`` is a product into
# the result for every matrix, native/LinearAlgebra.cpp, ``addbmm_impl_``.
operator("addbmm addbmm_ dot vdot").workspace("cuda")(lambda machine: beside_buffer(machine))

_POWERS = 5
"""The powers of a matrix that ``compute_T18`` keeps."""


@operator("aten::linalg_matrix_exp").workspace("cpu")
def matrix_exp(machine: Host, input: Tensor) -> int | Workspace:
    """compute_T18_scale_square: scaled matrices, their powers and as many sums of these, beside
    norms, exponents and scales, and what a product of several takes.

    One matrix is copied first, and takes a polynomial of a lower degree if its norm is small: these
    are at most the bytes that it needs.
    """
    order = input.shape[-1]
    if order <= 1 or input.numel() == 0:
        return 0
    matrices = input.numel() // order**2
    norm = input.element_size() // (2 if input.is_complex() else 1)
    scaled = dense_bytes(input) * (1 + 2 * _POWERS)
    if matrices > 1:
        batch = torch.empty((matrices, order, order), dtype=input.dtype, device="meta")
        product = as_workspace(batched_product(machine, batch, [batch, batch]), "aten::bmm")
        return scaled - dense_bytes(input) + 3 * matrices * norm + product.nbytes
    return bounded(scaled, dense_bytes(input), LONG, 4 * norm)
