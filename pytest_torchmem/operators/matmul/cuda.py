"""Matrix products: cuBLAS's workspace, which stays, and copies of operands it cannot read.

cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``, ``setCublasWorkspace``: one buffer for each
thread and stream, taken through the caching allocator at the first product and kept until
``torch._C._cuda_clearCublasWorkspaces()``. cuBLASLt uses the same buffer
(``unified_cublas_and_lt_workspaces``) unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``.
"""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import dense_bytes
from pytest_torchmem.operators.workspace import Buffer, Workspace, workspace
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.targets.gpus import Gpu

_KIB = 1024
_SMALL = 4096 * _KIB * 2 + 16 * _KIB * 8
_LARGE = 4096 * _KIB * 8
_LARGE_ON = (9, 10, 12)
_LT_ALONE = 1024 * _KIB
_CONFIG = re.compile(r":([0-9]+):([0-9]+)")
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cublas_workspace(gpu: Gpu) -> int:
    """Return the bytes of cuBLAS's buffer; ``parseChosenWorkspaceSize``.

    32 MiB on Hopper and Blackwell, 8.125 MiB elsewhere, or what ``CUBLAS_WORKSPACE_CONFIG`` says
    (``:4096:2:16:8``: KiB and how many).
    """
    default = _LARGE if gpu.capability[0] in _LARGE_ON else _SMALL
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    sizes = _CONFIG.findall(config) if config is not None else []
    return sum(int(size) * _KIB * int(count) for size, count in sizes) if sizes else default


def _lt_workspace() -> int | None:
    """Return the bytes of cuBLASLt's own buffer; None where it shares cuBLAS's."""
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1").lower()
    if unified in ("1", "on", "yes", "true", "y", "t"):
        return None
    size = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return int(size) * _KIB if size.isdigit() else _LT_ALONE


def cublaslt_workspace(gpu: Gpu) -> int:
    """Return the bytes of the buffer that cuBLASLt uses: its own, or the one it shares."""
    alone = _lt_workspace()
    return cublas_workspace(gpu) if alone is None else alone


def product(gpu: Gpu, *copies: int, lt: bool = False) -> Workspace:
    """Return what a product takes: the buffer that stays, and copies of operands."""
    alone = _lt_workspace() if lt else None
    buffer = Buffer("cuBLASLt", alone) if alone is not None else blas_buffer(gpu)
    return Workspace(copies, kept=(buffer,) if buffer.nbytes else ())


def blas_buffer(gpu: Gpu) -> Buffer:
    """Return cuBLAS's buffer on a GPU."""
    return Buffer("cuBLAS", cublas_workspace(gpu))


def matrix_copy(matrix: Tensor) -> int:
    """Return the bytes of the copy of a matrix that cuBLAS cannot read as it lies.

    native/cuda/Blas.cpp, ``prepare_matrix_for_cublas``: one stride has to be 1 and the other at
    least the number of elements it steps over.
    """
    rows, columns = matrix.shape
    by_row, by_column = matrix.stride()
    if matrix.is_contiguous() or matrix.t().is_contiguous():
        return 0
    if by_row == 1 and by_column >= max(1, rows):
        return 0
    if by_column == 1 and by_row >= max(1, columns):
        return 0
    return dense_bytes(matrix)


def batch_copy(matrices: Tensor, rows: int, columns: int) -> int:
    """Return the bytes of the copy of a batch that cuBLAS cannot read as it lies.

    native/cuda/Blas.cpp, ``prepare_batch_matrix_for_cublas``; ``rows`` and ``columns`` are those of
    the result (transposed where the result is) and of the sum.
    """
    _, by_row, by_column = matrices.stride()
    if by_row == 1 and by_column >= max(1, rows):
        return 0
    if by_column == 1 and by_row >= max(1, columns):
        return 0
    return 0 if matrices.is_contiguous() else dense_bytes(matrices)


def _computes(*tensors: Tensor) -> bool:
    return all(tensor.numel() for tensor in tensors)


@workspace("aten::mm", device="cuda")
def mm(gpu: Gpu, outputs: Tensor, first: Tensor, second: Tensor, *rest: object) -> Workspace | int:
    """cuBLAS, and copies of operands; native/cuda/Blas.cpp, ``addmm_out_cuda_impl``."""
    if not _computes(first, second):
        return 0
    return product(gpu, matrix_copy(first), matrix_copy(second))


