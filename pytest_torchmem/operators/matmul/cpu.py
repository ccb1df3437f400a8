"""Matrix products on the CPU: operands copied for BLAS, and oneDNN's scratchpad in bfloat16.

What MKL packs for itself is not seen by PyTorch's allocator and not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.libraries.onednn.brgemm_matmul import Product
from pytest_torchmem.operators.libraries.onednn.confidence import by_onednn
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.targets.host import Host

SMALLEST = 16 * 16 * 16
"""``mkldnn_gemm_min_size``: below it oneDNN is not asked."""

SCALE = 4
"""The factor of a product, where that is not 1, as a tensor of its own."""


def _copied(matrix: Tensor) -> int:
    """A clone where neither dimension is dense; native/LinearAlgebra.cpp, addmm_impl_cpu_."""
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride(-2), matrix.stride(-1)
    if down == 1 and across >= max(1, rows):
        return 0
    if across == 1 and down >= max(1, columns):
        return 0
    return dense_bytes(matrix)


def _onednn_copied(matrix: Tensor) -> int:
    """native/mkldnn/Utils.cpp, is_mkldnn_optimized_format: no gaps between rows or columns."""
    if matrix.is_contiguous():
        return 0
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride(-2), matrix.stride(-1)
    dense = (across == 1 and down == columns) or (down == 1 and across == rows)
    if matrix.dim() == 3:
        dense = dense and matrix.stride(0) == rows * columns
    return 0 if dense else dense_bytes(matrix)


def _dense(operand: Tensor, copied: bool) -> Tensor:
    """The operand, or its contiguous copy; a contiguous one is taken without odd strides of
    dimensions of one element.
    """
    if not copied and not operand.is_contiguous():
        return operand
    return torch.empty(operand.shape, dtype=operand.dtype, device="meta")


def uses_onednn(machine: Host, dtype: torch.dtype) -> bool:
    """Return whether products of that type may be oneDNN's; native/mkldnn/Matmul.cpp,
    use_mkldnn_bf16_matmul.
    """
    vectors = machine.capability == "AVX512"
    return dtype == torch.bfloat16 and bool(machine.onednn) and vectors


def _uses_onednn(machine: Host, dtype: torch.dtype, size: int) -> bool:
    return uses_onednn(machine, dtype) and size > SMALLEST


def _gapped(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    if 1 in (rows, columns):
        return bool(max(rows, columns) > 1 and (down if columns == 1 else across) != 1)
    return (down, across) not in ((columns, 1), (1, rows))


def _product(machine: Host, batch: int, first: Tensor, second: Tensor) -> Product:
    """What oneDNN is asked for matrices in the layout they have, gaps between rows included.

    A row of its own counts as transposed (``matmul_helper_t::transA``), and is copied only where
    its elements are apart.
    """
    rows, depth = first.shape[-2:]
    columns = second.shape[-1]
    across = 1 if rows == depth == 1 else first.stride(-1)
    return Product(
        host=machine,
        batch=batch,
        rows=rows,
        depth=depth,
        columns=columns,
        transposed=bool(rows == 1 or across != 1),
        turned=bool(across != 1),
        dense=not (_gapped(first) or _gapped(second)),
        across=bool(across != 1 if columns == 1 else second.stride(-1) == 1),
    )


def _matrix_product(
    machine: Host, result: Tensor, first: Tensor, second: Tensor, alpha: float = 1
) -> int | Workspace:
    """native/LinearAlgebra.cpp, addmm_impl_cpu_, whose gemm may be oneDNN's
    (native/CPUBlas.cpp, ``mkldnn_bf16_gemm``); a single column is a row of the product turned.
    """
    rows, depth = first.shape
    columns = second.shape[1]
    if first.numel() == 0 or second.numel() == 0:
        return 0
    copies = _copied(first) + _copied(second)
    if not _uses_onednn(machine, first.dtype, rows * depth * columns):
        return copies
    if result.stride(0) == 1 and (columns == 1 or result.stride(1) >= max(1, rows)):
        first, second = second.t(), first.t()
    if _copied(first):
        first = _dense(first, copied=True)
    scale = 0 if alpha == 1 else SCALE
    product = _product(machine, 1, first, second)
    return by_onednn(machine, first.dtype, copies + scale + product.scratchpad())


_NUMBER = 8
"""Bytes of a Python number in a tensor."""


@operator("aten::mm").workspace("cpu")
def mm(machine: Host, outputs: Tensor, input: Tensor, mat2: Tensor) -> int | Workspace:
    """Copies of operands that BLAS cannot read; native/LinearAlgebra.cpp, mm_out_cpu."""
    return _matrix_product(machine, outputs, input, mat2)


@operator("aten::addmm", "aten::addmm_").workspace("cpu")
def addmm(
    machine: Host, outputs: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> int | Workspace:
    """As mm: the bias is copied into the result first; native/LinearAlgebra.cpp, addmm_out_cpu.

    Where there is nothing to multiply the bias is multiplied by a tensor of ``beta``.
    """
    if mat1.numel() == 0 and outputs.numel() and beta != 0:
        return _NUMBER + outputs.element_size()
    return _matrix_product(machine, outputs, mat1, mat2, alpha)


def _rows_dense(batch: Tensor) -> bool:
    """native/LinearAlgebra.cpp, batch_items_contiguous_or_transposed."""
    rows, columns = batch.shape[-2:]
    down, across = batch.stride(-2), batch.stride(-1)
    return bool((across == 1 and down >= columns) or (down == 1 and across >= rows))


def _batched_product(
    machine: Host, outputs: Tensor, first: Tensor, second: Tensor
) -> int | Workspace:
    """native/LinearAlgebra.cpp, bmm_out_or_baddbmm_."""
    batch, rows, depth = first.shape
    columns = second.shape[2]
    size = batch * rows * depth * columns
    if size == 0:
        return 0
    if _uses_onednn(machine, first.dtype, size):
        copies = _onednn_copied(first) + _onednn_copied(second)
        first, second = (
            _dense(operand, _onednn_copied(operand) > 0) for operand in (first, second)
        )
        product = _product(machine, batch, first, second)
        return by_onednn(machine, first.dtype, copies + product.scratchpad())
    if depth * rows * columns < 400:
        return 0
    mkl = first.dtype.is_floating_point or first.dtype.is_complex
    if first.dtype in (torch.bfloat16, torch.float16):
        mkl = False
    if mkl and _rows_dense(first) and _rows_dense(second) and outputs.is_contiguous():
        return 0
    return (_copied(first) + _copied(second)) // batch


@operator("aten::bmm").workspace("cpu")
def bmm(machine: Host, outputs: Tensor, input: Tensor, mat2: Tensor) -> int | Workspace:
    """MKL reads batches of dense matrices; others are multiplied one by one, each copied."""
    return _batched_product(machine, outputs, input, mat2)


@operator("aten::baddbmm", "aten::baddbmm_").workspace("cpu")
def baddbmm(machine: Host, outputs: Tensor, batch1: Tensor, batch2: Tensor) -> int | Workspace:
    """As bmm, into a result that holds the sum's first term."""
    return _batched_product(machine, outputs, batch1, batch2)


@operator("aten::addbmm", "aten::addbmm_").workspace("cpu")
def addbmm(
    machine: Host, outputs: Tensor, batch1: Tensor, batch2: Tensor, *, alpha: float = 1
) -> int | Workspace:
    """One addmm after another; native/LinearAlgebra.cpp, addbmm_impl_."""
    if batch1.numel() == 0 or batch2.numel() == 0:
        return 0
    return _matrix_product(machine, outputs, batch1[0], batch2[0], alpha)


@operator("aten::addmv", "aten::addmv_").workspace("cpu")
def addmv(machine: Host, mat: Tensor, vec: Tensor) -> int | Workspace:
    """A copy of a matrix that gemv cannot read; native/Blas.cpp, addmv_out."""
    rows, depth = mat.shape
    if mat.numel() == 0:
        return 0
    if not _uses_onednn(machine, mat.dtype, rows * depth):
        return _copied(mat)
    copies = _onednn_copied(mat) + contiguous_copy(vec)
    column = _dense(vec, copied=True).unsqueeze(1)
    product = _product(machine, 1, _dense(mat, _onednn_copied(mat) > 0), column)
    return by_onednn(machine, mat.dtype, copies + product.scratchpad())
