"""Dropout: one kernel with a boolean mask on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.decompositions import Composite, cuda_kernel
from pytest_torchmem.targets.gpus import Gpu


@cuda_kernel("aten::dropout")
def dropout(gpu: Gpu, composite: Composite, input: Tensor, p: float, train: bool) -> Any:
    """``native_dropout`` in training with 0 < p < 1; native/Dropout.cpp, dropout."""
    if train and 0 < p < 1 and input.numel() > 0:
        return torch.native_dropout(input, p, train)[0]
    return composite()
