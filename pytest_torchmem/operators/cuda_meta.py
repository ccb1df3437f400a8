"""Geometry of CUDA operators' outputs that ``meta`` does not know, or knows wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator


@operator("aten::log_sigmoid_forward").meta("cuda")
def log_sigmoid_forward(input: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer is the CPU's only; native/cuda/ActivationLogSigmoidKernel.cu."""
    return torch.empty_like(input), input.new_empty((0,))