@workspace("aten::addmm", "aten::_addmm_activation", "aten::addmm_", device="cuda")
def addmm(
    gpu: Gpu,
    outputs: Tensor,
    bias: Tensor,
    first: Tensor,
    second: Tensor,
    *rest: object,
    **scales: object,
) -> Workspace | int:
    """CuBLASLt with the bias as its epilogue, else cuBLAS; ``isInputCompliesAddmmCudaLt``.

    Where it is not, the bias is copied into the result: nothing more.
    """
    if not _computes(first, second):
        return 0
    epilogue = bias.dim() == 1 and bias.shape[0] == second.shape[1] and bias.is_contiguous()
    lt = epilogue and first.dtype in _LT_TYPES
    return product(gpu, matrix_copy(first), matrix_copy(second), lt=lt)


@workspace("aten::bmm", device="cuda")
def bmm(gpu: Gpu, outputs: Tensor, first: Tensor, second: Tensor, *rest: object) -> Workspace | int:
    """cuBLAS, and copies of operands; native/cuda/Blas.cpp, ``bmm_out_cuda_impl``."""
    if not _computes(first, second):
        return 0
    return product(gpu, *_batch_copies(outputs, first, second))


@workspace("aten::baddbmm", "aten::baddbmm_", device="cuda")
def baddbmm(
    gpu: Gpu,
    outputs: Tensor,
    bias: Tensor,
    first: Tensor,
    second: Tensor,
    *rest: object,
    **_: object,
) -> Workspace | int:
    """cuBLAS, the bias copied into the result; native/cuda/Blas.cpp, ``bmm_out_cuda_impl``."""
    if not _computes(first, second):
        return 0
    return product(gpu, *_batch_copies(outputs, first, second))


def _batch_copies(result: Tensor, first: Tensor, second: Tensor) -> tuple[int, int]:
    """The result, being dense, is read as transposed: the operands change places."""
    _, rows, inner = first.shape
    columns = second.shape[2]
    return (batch_copy(first, rows, inner), batch_copy(second, inner, columns))


@workspace("aten::addmv", "aten::addmv_", "aten::mv", device="cuda")
def addmv(gpu: Gpu, outputs: Tensor, *operands: Tensor, **scales: object) -> Workspace | int:
    """A vector without stride is copied; native/cuda/Blas.cpp, ``addmv_out_cuda``."""
    matrix, vector = operands[-2:]
    if not _computes(matrix):
        return 0
    rows, columns = matrix.shape
    by_row, by_column = matrix.stride()
    fits = (by_row == 1 and by_column >= max(1, rows)) or (
        by_column == 1 and by_row >= max(1, columns)
    )
    copy = 0 if fits else dense_bytes(matrix)
    return product(gpu, copy, dense_bytes(vector) if vector.stride(0) == 0 else 0)


@workspace("aten::dot", "aten::vdot", "aten::addbmm", "aten::addbmm_", device="cuda")
def buffer_alone(gpu: Gpu, outputs: Tensor, *operands: Tensor, **scales: object) -> Workspace:
    """The handle, and so its buffer; native/cuda/Blas.cpp, ``dot_cuda``; ``addbmm`` is a product
    into the result for every matrix, native/LinearAlgebra.cpp, ``addbmm_impl_``.
    """
    return product(gpu)


@workspace("aten::addr", "aten::addr_", device="cuda")
def addr(gpu: Gpu, outputs: Tensor, *operands: Tensor, **scales: object) -> int:
    """A pointwise kernel; native/cuda/LinearAlgebra.cu, ``addr_kernel_cuda``."""
    return 0


@workspace("aten::_int_mm", "aten::_scaled_mm", device="cuda")
def lt_product(
    gpu: Gpu, outputs: Tensor, first: Tensor, second: Tensor, *scales: object, **options: object
) -> Workspace | int:
    """cuBLASLt; scales of rows or blocks go to CUTLASS on Hopper, which takes its own.

    native/cuda/Blas.cpp, ``_int_mm_cuda``; native/cuda/ScaledBlas.cpp, ``_scaled_mm_out_cuda``.
    """
    if not _computes(first, second):
        return 0
    found = product(gpu, lt=True)
    if any(isinstance(scale, Tensor) and scale.numel() > 1 for scale in scales[:2]):
        return Workspace((), Confidence.UNKNOWN, found.kept)
    return found


@workspace("aten::_grouped_mm", device="cuda")
def grouped_mm(
    gpu: Gpu, outputs: Tensor, first: Tensor, second: Tensor, *rest: object, **options: object
) -> Workspace:
    """A product for every group; in bfloat16 on Hopper and Blackwell CUTLASS, with its own.

    native/cuda/GroupedBlas.cpp, ``_grouped_mm_cuda``.
    """
    if gpu.capability in ((9, 0), (10, 0)) and first.dtype == torch.bfloat16:
        return Workspace((), Confidence.UNKNOWN)
    return product(gpu)
