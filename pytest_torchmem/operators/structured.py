"""Outputs of structured kernels: made before the kernel runs, with the geometry of its meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.geometry import on_meta
from pytest_torchmem.step.trees import replace_tensors
from pytest_torchmem.torch_private.dispatch.operators import OpOverload


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
