"""Geometry of CUDA operators' outputs that ``meta`` does not know, or knows wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator


@operator("aten::log_sigmoid_forward").meta("cuda")
def log_sigmoid_forward(input: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer is the CPU's only; native/cuda/ActivationLogSigmoidKernel.cu."""
    return torch.empty_like(input), input.new_empty((0,))


@operator("aten::_ctc_loss").meta("cuda")
def ctc_loss(log_probs: Tensor, target_lengths: Any) -> tuple[Tensor, Tensor]:
    """The losses and their logarithms by step and label; native/cuda/LossCTC.cu, ctc_loss_gpu."""
    steps, batch, _ = log_probs.shape
    labels = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, labels))
