"""Grids, extremes and optimizers in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.registry import operator


@operator("aten::glu_jvp").meta()
def like_first(tensors: list[Tensor]) -> Tensor:
    """Like the first argument; native/GatedLinearUnit.cpp."""
    return torch.empty_like(tensors[0])


@operator("aten::glu_backward_jvp").meta()
def contiguous_like_first(tensors: list[Tensor]) -> Tensor:
    """Contiguous, like the first argument; native/GatedLinearUnit.cpp."""
    return like(tensors[0])


@operator(
    "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
).meta()
def in_place() -> None:
    """Parameters and states are updated where they are; native/cuda/fused_adam_impl.cu, …"""
