"""Matrix products on the CPU: operands copied for BLAS, and oneDNN's scratchpad in bfloat16.

What MKL packs for itself is not seen by PyTorch's allocator and not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.host import Host
from pytest_torchmem.profiler.workspace import workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import dense_bytes

_SMALLEST = 16 * 16 * 16
"""``mkldnn_gemm_min_size``: below it oneDNN is not asked."""

_ROWS, _DEPTH, _COLUMNS = 256, 512, 64
"""The largest block of a result that one thread works on, and the depth it goes at a time."""


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
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride(-2), matrix.stride(-1)
    dense = (across == 1 and down == columns) or (down == 1 and across == rows)
    if matrix.dim() == 3:
        dense = dense and matrix.stride(0) == rows * columns
    return 0 if dense else dense_bytes(matrix)


def _uses_onednn(machine: Host, dtype: torch.dtype, size: int) -> bool:
    """native/mkldnn/Matmul.cpp, use_mkldnn_bf16_matmul."""
    if dtype != torch.bfloat16 or not machine.onednn or machine.capability != "AVX512":
        return False
    return size > _SMALLEST


def onednn_scratchpad(
    machine: Host, rows: int, depth: int, columns: int, batch: int = 1, transposed: bool = False
) -> int:
    """Blocks of the result in float, of the right operand repacked, and of a transposed left one.

    Read off oneDNN 3.12 (brgemm_matmul) on AVX512: exact for large operands that lie in rows;
    transposed left operands of a depth beyond 512 take up to several times as much.
    """
    across = -(-columns // _COLUMNS)
    threads = machine.threads
    split = -(-threads // max(1, min(across * batch, threads)))
    block = min(_ROWS, -(-rows // split))
    depth = min(-(-depth // 32) * 32, _DEPTH)
    used = min(threads, batch * across * -(-rows // block))
    each = block * _COLUMNS * 4 + depth * _COLUMNS * 2 + 640
    left = 0
    if transposed:
        left = rows * depth * 2 if split > 1 else used * block * depth * 2
        left += 128
    return 384 + used * each + left


def _matrix_product(machine: Host, first: Tensor, second: Tensor) -> int:
    rows, depth = first.shape
    columns = second.shape[1]
    if first.numel() == 0 or second.numel() == 0:
        return 0
    if _uses_onednn(machine, first.dtype, rows * depth * columns):
        transposed = first.stride(0) == 1 and first.stride(1) == rows and rows > 1 and depth > 1
        copies = _onednn_copied(first) + _onednn_copied(second)
        return copies + onednn_scratchpad(
            machine, rows, depth, columns, transposed=bool(transposed)
        )
    return _copied(first) + _copied(second)


@workspace("aten::mm", device="cpu")
def mm(machine: Host, outputs: Tensor, first: Tensor, second: Tensor) -> int:
    """Copies of operands that BLAS cannot read; native/LinearAlgebra.cpp, mm_out_cpu."""
    return _matrix_product(machine, first, second)


@workspace("aten::addmm", "aten::addmm_", device="cpu")
def addmm(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> int:
    """As mm: the bias is copied into the result first; native/LinearAlgebra.cpp, addmm_out_cpu."""
    return _matrix_product(machine, first, second)


def _rows_dense(batch: Tensor) -> bool:
    """native/LinearAlgebra.cpp, batch_items_contiguous_or_transposed."""
    rows, columns = batch.shape[-2:]
    down, across = batch.stride(-2), batch.stride(-1)
    return bool((across == 1 and down >= columns) or (down == 1 and across >= rows))


def _batched_product(machine: Host, outputs: Tensor, first: Tensor, second: Tensor) -> int:
    """native/LinearAlgebra.cpp, bmm_out_or_baddbmm_."""
    batch, rows, depth = first.shape
    columns = second.shape[2]
    size = batch * rows * depth * columns
    if size == 0:
        return 0
    if _uses_onednn(machine, first.dtype, size):
        copies = _onednn_copied(first) + _onednn_copied(second)
        return copies + onednn_scratchpad(machine, rows, depth, columns, batch)
    if depth * rows * columns < 400:
        return 0
    mkl = first.dtype.is_floating_point or first.dtype.is_complex
    if first.dtype in (torch.bfloat16, torch.float16):
        mkl = False
    if mkl and _rows_dense(first) and _rows_dense(second) and outputs.is_contiguous():
        return 0
    return (_copied(first) + _copied(second)) // batch


@workspace("aten::bmm", device="cpu")
def bmm(machine: Host, outputs: Tensor, first: Tensor, second: Tensor) -> int:
    """MKL reads batches of dense matrices; others are multiplied one by one, each copied."""
    return _batched_product(machine, outputs, first, second)


@workspace("aten::baddbmm", "aten::baddbmm_", device="cpu")
def baddbmm(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> int:
    """As bmm, into a result that holds the sum's first term."""
    return _batched_product(machine, outputs, first, second)


@workspace("aten::addbmm", "aten::addbmm_", device="cpu")
def addbmm(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> int:
    """One addmm after another; native/LinearAlgebra.cpp, addbmm_impl_."""
    if first.numel() == 0 or second.numel() == 0:
        return 0
    return _matrix_product(machine, first[0], second[0])


@workspace("aten::addmv", "aten::addmv_", device="cpu")
def addmv(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    matrix: Tensor,
    vector: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> int:
    """A copy of a matrix that gemv cannot read; native/Blas.cpp, addmv_out."""
    rows, depth = matrix.shape
    if matrix.numel() == 0:
        return 0
    if _uses_onednn(machine, matrix.dtype, rows * depth):
        copies = _onednn_copied(matrix)
        return copies + onednn_scratchpad(machine, 1, depth, rows)
    return _copied(matrix)
