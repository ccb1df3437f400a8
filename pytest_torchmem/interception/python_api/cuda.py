"""A program that asks for cuda in a trace on the CPU: told so, on every machine alike."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from pytest_torchmem.errors import NoCudaError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.conversion import NAME_DEVICE
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.torch_private.patching import replaceable


def asked_for_cuda(line: str) -> str:
    """Return what a program is told that asks for cuda at a line."""
    return f"{line}: the program asks for cuda, and the trace is on cpu: {NAME_DEVICE}"


def cuda_refused() -> AbstractContextManager[None]:
    """Raise ``NoCudaError`` where C++ or ``torch.cuda`` is about to initialise CUDA."""
    return LASTING.layer("no cuda", _functions)


def _functions(trace: TraceContext) -> Layer[None]:
    original: Any = replaceable.lazy_init.original

    def lazy_init() -> None:
        __tracebackhide__ = True
        if trace.off():
            original()
            return
        raise NoCudaError(asked_for_cuda(trace.user_line()))

    return Layer([replaceable.lazy_init.by(lazy_init)], None)
