"""Losses: of every element, which are then added up; negative log-likelihood; CTC.

native/Loss.cpp, cuda/Loss.cu; native/LossCTC.cpp, cuda/LossCTC.cu, cudnn/LossCTC.cpp;
native/LossNLL.cpp, LossNLL2d.cpp; native/cuda/Loss.cu, ``nll_loss_forward_out_cuda_template``, and
NLLLoss2d.cu.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.activations import gradients_of, plainly
from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.elementwise import partial_results, sum_buffers
from pytest_torchmem.operators.reduction import mean
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    ALL,
    CONTIGUOUS,
    LONG,
    Made,
    Request,
    Workspace,
    bounded,
    contiguous_copy,
    copied,
    dense_bytes,
    dense_copy,
    like,
    made_like,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

_NONE, _MEAN, _SUM = range(3)
"""``at::Reduction``."""

# native/LossMultiMargin.cpp, LossMultiLabelMargin.cpp
operator("aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward").meta()(
    made_like(self=CONTIGUOUS)
)


@operator("aten::multi_margin_loss", "aten::multi_margin_loss_backward").workspace("cpu")
def dense_arguments(input: Tensor, target: Tensor, weight: Tensor | None = None) -> int:
    """Copies of what is not dense; native/LossMultiMargin.cpp."""
    given = (input, target, weight) if input.numel() else ()
    return sum(dense_copy(one) for one in given if one is not None)


@operator("aten::multilabel_margin_loss_forward", "aten::multi_margin_loss").workspace("cuda")
def losses_of_rows(
    machine: Gpu, outputs: Any, input: Tensor, tensors: list[Tensor], reduction: int = _MEAN
) -> tuple[Request, ...]:
    """The loss of each sample, and their sum; MultiMarginLoss.cu, MultiLabelMarginCriterion.cu."""
    if not input.numel():
        return ()
    copies = tuple(dense_copy(tensor) for tensor in tensors)
    if input.dim() < 2 or reduction == _NONE:
        return copies
    rows = input.shape[0]
    # The loss comes first, or last where there is a second output.
    made: tuple[Request, ...] = (*copies, Made(1)) if isinstance(outputs, tuple) else (ALL, *copies)
    sums = sum_buffers(machine, (rows,), None, input.dtype)
    return (*made, rows * input.element_size(), ALL, *sums)


@operator("multilabel_margin_loss_backward multi_margin_loss_backward").workspace("cuda")
def dense_copies(input: Tensor, tensors: list[Tensor]) -> tuple[int, ...]:
    """Of what is not dense; the same files."""
    return tuple(dense_copy(tensor) for tensor in tensors) if input.numel() else ()


@operator("aten::multilabel_margin_loss_forward").meta()
def label_losses(input: Tensor, target: Tensor, reduction: int = _MEAN) -> tuple[Tensor, Tensor]:
    """Of one sample without a batch it is one number, also where nothing is reduced."""
    labels = target
    if input.dim() < 2 and target.dim() < 2 and target.numel() == input.numel():
        labels = target.reshape(input.shape)  # the kernel asks for no more
    made, is_target = torch.ops.aten.multilabel_margin_loss_forward(input, labels, reduction)
    return (made if input.dim() > 1 else made.new_empty(())), is_target.reshape(target.shape)


@operator("multilabel_margin_loss_forward multilabel_margin_loss_backward").workspace("cpu")
def least_and_greatest_label(input: Tensor, target: Tensor, is_target: Tensor | None = None) -> int:
    """One after the other, then dense copies, and in the backward which labels are there;
    LossMultiLabelMargin.cpp.
    """
    if not input.numel():
        return 0
    there = 0 if is_target is None else input.element_size()
    return dense_copy(target) + max(target.element_size(), dense_copy(input) + there)


# A reduced loss keeps the storage that was made for all elements: TORCH_META_FUNC(mse_loss) resizes
# its output and not its storage, as binary_cross_entropy_out_cuda does.
operator("aten::mse_loss", "aten::smooth_l1_loss").meta()(
    lambda input, target, reduction=_MEAN: _reduced_in_place(torch.add(input, target), reduction)
)
operator("aten::binary_cross_entropy").meta()(
    lambda input, reduction=_MEAN: _reduced_in_place(torch.add(input, input), reduction)
)


def _reduced_in_place(losses: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return losses
    return losses.as_strided((), ()) if losses.numel() else losses.new_empty(())


@operator("mse_loss smooth_l1_loss huber_loss").workspace("cpu")
def losses_and_mean(machine: Host, input: Tensor, reduction: int = _MEAN) -> int:
    """All elements' losses, and what dividing by their number takes."""
    if reduction == _NONE:
        return 0
    whole = dense_bytes(input)
    if reduction != _MEAN:
        return whole + partial_results(machine, input.numel(), 1, input.element_size())
    return whole + mean(machine, torch.empty((), dtype=input.dtype, device="meta"), input)


