"""Negative log-likelihood: what is copied to be read, exactly.

native/LossNLL.cpp, LossNLL2d.cpp; native/cuda/Loss.cu, ``nll_loss_forward_out_cuda_template``, and
NLLLoss2d.cu.
"""

from __future__ import annotations

from torch import Tensor

from pytest_torchmem.operators.formats import CONTIGUOUS, copied
from pytest_torchmem.operators.geometry import contiguous_copy
from pytest_torchmem.operators.registry import operator

_NONE = 0

_forward = operator("aten::nll_loss_forward")
_backward = operator("aten::nll_loss_backward")
_images_backward = operator("aten::nll_loss2d_backward")
_forward.workspace("cuda")(copied(self=CONTIGUOUS, target=CONTIGUOUS, weight=CONTIGUOUS))
_backward.workspace("cuda")(
    copied(**dict.fromkeys(("grad_output", "self", "target", "weight", "total_weight"), CONTIGUOUS))
)
_images_backward.workspace("cuda")(copied(target=CONTIGUOUS, weight=CONTIGUOUS))
_backward.workspace("cpu")(copied(weight=CONTIGUOUS))
_images = operator("aten::nll_loss2d_forward")


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


@_images.workspace("cpu")
def scores(input: Tensor, reduction: int) -> int:
    """A dense copy of the scores."""
    return 0 if reduction == _NONE else contiguous_copy(input)


@_images.workspace("cuda")
def scores_and_targets(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> tuple[int, ...]:
    """Dense copies; ``nll_loss2d_forward_out_cuda_template``."""
    if reduction == _NONE:
        return (contiguous_copy(weight),)
    return (contiguous_copy(input), contiguous_copy(target), contiguous_copy(weight))
