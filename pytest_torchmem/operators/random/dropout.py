"""Dropout: one kernel with a boolean mask on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import operator


@operator("aten::dropout").path("cuda")
def dropout(call: CompositeCall, input: Tensor, p: float, train: bool) -> Any:
    """``native_dropout`` in training with 0 < p < 1; native/Dropout.cpp, dropout."""
    if train and 0 < p < 1 and input.numel() > 0:
        return torch.native_dropout(input, p, train)[0]
    return call()