@operator("mse_loss smooth_l1_loss huber_loss").workspace("cuda")
def losses_and_buffers(
    machine: Gpu, input: Tensor, reduction: int = _MEAN, delta: float | None = None
) -> tuple[Request, ...]:
    """All elements' losses, and the reduction of them, which makes the output where there is a
    ``delta``; exact, native/Loss.cpp, ``huber_loss``.
    """
    made = () if delta is None else (ALL,)
    if reduction == _NONE:
        return made
    buffers = sum_buffers(machine, (input.numel(),), None, input.dtype)
    return (dense_bytes(input), *made, *buffers)


@operator("mse_loss_backward smooth_l1_loss_backward huber_loss_backward").meta()
def distance_backward(input: Tensor, *, grad_input: Tensor | None = None) -> Tensor:
    """``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``."""
    return like(input) if grad_input is None else grad_input


@operator("aten::binary_cross_entropy").decomposition("cpu")
def cross_entropy_on_cpu(
    self: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """binary_cross_entropy_out_cpu: a reduced loss keeps the storage of all elements."""
    loss = torch.empty_like(self)
    if weight is not None:
        loss.mul_(weight)
    if reduction in (_MEAN, _SUM):
        reduced = loss.mean() if reduction == _MEAN else loss.sum()
        loss.resize_(()).copy_(reduced)
    return loss


@operator("aten::binary_cross_entropy").workspace("cuda")
def number_and_buffers(machine: Gpu, input: Tensor, reduction: int = _MEAN) -> tuple[int, ...]:
    """A number and its reduction: all elements' losses are the output, which is then resized;
    Exact, ``binary_cross_entropy_out_cuda``.
    """
    if reduction == _NONE:
        return ()
    return (input.element_size(), *sum_buffers(machine, (input.numel(),), None, input.dtype))


@operator("aten::binary_cross_entropy_backward").decomposition("cpu")
def cross_entropy_backward_on_cpu(
    self: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """binary_cross_entropy_backward_out_cpu."""
    result = torch.empty_like(self)
    if weight is not None:
        result.mul_(weight)
    if reduction == _MEAN:
        result.div_(self.numel())
    return result


_forward = operator("aten::nll_loss_forward")
_images_backward = operator("aten::nll_loss2d_backward")
_forward.workspace("cuda")(copied(self=CONTIGUOUS, target=CONTIGUOUS, weight=CONTIGUOUS))
operator("aten::nll_loss_backward").workspace("cuda")(
    copied(
        grad_output=CONTIGUOUS,
        self=CONTIGUOUS,
        target=CONTIGUOUS,
        weight=CONTIGUOUS,
        total_weight=CONTIGUOUS,
    )
)
_images_backward.workspace("cuda")(copied(target=CONTIGUOUS, weight=CONTIGUOUS))
operator("aten::nll_loss_backward").workspace("cpu")(copied(weight=CONTIGUOUS))


@_forward.workspace("cpu")
def added_up(input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> int:
    """Dense copies, without reduction of the weights alone; nll_loss_out_frame."""
    each = reduction == _NONE and input.dim() == 2
    read = (weight,) if each else (input, target, weight)
    return sum(map(contiguous_copy, read))


@_images_backward.workspace("cpu")
def targets_and_weights(target: Tensor, weight: Tensor | None, reduction: int) -> int:
    """Dense copies, without reduction of the weights alone; nll_loss2d_backward_out_frame."""
    return contiguous_copy(weight) + (0 if reduction == _NONE else contiguous_copy(target))


@operator("aten::nll_loss2d_forward").workspace("cpu")
def scores(input: Tensor, reduction: int) -> int:
    """A dense copy of the scores."""
    return 0 if reduction == _NONE else contiguous_copy(input)


@operator("aten::nll_loss2d_forward").workspace("cuda")
def scores_and_targets(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> tuple[int, ...]:
    """Dense copies; ``nll_loss2d_forward_out_cuda_template``."""
    if reduction == _NONE:
        return (contiguous_copy(weight),)
    return (contiguous_copy(input), contiguous_copy(target), contiguous_copy(weight))


_LONGEST_CUDNN_TARGET = 255

operator("aten::_ctc_loss_backward").meta()(made_like(log_probs=CONTIGUOUS))
_cudnn = operator("aten::_cudnn_ctc_loss", across_devices=True)  # targets and lengths: the host's


@operator("aten::_ctc_loss.Tensor").workspace("cpu")
def lengths_as_integers(input_lengths: Tensor, target_lengths: Tensor) -> int:
    """Lengths of another type or not dense, converted; native/LossCTC.cpp, ctc_loss_tensor."""
    return sum(
        contiguous_copy(lengths) if lengths.element_size() == LONG else LONG * lengths.numel()
        for lengths in (input_lengths, target_lengths)
    )


class Sequences(NamedTuple):
    """What a CTC loss is of, by the names of the schemas' arguments."""

    log_probs: Tensor
    targets: Tensor
    input_lengths: Sequence[int]
    target_lengths: Sequence[int]
    blank: int = 0
    reduction: int = _MEAN
    zero_infinity: bool = False


@operator("aten::ctc_loss.IntList").path("cuda")
def ctc_loss(call: CompositeCall, given: Sequences) -> Any:
    """CuDNN's loss, or the native one of targets moved to the GPU; native/LossCTC.cpp, ctc_loss.
    The reduction is that of ``ctc_loss_impl``.
    """
    log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity = given
    if not _cudnn_takes(given):
        return call.of(*given._replace(targets=targets.to(log_probs.device, torch.int64)))
    losses = torch.ops.aten._cudnn_ctc_loss.default(
        log_probs, targets, input_lengths, target_lengths, blank, True, zero_infinity
    )[0]
    if reduction == _MEAN:
        lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
        return (losses / lengths.clamp_min(1)).mean()
    return losses.sum() if reduction == _SUM else losses


def _cudnn_takes(given: Sequences) -> bool:
    """Return whether cuDNN takes the loss; native/cudnn/LossCTC.cpp, ``_use_cudnn_ctc_loss``."""
    log_probs, targets = given.log_probs, given.targets
    return (
        torch.backends.cudnn.enabled
        and given.blank == 0
        and targets.dim() == 1
        and targets.dtype is torch.int32
        and targets.device.type == "cpu"
        and targets.is_contiguous()
        and log_probs.dim() == 3
        and log_probs.dtype is torch.float32
        and all(length == log_probs.size(0) for length in given.input_lengths)
        and len(given.input_lengths) == len(given.target_lengths)
        and all(
            target <= min(length, _LONGEST_CUDNN_TARGET)
            for target, length in zip(given.target_lengths, given.input_lengths, strict=True)
        )
    )


@operator("aten::ctc_loss.Tensor").path("cuda")
def ctc_loss_tensor(given: Sequences, input_lengths: Tensor, target_lengths: Tensor) -> Any:
    """The lengths are brought to the host; native/LossCTC.cpp, ``ctc_loss``."""
    first, second = (
        lengths.to(torch.device("cpu"), torch.int64).tolist()
        for lengths in (input_lengths, target_lengths)
    )
    on_host = given._replace(input_lengths=first, target_lengths=second)
    return torch.ops.aten.ctc_loss.IntList(*on_host)


@operator("aten::_ctc_loss").meta()
def losses_and_alphas(
    log_probs: Tensor, targets: Tensor, target_lengths: Sequence[int] | Tensor
) -> tuple[Tensor, Tensor]:
    """The losses, and ``log_alpha`` for the longest target, as large as it can be where tensors
    have the lengths: they are not known here.
    """
    steps, batch = log_probs.shape[:2]
    longest = targets.shape[-1]
    if not isinstance(target_lengths, Tensor):
        longest = max(target_lengths, default=0)
    return like(log_probs, (batch,)), like(log_probs, (batch, steps, 2 * longest + 1))


@_cudnn.meta("cuda")
def losses_and_gradient(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every sequence, and the gradient at once."""
    return like(log_probs, (log_probs.shape[1],)), like(log_probs)


@_cudnn.values()
def losses_and_gradient_values(given: Sequences) -> tuple[Any, ...]:
    """As ATen's own."""
    _, targets, *lengths, blank, _, zero_infinity = given

    def run(log_probs: Tensor) -> Any:
        rest = (*map(list, lengths), blank, zero_infinity)
        return torch.ops.aten._ctc_loss.default(log_probs, targets, *rest)[0]

    with plainly():
        losses = run(given.log_probs)
    return losses, gradients_of(run, [given.log_probs], [torch.ones_like(losses)])[0]


# ``log_beta``, as large as ``log_alpha``.
operator("aten::_ctc_loss_backward").workspace("cpu")(lambda log_alpha: dense_bytes(log_alpha))


@operator("aten::_ctc_loss").workspace("cuda")
def lengths_and_offsets(log_probs: Tensor, targets: Tensor) -> tuple[Request, ...]:
    """Lengths and offsets on the device, then both outputs; exact, ``ctc_loss_gpu_template``."""
    return (contiguous_copy(targets), *[log_probs.shape[1] * LONG] * 3, Made(1), Made(0))


@operator("aten::_ctc_loss_backward").workspace("cuda")
def betas_and_lengths(log_probs: Tensor, log_alpha: Tensor) -> tuple[Request, ...]:
    """``log_beta`` like ``log_alpha``, and the lengths; exact, ctc_loss_backward_gpu_template."""
    lengths = log_probs.shape[1] * LONG
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
