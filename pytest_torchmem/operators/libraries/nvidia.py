"""cuBLAS's and cuBLASLt's workspace, buffers that stay; and cuDNN as a record's workspace function
asks it: for the trace's GPU, its answers noted.

cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``, ``setCublasWorkspace``: one buffer for each
thread and stream, taken through the caching allocator at the first product and kept until
``torch._C._cuda_clearCublasWorkspaces()``. cuBLASLt uses the same buffer
(``unified_cublas_and_lt_workspaces``) unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``. Before torch
2.12 it has one of its own by default, of cuBLAS's size at most, and both are taken.
"""

import math
import os
import re

import torch
from torch import Tensor

from pytest_torchmem.cudnn import questions
from pytest_torchmem.errors import UsageError
from pytest_torchmem.operators.workspace import Buffer, Workspace
from pytest_torchmem.targets.gpus import CUDNN, Gpu, LibraryAnswer, WorkspaceKey
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.names import TORCH_SERIES, TORCH_VERSION

_KIB = 1024
_SMALL = 4096 * _KIB * 2 + 16 * _KIB * 8
_LARGE = 4096 * _KIB * 8
_LARGE_ON = (9, 10, 12)
_LT_ALONE = 1024 * _KIB
_YES = ("1", "on", "yes", "true", "y", "t")
_UNIFIES = TORCH_VERSION >= (2, 12)
_MOST_DIGITS = 15
"""More would not fit into 63 bits, in bytes."""
_CONFIG = re.compile(r":([0-9]+):([0-9]+)")


def cublas_workspace(gpu: Gpu) -> int:
    """Return the bytes of cuBLAS's buffer; ``parseChosenWorkspaceSize``.

    32 MiB on Hopper and Blackwell, 8.125 MiB elsewhere, or what ``CUBLAS_WORKSPACE_CONFIG`` says
    (``:4096:2:16:8``: KiB and how many).
    """
    default = _LARGE if gpu.capability[0] in _LARGE_ON else _SMALL
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    sizes = _CONFIG.findall(config) if config is not None else []
    if config is None or not sizes:
        return default
    return sum(_bytes("CUBLAS_WORKSPACE_CONFIG", config, *pair) for pair in sizes)


def _bytes(variable: str, text: str, size: str, count: str = "1") -> int:
    """Return the bytes of ``count`` buffers of ``size`` KiB. Raises ``UsageError`` for what no
    memory has: torch ends there, too (``std::stoull``).
    """
    digits = len(size) + len(count)
    if digits > _MOST_DIGITS:
        raise UsageError(f"the environment variable {variable} is {text:.80}, which is too large")
    return int(size) * _KIB * int(count)


def _lt_workspace(gpu: Gpu) -> int | None:
    """Return the bytes of cuBLASLt's own buffer; None where it shares cuBLAS's."""
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if (unified is None and _UNIFIES) or (unified or "").lower() in _YES:
        return None
    size = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    is_number = size.isascii() and size.isdigit()
    alone = _bytes("CUBLASLT_WORKSPACE_SIZE", size, size) if is_number else _LT_ALONE
    return alone if unified else min(alone, cublas_workspace(gpu))


def cublaslt_workspace(gpu: Gpu) -> int:
    """Return the bytes of the buffer that cuBLASLt uses: its own, or the one it shares."""
    alone = _lt_workspace(gpu)
    return cublas_workspace(gpu) if alone is None else alone


def blas_buffer(gpu: Gpu) -> Buffer:
    """Return cuBLAS's buffer on a GPU."""
    return Buffer("cuBLAS", cublas_workspace(gpu))


def beside_buffer(gpu: Gpu, *requests: int, lt: bool = False) -> Workspace:
    """Return what a product takes: ``requests`` of its own, and the buffer that stays."""
    alone = _lt_workspace(gpu) if lt else None
    buffers = [] if alone is not None and _UNIFIES else [blas_buffer(gpu)]
    if alone is not None:
        buffers.append(Buffer("cuBLASLt", alone))
    return Workspace(requests, kept=tuple(buffer for buffer in buffers if buffer.nbytes))


class Cudnn:
    """Asks the cuDNN of a target, and then the answers that are stored for its GPU."""

    def __init__(self, target: Target, silent: bool = False) -> None:
        """Be asked for ``target``; a ``silent`` one has no answers, and notes no questions."""
        self.answers: list[LibraryAnswer] = []
        self._target = target
        self._silent = silent

    @property
    def version(self) -> questions.Version:
        """The version that answers, else the one that this torch's CUDA builds require."""
        target = self._target
        if target.cudnn is not None:
            return target.cudnn.version
        if target.calibration is not None and target.gpu is not None:
            stored = target.calibration.told_by(CUDNN, target.gpu.name)
            if stored:
                return questions.parse_version(stored)
        return questions.PINNED.get(TORCH_SERIES, max(questions.PINNED.values()))

    def ask(self, question: questions.Question) -> int | None:
        """Return the bytes of workspace that cuDNN tells; ``None`` where there is no answer."""
        target, gpu = self._target, self._target.gpu
        if self._silent or gpu is None:
            return None
        key = WorkspaceKey(question.operator, question.geometry)
        found, stored, fails = LibraryAnswer(key, None, why=target.why_no_cudnn), None, True
        if target.cudnn is not None:
            answer = target.cudnn.ask(gpu.capability, gpu.multiprocessors, question)
            version = questions.version_text(target.cudnn.version)
            engine = answer.plans[0].engine if answer.plans else -1
            found = LibraryAnswer(key, answer.workspace, version, why=answer.why, engine=engine)
            fails = answer.is_failure
        # What is stored is better than nothing.
        if fails and target.calibration is not None:
            stored = target.calibration.find(key, gpu.name, TORCH_SERIES)
        if stored is not None:
            found = LibraryAnswer(key, stored[0].workspace, stored[1].cudnn, stored=True)
        self.answers.append(found)
        return found.nbytes


def operand(tensor: Tensor, memory_format: torch.memory_format) -> questions.Operand:
    """Return a tensor as cuDNN sees it, in a convolution that is described in a format.

    ``getTensorDescriptorWithTypeVirtual`` and ``getAlignment`` of native/cudnn/Conv_v8.cpp. What
    the allocator gives is aligned; a view is as its place in the storage is.
    """
    offset = tensor.storage_offset() * tensor.element_size()
    last = memory_format in (torch.channels_last, torch.channels_last_3d)
    shape = tuple(tensor.shape)
    strides = questions.without_free_strides(shape, tensor.stride(), last)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return questions.Operand(dtype, shape, strides, math.gcd(offset, questions.ALIGNED))


def attention_operand(tensor: Tensor) -> questions.Operand:
    """Return a tensor as cuDNN sees it in attention; ``fixSizeOneDimStrideSDPA`` of MHA.cpp."""
    strides = list(tensor.stride())
    for dim, size in enumerate(tensor.shape):
        if size == 1 and strides[dim] == 0:
            strides[dim] = math.prod(strides[dim + 1 :])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return questions.Operand(dtype, tuple(tensor.shape), tuple(strides))


def prefers_mode_b() -> bool:
    """``TORCH_CUDNN_USE_HEURISTIC_MODE_B``, as ``c10::utils::check_env`` reads it."""
    return os.environ.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1"
