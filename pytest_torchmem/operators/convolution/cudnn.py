"""Convolutions that cuDNN takes: what ATen copies for it, and the workspace that cuDNN tells.

native/Convolution.cpp (``_convolution``, ``convolution_backward``) and native/cudnn/ConvShared.cpp
(``cudnn_convolution_forward_out``, ``cudnn_convolution_backward`` and what they call). A workspace
is asked of the allocator at every call and given back after it (``run_conv_plan`` of Conv_v8.cpp).
With ``torch.backends.cudnn.benchmark`` a first call asks for the largest of all candidates
(``get_plans_from_find``), and the later ones for that of the fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_torchmem.cudnn.questions import Convolution, Operand
from pytest_torchmem.operators.arguments import ConvolutionSettings
from pytest_torchmem.operators.convolution.choice import cuda_format
from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    dense_bytes,
    laid_out,
    like,
    suggested_format,
)
from pytest_torchmem.operators.libraries.cudnn import Cudnn, operand, prefers_mode_b
from pytest_torchmem.operators.workspace import Workspace, bounded, told, unknown
from pytest_torchmem.torch_private.state.settings import (
    allows_tf32_convolution,
    is_deterministic_convolution,
    tries_all,
)


@dataclass(frozen=True, slots=True)
class Requests:
    """What is alive together beside an operator's outputs, largest at its peak.

    ``held`` are the copies, ``workspace`` is cuDNN's, ``None`` where it is not known, and
    ``missing`` are the bytes of outputs that are made later.
    """

    held: tuple[int, ...] = ()
    workspace: int | None = 0
    missing: int = 0

    @property
    def total(self) -> int:
        """The bytes beyond the outputs, as far as they are known."""
        return sum(self.held) + (self.workspace or 0) - self.missing

    def trimmed(self) -> tuple[int, ...]:
        """Return the requests, less what the missing outputs take the place of."""
        rest, requests = self.missing, []
        for nbytes in (self.workspace or 0, *self.held):
            taken = min(rest, nbytes)
            rest -= taken
            requests.append(nbytes - taken)
        return (*requests[1:], requests[0])


def at_peak(phases: Iterable[Requests]) -> Workspace:
    """Return the workspace of an operator that consists of ``phases``, one after the other."""
    phases = tuple(phases)
    largest = max(phases, key=lambda phase: phase.total)
    requests = largest.trimmed()
    if any(phase.workspace is None for phase in phases):
        return unknown(*requests)
    return bounded(*requests) if tries_all() else told(*requests)


def as_images(
    settings: ConvolutionSettings, input: Tensor, *others: Tensor
) -> tuple[ConvolutionSettings, int, list[Tensor]]:
    """Return settings with a number for each dimension, lines as images of height 1, and the bytes
    of the contiguous input that a line takes.

    ``view1d_as_2d``, ``view4d``.
    """
    line, dims = input.dim() == 3, input.dim() - 2

    def expanded(values: Sequence[int], before: int) -> tuple[int, ...]:
        full = tuple(values) * dims if len(values) == 1 else tuple(values)
        return (before, *full) if line else full

    full = ConvolutionSettings(
        expanded(settings.stride, 1),
        expanded(settings.padding, 0),
        expanded(settings.dilation, 1),
        settings.transposed,
        expanded(settings.output_padding, 0),
        settings.groups,
    )
    if not line:
        return full, 0, [input, *others]
    copied = contiguous_copy(input)
    if copied:
        input = like(input)
    return full, copied, [tensor.unsqueeze(2) for tensor in (input, *others)]


def forward(
    cudnn: Cudnn, input: Tensor, weight: Tensor, output: Tensor, settings: ConvolutionSettings
) -> Requests:
    """``cudnn_convolution`` and ``cudnn_convolution_transpose``, of images and volumes."""
    if settings.transposed:
        return input_gradient(cudnn, output, weight, input, settings)
    held, workspace = _run(
        cudnn, "forward", (input, weight, output), ("x", "w"), suggested_format(output), settings
    )
    return Requests(held, workspace)


def input_gradient(
    cudnn: Cudnn, result: Tensor, weight: Tensor, gradient: Tensor, settings: ConvolutionSettings
) -> Requests:
    """``cudnn_convolution_backward_input``; ``result`` has the shape of what is computed."""
    wanted = cuda_format(gradient, weight)
    operands = laid_out(result, wanted), weight, gradient
    held, workspace = _run(cudnn, "backward_input", operands, ("w", "y"), wanted, settings)
    return Requests(held, workspace)


def weight_gradient(
    cudnn: Cudnn, result: Tensor, input: Tensor, gradient: Tensor, settings: ConvolutionSettings
) -> Requests:
    """``cudnn_convolution_backward_weight``."""
    wanted = cuda_format(input, gradient)
    operands = input, laid_out(result, wanted), gradient
    held, workspace = _run(cudnn, "backward_weight", operands, ("x", "y"), wanted, settings)
    return Requests(held, workspace)


def backward(
    cudnn: Cudnn,
    operands: tuple[Tensor, Tensor, Tensor],
    settings: ConvolutionSettings,
    output_mask: Sequence[bool],
) -> list[Requests]:
    """``cudnn_convolution_backward``, ``cudnn_convolution_transpose_backward``: the input's
    gradient, then the weight's. ``operands`` are the gradient, the input and the weight.
    """
    gradient, input, weight = operands
    held: list[int] = []
    if output_mask[1]:  # only then the input is made contiguous
        held.append(contiguous_copy(input, cuda_format(input, weight)))
        input = _contiguous(input, cuda_format(input, weight))
    wanted = suggested_format(input)
    if settings.transposed:
        held.append(contiguous_copy(gradient, wanted))
        gradient = _contiguous(gradient, wanted)
    elif suggested_format(gradient) != wanted:  # to(): what is only strided stays
        held.append(dense_bytes(gradient))
        gradient = laid_out(gradient, wanted)
    bias = dense_bytes(like(gradient, (gradient.shape[1],))) if output_mask[2] else 0
    phases = []
    if output_mask[0]:
        if settings.transposed:
            made = laid_out(input, cuda_format(gradient, weight))
            found = forward(cudnn, gradient, weight, made, _plain(settings))
        else:
            found = input_gradient(cudnn, input, weight, gradient, settings)
        later = (dense_bytes(weight) if output_mask[1] else 0) + bias
        phases.append(Requests((*held, *found.held), found.workspace, later))
    if output_mask[1]:
        pair = (gradient, input) if settings.transposed else (input, gradient)
        found = weight_gradient(cudnn, weight, *pair, settings)
        phases.append(Requests((*held, *found.held), found.workspace, bias))
    return phases


def forward_with_relu(
    cudnn: Cudnn,
    operands: tuple[Tensor, Tensor, Tensor],
    added: Tensor | None,
    bias: Tensor | None,
    alpha: float,
    settings: ConvolutionSettings,
) -> Requests:
    """``cudnn_convolution_relu``, ``cudnn_convolution_add_relu``, of an input, weight and output.

    Nothing ``added`` is the output times 0, and no ``bias`` is one of zeros.
    """
    input, weight, output = operands
    wanted = cuda_format(input, weight)
    zeros = 0
    if bias is None:
        bias = like(output, (output.shape[1],))
        zeros = dense_bytes(bias)
    copied = 0 if added is None else contiguous_copy(added, wanted)
    term = output if added is None else _contiguous(added, wanted)
    bias = bias.view(1, -1, *(1 for _ in range(input.dim() - 2)))
    described = operand(term, wanted), operand(bias, wanted)
    held, workspace = _run(
        cudnn, "forward", operands, ("x", "w"), wanted, settings, described, alpha
    )
    return Requests((*held, copied, zeros), workspace)


def _run(
    cudnn: Cudnn,
    direction: str,
    operands: tuple[Tensor, Tensor, Tensor],
    given: Sequence[str],
    wanted: torch.memory_format,
    settings: ConvolutionSettings,
    added: tuple[Operand, Operand] | None = None,
    alpha: float = 1.0,
) -> tuple[tuple[int, ...], int | None]:
    """Return the copies of what is ``given``, of x, w and y, and cuDNN's workspace."""
    by_name = dict(zip("xwy", operands, strict=True))
    held = tuple(contiguous_copy(by_name[name], wanted) for name in given)
    for name in given:
        by_name[name] = _contiguous(by_name[name], wanted)
    described = cuda_format(by_name["x"], by_name["w"])
    question = Convolution(
        direction,
        operand(by_name["x"], described),
        operand(by_name["w"], described),
        operand(by_name["y"], described),
        tuple(settings.padding),
        tuple(settings.stride),
        tuple(settings.dilation),
        is_deterministic_convolution() and added is None,
        allows_tf32_convolution(),
        tries_all(),
        prefers_mode_b(),
        added,
        alpha,
    )
    return held, cudnn.ask(question)


def _plain(settings: ConvolutionSettings) -> ConvolutionSettings:
    """Return the convolution whose gradient a transposed one is."""
    stride, padding, dilation = settings.stride, settings.padding, settings.dilation
    return ConvolutionSettings(stride, padding, dilation, groups=settings.groups)


def _contiguous(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a tensor, or a copy of its geometry, that is contiguous in a format."""
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return torch.empty_like(tensor, memory_format=memory_format, device="meta")
