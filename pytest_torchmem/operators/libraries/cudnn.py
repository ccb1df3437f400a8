"""cuDNN as a record's workspace function asks it: for the trace's GPU, its answers noted."""

import math
import os

import torch
from torch import Tensor

from pytest_torchmem.cudnn.questions import (
    ALIGNED,
    PINNED,
    Operand,
    Question,
    Version,
    parse_version,
    version_text,
    without_free_strides,
)
from pytest_torchmem.targets.calibration import CUDNN, LibraryAnswer, WorkspaceKey
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.names import TORCH_SERIES


class Cudnn:
    """Asks the cuDNN of a target, and then the answers that are stored for its GPU."""

    def __init__(self, target: Target, silent: bool = False) -> None:
        """Be asked for ``target``; a ``silent`` one has no answers, and notes no questions."""
        self.answers: list[LibraryAnswer] = []
        self._target = target
        self._silent = silent

    @property
    def version(self) -> Version:
        """The version that answers, else the one that this torch's CUDA builds require."""
        target = self._target
        if target.cudnn is not None:
            return target.cudnn.version
        if target.calibration is not None and target.gpu is not None:
            stored = target.calibration.told_by(CUDNN, target.gpu.name)
            if stored:
                return parse_version(stored)
        return PINNED.get(TORCH_SERIES, max(PINNED.values()))

    def ask(self, question: Question) -> int | None:
        """Return the bytes of workspace that cuDNN tells; ``None`` where there is no answer."""
        if self._silent or self._target.gpu is None:
            return None
        key = WorkspaceKey(question.operator, question.geometry)
        found = self._asked(question, key)
        self.answers.append(found)
        return found.nbytes

    def _asked(self, question: Question, key: WorkspaceKey) -> LibraryAnswer:
        target, gpu = self._target, self._target.gpu
        assert gpu is not None
        failed = None
        if target.cudnn is not None:
            answer = target.cudnn.ask(gpu.capability, gpu.multiprocessors, question)
            version = version_text(target.cudnn.version)
            engine = answer.plans[0].engine if answer.plans else -1
            found = LibraryAnswer(key, answer.workspace, version, why=answer.why, engine=engine)
            if not answer.is_failure:
                return found
            failed = found  # what is stored is better than nothing
        if target.calibration is not None:
            stored = target.calibration.find(key, gpu.name, TORCH_SERIES)
            if stored is not None:
                figure, setup = stored
                return LibraryAnswer(key, figure.workspace, setup.cudnn, stored=True)
        return failed or LibraryAnswer(key, None, why=target.why_no_cudnn)


def operand(tensor: Tensor, memory_format: torch.memory_format) -> Operand:
    """Return a tensor as cuDNN sees it, in a convolution that is described in a format.

    ``getTensorDescriptorWithTypeVirtual`` and ``getAlignment`` of native/cudnn/Conv_v8.cpp. What
    the allocator gives is aligned; a view is as its place in the storage is.
    """
    offset = tensor.storage_offset() * tensor.element_size()
    last = memory_format in (torch.channels_last, torch.channels_last_3d)
    shape = tuple(tensor.shape)
    strides = without_free_strides(shape, tensor.stride(), last)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Operand(dtype, shape, strides, math.gcd(offset, ALIGNED))


def attention_operand(tensor: Tensor) -> Operand:
    """Return a tensor as cuDNN sees it in attention; ``fixSizeOneDimStrideSDPA`` of MHA.cpp."""
    strides = list(tensor.stride())
    for dim, size in enumerate(tensor.shape):
        if size == 1 and strides[dim] == 0:
            strides[dim] = math.prod(strides[dim + 1 :])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Operand(dtype, tuple(tensor.shape), tuple(strides))


def prefers_mode_b() -> bool:
    """``TORCH_CUDNN_USE_HEURISTIC_MODE_B``, as ``c10::utils::check_env`` reads it."""
    return os.environ.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1"
