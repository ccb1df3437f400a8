"""What a decomposition is handed besides the arguments that it names: the call, and its trace.

Outputs of structured kernels: made before the kernel runs, with the geometry of its meta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import on_meta
from pytest_torchmem.operators.workspace import Buffer
from pytest_torchmem.step.trees import replace_tensors
from pytest_torchmem.torch_private.dispatch.kernels import run_composite_implicit
from pytest_torchmem.torch_private.dispatch.keys import below_autograd
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, is_composite_implicit


class Trace(Protocol):
    """What a decomposition may ask of the trace that it runs in."""

    def working(self) -> AbstractContextManager[None]:
        """Let tensors be used without being intercepted."""

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the fake GPU."""

    def made_before_step(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage was there before the step."""

    def keep(self, buffer: Buffer, overload: OpOverload) -> None:
        """Book a library's workspace that stays, made by ``overload`` at its first use."""


@dataclass(frozen=True, slots=True)
class GivenCall:
    """An operator and its arguments as they were given, for what hands all of them on."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    overload: OpOverload


@dataclass(frozen=True, slots=True)
class CompositeCall(GivenCall):
    """The call of a composite operator, which its path on a device stands in for."""

    trace: Trace

    def __call__(self) -> Any:
        """Run ATen's own composite kernel with the same arguments."""
        return self.of(*self.args, **self.kwargs)

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """Run ATen's own kernel, or for an operator that is not composite the operator itself."""
        if is_composite_implicit(self.overload):
            return run_composite_implicit(self.overload, *args, **kwargs)
        with below_autograd():
            return self.overload(*args, **kwargs)


def meta_result(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Return what ``operator`` returns for its arguments on ``meta``."""
    return operator(*replace_tensors(args, on_meta), **replace_tensors(kwargs, on_meta))


def outputs(call: GivenCall) -> Any:
    """Make the outputs of a structured operator."""
    return replace_tensors(meta_result(call.overload, *call.args, **call.kwargs), empty_as)


def empty_as(geometry: Tensor) -> Tensor:
    """Make a tensor with the geometry of one on ``meta``."""
    return torch.empty_strided(geometry.shape, geometry.stride(), dtype=geometry.dtype)


def proxy(out: Tensor, geometry: Tensor) -> Tensor:
    """Return what a structured kernel writes to instead of ``out``: a temporary where the strides
    are not those it sets; maybe_create_proxy in torchgen/dest/register_dispatch_key.py.
    """
    return out if out.stride() == geometry.stride() else empty_as(geometry)
