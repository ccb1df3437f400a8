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
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Buffer, Workspace
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


@operator("aten::mm").workspace("cuda")
def mm(machine: Gpu, input: Tensor, mat2: Tensor) -> Workspace | int:
    """cuBLAS, and copies of operands; native/cuda/Blas.cpp, ``addmm_out_cuda_impl``."""
    if not _computes(input, mat2):
        return 0
    return product(machine, matrix_copy(input), matrix_copy(mat2))


@operator("aten::addmm", "aten::_addmm_activation", "aten::addmm_").workspace("cuda")
def addmm(machine: Gpu, input: Tensor, mat1: Tensor, mat2: Tensor) -> Workspace | int:
    """CuBLASLt with the bias as its epilogue, else cuBLAS; ``isInputCompliesAddmmCudaLt``.

    Where it is not, the bias is copied into the result: nothing more.
    """
    if not _computes(mat1, mat2):
        return 0
    epilogue = input.dim() == 1 and input.shape[0] == mat2.shape[1] and input.is_contiguous()
    lt = epilogue and mat1.dtype in _LT_TYPES
    return product(machine, matrix_copy(mat1), matrix_copy(mat2), lt=lt)


@operator("aten::bmm").workspace("cuda")
def bmm(machine: Gpu, outputs: Tensor, input: Tensor, mat2: Tensor) -> Workspace | int:
    """cuBLAS, and copies of operands; native/cuda/Blas.cpp, ``bmm_out_cuda_impl``."""
    if not _computes(input, mat2):
        return 0
    return product(machine, *_batch_copies(outputs, input, mat2))


@operator("aten::baddbmm", "aten::baddbmm_").workspace("cuda")
def baddbmm(machine: Gpu, outputs: Tensor, batch1: Tensor, batch2: Tensor) -> Workspace | int:
    """cuBLAS, the bias copied into the result; native/cuda/Blas.cpp, ``bmm_out_cuda_impl``."""
    if not _computes(batch1, batch2):
        return 0
    return product(machine, *_batch_copies(outputs, batch1, batch2))


def _batch_copies(result: Tensor, first: Tensor, second: Tensor) -> tuple[int, int]:
    """The result, being dense, is read as transposed: the operands change places."""
    _, rows, inner = first.shape
    columns = second.shape[2]
    return (batch_copy(first, rows, inner), batch_copy(second, inner, columns))


@operator("aten::addmv", "aten::addmv_").workspace("cuda")
def addmv(machine: Gpu, tensors: list[Tensor]) -> Workspace | int:
    """A vector without stride is copied; native/cuda/Blas.cpp, ``addmv_out_cuda``."""
    matrix, vector = tensors[-2:]
    if not _computes(matrix):
        return 0
    rows, columns = matrix.shape
    by_row, by_column = matrix.stride()
    fits = (by_row == 1 and by_column >= max(1, rows)) or (
        by_column == 1 and by_row >= max(1, columns)
    )
    copy = 0 if fits else dense_bytes(matrix)
    return product(machine, copy, dense_bytes(vector) if vector.stride(0) == 0 else 0)


@operator("aten::dot", "aten::vdot", "aten::addbmm", "aten::addbmm_").workspace("cuda")
def buffer_alone(machine: Gpu) -> Workspace:
    """The handle, and so its buffer; native/cuda/Blas.cpp, ``dot_cuda``; ``addbmm`` is a product
    into the result for every matrix, native/LinearAlgebra.cpp, ``addbmm_impl_``.
    """
    return product(machine)


@operator("aten::addr").workspace("cuda")
def addr() -> int:
    """A pointwise kernel; native/cuda/LinearAlgebra.cu, ``addr_kernel_cuda``."""
    return 0


@operator("aten::_int_mm", "aten::_scaled_mm").workspace("cuda")
def lt_product(
    machine: Gpu,
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Workspace | int:
    """cuBLASLt; scales of rows or blocks go to CUTLASS on Hopper, which takes its own.

    native/cuda/Blas.cpp, ``_int_mm_cuda``; native/cuda/ScaledBlas.cpp, ``_scaled_mm_out_cuda``.
    """
    if not _computes(input, mat2):
        return 0
    found = product(machine, lt=True)
    if any(scale is not None and scale.numel() > 1 for scale in (scale_a, scale_b)):
        return Workspace((), Confidence.UNKNOWN, found.kept)
    return found


@operator("aten::_grouped_mm").workspace("cuda")
def grouped_mm(machine: Gpu, input: Tensor) -> Workspace:
    """A product for every group; in bfloat16 on Hopper and Blackwell CUTLASS, with its own.

    native/cuda/GroupedBlas.cpp, ``_grouped_mm_cuda``.
    """
    if machine.capability in ((9, 0), (10, 0)) and input.dtype == torch.bfloat16:
        return Workspace((), Confidence.UNKNOWN)
    return product(machine)
