"""Triton kernels, which cannot be launched on tensors without memory."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import Replacements


def triton_launches(trace: TraceContext) -> Replacements:
    """Raise a clear error where the traced program launches a triton kernel.

    With a GPU present the launch would read addresses that do not exist, and take the CUDA context
    of the process with it.
    """
    kernel: Any = _kernel_class()
    if kernel is None:
        return []
    original = kernel.run

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        # ``torch.library.triton_op`` finds an operator's geometry by running its body, with the
        # launch, on tensors of ``meta``.
        if trace.on_thread() and trace.inside:
            return None
        if trace.off():
            return original(function, *args, **kwargs)
        name = getattr(function, "__name__", None) or getattr(function, "_fn_name", "kernel")
        raise UnsupportedOperatorError(
            f"{trace.user_line()}: the triton kernel {name!r} cannot run in a trace, whose tensors "
            "have no memory. Launch it from a function decorated with "
            f'@torch.library.custom_op("mylib::{name}", mutates_args=...) and describe that '
            "operator's outputs with @<operator>.register_fake: the trace then counts the outputs "
            "without running the kernel"
        )

    return [(kernel, {"run": run})]


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
