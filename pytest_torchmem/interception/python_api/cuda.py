"""A program that asks for cuda in a trace on the CPU: told so, on every machine alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_torchmem.errors import NoCudaError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.conversion import NAME_DEVICE
from pytest_torchmem.torch_private import replaceable
from pytest_torchmem.torch_private.patches import replaced_all


def asked_for_cuda(line: str) -> str:
    """Return what a program is told that asks for cuda at a line."""
    return f"{line}: the program asks for cuda, and the trace is on cpu: {NAME_DEVICE}"


@contextmanager
def cuda_refused(trace: TraceContext) -> Iterator[None]:
    """Raise ``NoCudaError`` where C++ or ``torch.cuda`` is about to initialise CUDA."""
    original: Any = replaceable.lazy_init.original

    def lazy_init() -> None:
        __tracebackhide__ = True
        if trace.off():
            original()
            return
        raise NoCudaError(asked_for_cuda(trace.user_line()))

    with replaced_all([replaceable.lazy_init.by(lazy_init)]):
        yield
