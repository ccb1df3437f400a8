"""Losses that look at the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import operator

_MEAN, _SUM = 1, 2
"""``at::Reduction``."""
_LONGEST_CUDNN_TARGET = 255


@operator("aten::ctc_loss.IntList").path("cuda")
def ctc_loss(
    call: CompositeCall,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Any:
    """CuDNN's loss, or the native one of targets moved to the GPU; native/LossCTC.cpp, ctc_loss.

    The reduction is that of ``ctc_loss_impl``.
    """
    if not _cudnn_takes(log_probs, targets, input_lengths, target_lengths, blank):
        targets = targets.to(log_probs.device, torch.int64)
        return call.of(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    losses = torch.ops.aten._cudnn_ctc_loss.default(
        log_probs, targets, input_lengths, target_lengths, blank, True, zero_infinity
    )[0]
    if reduction == _MEAN:
        lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
        return (losses / lengths.clamp_min(1)).mean()
    return losses.sum() if reduction == _SUM else losses


def _cudnn_takes(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int,
) -> bool:
    """Return whether cuDNN takes the loss; native/cudnn/LossCTC.cpp, ``_use_cudnn_ctc_loss``."""
    return (
        torch.backends.cudnn.enabled
        and blank == 0
        and targets.dim() == 1
        and targets.dtype is torch.int32
        and targets.device.type == "cpu"
        and targets.is_contiguous()
        and log_probs.dim() == 3
        and log_probs.dtype is torch.float32
        and all(length == log_probs.size(0) for length in input_lengths)
        and len(input_lengths) == len(target_lengths)
        and all(
            target <= min(length, _LONGEST_CUDNN_TARGET)
            for target, length in zip(target_lengths, input_lengths, strict=True)
        )
    )


@operator("aten::ctc_loss.Tensor").path("cuda")
def ctc_loss_tensor(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> Any:
    """The lengths are brought to the host; native/LossCTC.cpp, ``ctc_loss``."""
    lengths = [
        lengths.to(torch.device("cpu"), torch.int64).tolist()
        for lengths in (input_lengths, target_lengths)
    ]
    return torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, *lengths, blank, reduction, zero_infinity
    )
