"""The registry of composite operators that CUDA decomposes in its own way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pytest_torchmem.operators.workspace import Buffer
from pytest_torchmem.torch_private.kernels import run_composite_implicit
from pytest_torchmem.torch_private.keys import below_autograd
from pytest_torchmem.torch_private.operators import OpOverload, is_composite_implicit
from pytest_torchmem.torch_private.patches import is_another

_F = TypeVar("_F", bound=Callable[..., Any])
_KERNELS: dict[str, Callable[..., Any]] = {}


class Trace(Protocol):
    """What a decomposition asks of the trace that it runs in, and does in it."""

    def made_before_step(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage was there before the step."""

    def working(self) -> AbstractContextManager[None]:
        """Let the caller use tensors without anything being intercepted."""

    def keep(self, buffer: Buffer, overload: OpOverload) -> None:
        """Book a library's workspace that stays and that ``overload`` makes on its first use."""


class Composite:
    """The call that a kernel stands in for: calling it runs the operator as the CPU would."""

    __slots__ = ("_args", "_kwargs", "_operator", "trace")

    def __init__(
        self, trace: Trace, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.trace = trace
        self._operator = operator
        self._args = args
        self._kwargs = kwargs

    def __call__(self) -> Any:
        """Run ATen's own composite kernel with the same arguments."""
        return self.of(*self._args, **self._kwargs)

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """Run ATen's own kernel, or for an operator that is not composite the operator itself."""
        if is_composite_implicit(self._operator):
            return run_composite_implicit(self._operator, *args, **kwargs)
        with below_autograd():
            return self._operator(*args, **kwargs)


def cuda_kernel(*names: str) -> Callable[[_F], _F]:
    """Register a function for the composite operators ``names`` (``"aten::softmax.int"``)."""

    def register(function: _F) -> _F:
        for name in names:
            if is_another(_KERNELS.get(name), function):
                raise ValueError(f"{name} already has a kernel for cuda")
            _KERNELS[name] = function
        return function

    return register


LEAVES: set[str] = set()
"""Composite operators that CUDA has a kernel for: a kernel here gives them their gradient only."""


def registered_kernels() -> dict[str, Callable[..., Any]]:
    """Return the functions registered so far, by operator."""
    return dict(_KERNELS)
