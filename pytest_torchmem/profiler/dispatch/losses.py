"""Losses that look at the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.catalogue import Gpu
from pytest_torchmem.profiler.dispatch.registry import Composite, cuda_kernel


@cuda_kernel("aten::ctc_loss.IntList", "aten::ctc_loss.Tensor")
def ctc_loss(
    gpu: Gpu,
    composite: Composite,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """Targets on the host are moved to the GPU; native/LossCTC.cpp, ctc_loss.

    cuDNN's loss, which only takes 32-bit targets of one dimension on the host, is not modelled.
    """
    targets = targets.to(log_probs.device, torch.int64)
    return composite.of(
        log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
    )
