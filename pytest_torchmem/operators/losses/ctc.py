"""The CTC loss; native/LossCTC.cpp, native/cuda/LossCTC.cu, native/cudnn/LossCTC.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.derivatives import gradients_of, run_plainly
from pytest_torchmem.operators.formats import CONTIGUOUS, made_like
from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes, like
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import ALL, Made, Request, Workspace, bounded

_MEAN, _SUM = 1, 2
"""``at::Reduction``."""
_LONGEST_CUDNN_TARGET = 255
_LONG = 8

_native = operator("aten::_ctc_loss")
_native_backward = operator("aten::_ctc_loss_backward")
_native_backward.meta()(made_like(log_probs=CONTIGUOUS))
_cudnn = operator("aten::_cudnn_ctc_loss", across_devices=True)  # targets and lengths: the host's


@operator("aten::_ctc_loss.Tensor").workspace("cpu")
def lengths_as_integers(input_lengths: Tensor, target_lengths: Tensor) -> int:
    """Lengths of another type or not dense, converted; native/LossCTC.cpp, ctc_loss_tensor."""
    return sum(
        contiguous_copy(lengths) if lengths.element_size() == _LONG else _LONG * lengths.numel()
        for lengths in (input_lengths, target_lengths)
    )


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


def _outputs(log_probs: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    steps, batch = log_probs.shape[0], log_probs.shape[1]
    return like(log_probs, (batch,)), like(log_probs, (batch, steps, 2 * longest + 1))


@_native.meta()
def losses_and_alphas(log_probs: Tensor, target_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The losses, and ``log_alpha`` for the longest target."""
    return _outputs(log_probs, max(target_lengths, default=0))


@operator("aten::_ctc_loss.Tensor").meta()
def losses_and_longest_alphas(log_probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths are not known here, so ``log_alpha`` is as large as it can be."""
    return _outputs(log_probs, int(targets.shape[-1]))


@_cudnn.meta("cuda")
def losses_and_gradient(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every sequence, and the gradient at once."""
    return like(log_probs, (log_probs.shape[1],)), like(log_probs)


@_cudnn.values()
def losses_and_gradient_values(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int,
    zero_infinity: bool,
) -> tuple[Any, ...]:
    """As ATen's own."""

    def run(log_probs: Tensor) -> Tensor:
        lengths = list(input_lengths), list(target_lengths)
        found: Tensor = torch.ops.aten._ctc_loss.default(
            log_probs, targets, *lengths, blank, zero_infinity
        )[0]
        return found

    losses = run_plainly(run, log_probs)
    return losses, gradients_of(run, [log_probs], [torch.ones_like(losses)])[0]


@_native_backward.workspace("cpu")
def betas(log_alpha: Tensor) -> int:
    """``log_beta``, as large as ``log_alpha``."""
    return dense_bytes(log_alpha)


@_native.workspace("cuda")
def lengths_and_offsets(log_probs: Tensor, targets: Tensor) -> tuple[Request, ...]:
    """Lengths and offsets on the device, then ``log_alpha`` and the losses; exact,
    ``ctc_loss_gpu_template``.
    """
    copies = contiguous_copy(log_probs), contiguous_copy(targets)
    return (*copies, *[log_probs.shape[1] * _LONG] * 3, Made(1), Made(0))


@_native_backward.workspace("cuda")
def betas_and_lengths(log_probs: Tensor, log_alpha: Tensor) -> tuple[Request, ...]:
    """``log_beta``, as large as ``log_alpha``, and the lengths; exact, LossCTC.cu,
    ``ctc_loss_backward_gpu_template``.
    """
    lengths = log_probs.shape[1] * _LONG
    return (lengths, lengths, lengths, dense_bytes(log_alpha), ALL)


@_cudnn.workspace("cuda")
def workspace(log_probs: Tensor, target_lengths: Sequence[int]) -> Workspace:
    """``cudnnGetCTCLossWorkspaceSize`` at most, which cuDNN tells on a GPU alone.

    Both tables of the algorithm for the longest target, with the probabilities and their gradient
    once more, their sums, and a few numbers for every place of a target. That is more than the GPU
    version takes of the loss whose interface cuDNN has (warp-ctc, ``get_workspace_size``), which
    keeps one table and one copy.
    """
    steps, batch, labels = log_probs.shape
    places = 2 * max(target_lengths, default=0) + 1
    numbers = 2 * steps * places + 2 * steps * labels + steps + 8 * places + 8
    return bounded(batch * numbers * log_probs.element_size())
