"""Losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.meta_functions import like, meta


def _reduced_in_place(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    whole = torch.add(input, target)
    if reduction == 0:
        return whole
    return whole.as_strided((), ()) if whole.numel() else whole.new_empty(())


@meta("aten::mse_loss", "aten::smooth_l1_loss")
def elementwise_loss(
    input: Tensor, target: Tensor, reduction: int = 1, *parameters: float
) -> Tensor:
    """A reduced loss keeps the storage that was made for all elements; native/Loss.cpp,
    TORCH_META_FUNC(mse_loss) resizes its output and not its storage.
    """
    return _reduced_in_place(input, target, reduction)


@meta("aten::binary_cross_entropy")
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """A reduced loss keeps the storage of all elements; native/cuda/Loss.cu,
    binary_cross_entropy_out_cuda.
    """
    return _reduced_in_place(input, input, reduction)


@meta("aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward")
def elementwise_loss_backward(
    grad_output: Tensor, input: Tensor, *rest: Any, grad_input: Tensor | None = None
) -> Tensor:
    """``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``; native/Loss.cpp."""
    return like(input) if grad_input is None else grad_input


@meta("aten::multi_margin_loss_backward")
def multi_margin_loss_backward(grad_output: Tensor, input: Tensor, *settings: Any) -> Tensor:
    """native/LossMultiMargin.cpp."""
    return like(input)


@meta("aten::multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad_output: Tensor, input: Tensor, *settings: Any) -> Tensor:
    """native/LossMultiLabelMargin.cpp."""
    return like(input)


def _ctc_loss(log_probs: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    steps, batch = log_probs.shape[0], log_probs.shape[1]
    return like(log_probs, (batch,)), like(log_probs, (batch, steps, 2 * longest + 1))


@meta("aten::_ctc_loss")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """The losses, and ``log_alpha`` for the longest target; native/LossCTC.cpp."""
    return _ctc_loss(log_probs, max(target_lengths, default=0))


@meta("aten::_ctc_loss.Tensor")
def ctc_loss_tensor(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """native/LossCTC.cpp; lengths are not known here, so ``log_alpha`` is as large as it can be."""
    return _ctc_loss(log_probs, int(targets.shape[-1]))


@meta("aten::_ctc_loss_backward")
def ctc_loss_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    """native/LossCTC.cpp: like ``log_probs``, contiguous."""
    return like(log_probs)


@meta("aten::_cudnn_ctc_loss")
def cudnn_ctc_loss(log_probs: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """native/cudnn/LossCTC.cpp: the loss of every sequence, and the gradient at once."""
    return like(log_probs, (log_probs.shape[1],)), like(log_probs)
