"""Losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.registry import operator


def _reduced_in_place(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    whole = torch.add(input, target)
    if reduction == 0:
        return whole
    return whole.as_strided((), ()) if whole.numel() else whole.new_empty(())


@operator("aten::mse_loss", "aten::smooth_l1_loss").meta()
def elementwise_loss(input: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """A reduced loss keeps the storage that was made for all elements; native/Loss.cpp,
    TORCH_META_FUNC(mse_loss) resizes its output and not its storage.
    """
    return _reduced_in_place(input, target, reduction)


@operator("aten::binary_cross_entropy").meta()
def binary_cross_entropy(input: Tensor, reduction: int = 1) -> Tensor:
    """A reduced loss keeps the storage of all elements; native/cuda/Loss.cu,
    binary_cross_entropy_out_cuda.
    """
    return _reduced_in_place(input, input, reduction)


@operator(
    "aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward"
).meta()
def elementwise_loss_backward(input: Tensor, *, grad_input: Tensor | None = None) -> Tensor:
    """``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``; native/Loss.cpp."""
    return like(input) if grad_input is None else grad_input


@operator("aten::multi_margin_loss_backward").meta()
def multi_margin_loss_backward(input: Tensor) -> Tensor:
    """native/LossMultiMargin.cpp."""
    return like(input)


@operator("aten::multilabel_margin_loss_backward").meta()
def multilabel_margin_loss_backward(input: Tensor) -> Tensor:
    """native/LossMultiLabelMargin.cpp."""
    return like(input)


def _ctc_loss(log_probs: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    steps, batch = log_probs.shape[0], log_probs.shape[1]
    return like(log_probs, (batch,)), like(log_probs, (batch, steps, 2 * longest + 1))


@operator("aten::_ctc_loss").meta()
def ctc_loss(log_probs: Tensor, target_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The losses, and ``log_alpha`` for the longest target; native/LossCTC.cpp."""
    return _ctc_loss(log_probs, max(target_lengths, default=0))


@operator("aten::_ctc_loss.Tensor").meta()
def ctc_loss_tensor(log_probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """native/LossCTC.cpp; lengths are not known here, so ``log_alpha`` is as large as it can be."""
    return _ctc_loss(log_probs, int(targets.shape[-1]))


@operator("aten::_ctc_loss_backward").meta()
def ctc_loss_backward(log_probs: Tensor) -> Tensor:
    """native/LossCTC.cpp: like ``log_probs``, contiguous."""
    return like(log_probs)


@operator("aten::_cudnn_ctc_loss").meta()
def cudnn_ctc_loss(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """native/cudnn/LossCTC.cpp: the loss of every sequence, and the gradient at once."""
    return like(log_probs, (log_probs.shape[1],)), like(log_probs)
