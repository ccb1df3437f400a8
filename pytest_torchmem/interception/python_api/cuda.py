"""A program that asks for cuda in a trace on the CPU: told so, on every machine alike."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from pytest_torchmem.errors import NoCudaError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.conversion import NAME_DEVICE
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.torch_private.patching import replaceable

_CPU = torch.device("cpu")
"""What a build without an accelerator says that its accelerator is (``at::getAccelerator``)."""


def asked_for_cuda(line: str) -> str:
    """Return what a program is told that asks for cuda at a line."""
    return f"{line}: the program asks for cuda, and the trace is on cpu: {NAME_DEVICE}"


def cuda_refused() -> AbstractContextManager[None]:
    """Let the machine be one without CUDA, which programs and optimizers ask about.

    Raises ``NoCudaError`` where C++ or ``torch.cuda`` is about to initialise CUDA nevertheless.
    """
    return LASTING.layer("no cuda", _functions)


def _functions(trace: TraceContext) -> Layer[None]:
    original: Any = replaceable.lazy_init.original
    compiled: Any = replaceable.cuda_is_compiled.original
    accelerator: Any = replaceable.accelerator.original
    accelerator_or_none: Any = replaceable.accelerator_or_none.original

    def lazy_init() -> None:
        if trace.off():
            original()
            return
        raise NoCudaError(asked_for_cuda(trace.user_line()))

    def is_compiled() -> bool:
        return trace.off() and bool(compiled())

    def get_accelerator(*args: Any) -> Any:
        return accelerator(*args) if trace.off() else _CPU

    def get_accelerator_or_none() -> Any:
        return accelerator_or_none() if trace.off() else None

    replaced = (
        replaceable.lazy_init.by(lazy_init),
        replaceable.cuda_is_compiled.by(is_compiled),
        replaceable.accelerator.by(get_accelerator),
        replaceable.accelerator_or_none.by(get_accelerator_or_none),
    )
    return Layer([*replaced], None)
