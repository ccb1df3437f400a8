"""The registry of composite operators that CUDA decomposes in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_KERNELS: dict[str, Callable[..., Any]] = {}

Composite = Callable[[], Any]


def cuda_kernel(name: str) -> Callable[[_F], _F]:
    """Register a function for the composite operator ``name`` (``"aten::softmax.int"``)."""

    def register(function: _F) -> _F:
        if name in _KERNELS:
            raise ValueError(f"{name} already has a kernel for cuda")
        _KERNELS[name] = function
        return function

    return register


def registered_kernels() -> dict[str, Callable[..., Any]]:
    """Return the functions registered so far, by operator."""
    return dict(_KERNELS)
