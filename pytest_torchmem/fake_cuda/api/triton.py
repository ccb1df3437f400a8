"""Triton kernels: what to do instead of launching one on tensors without memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced


@contextmanager
def triton_refused(trace: TraceContext) -> Iterator[None]:
    """Raise a clear error where the traced program launches a triton kernel.

    With a GPU present the launch would read addresses that do not exist, and take the CUDA context
    of the process with it.
    """
    kernel: Any = _kernel_class()
    if kernel is None:
        yield
        return
    original = kernel.run

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        if trace.off():
            # ``torch.library.triton_op`` finds an operator's geometry by running its body, with
            # the launch, on tensors of ``meta``.
            if trace.on_thread() and trace.inside:
                return None
            return original(function, *args, **kwargs)
        name = getattr(function, "__name__", None) or getattr(function, "_fn_name", "kernel")
        raise UnsupportedOperatorError(
            f"{trace.user_line()}: the triton kernel {name!r} was launched on tensors "
            "of a trace, which have no memory. Launch it from a function that is decorated with "
            f'@torch.library.custom_op("mylib::{name}", mutates_args=...), and give that operator '
            "the geometry of its outputs with @<operator>.register_fake: the trace then books the "
            "outputs and does not run the kernel"
        )

    with replaced(kernel, run=run):
        yield


def _kernel_class() -> Any:
    """Return ``triton.JITFunction``, or None where triton is not installed."""
    if "triton" not in sys.modules and not _is_installed():
        return None
    try:
        return import_module("triton.runtime.jit").JITFunction
    except ImportError:
        return None


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None
