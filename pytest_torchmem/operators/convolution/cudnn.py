"""Convolutions that cuDNN takes: what ATen copies for it, and the workspace that cuDNN tells.

native/Convolution.cpp (``_convolution``, ``convolution_backward``) and native/cudnn/ConvShared.cpp
(``cudnn_convolution_forward_out``, ``cudnn_convolution_backward`` and what they call). A workspace
is asked of the allocator at every call and given back after it (``run_conv_plan`` of Conv_v8.cpp).
With ``torch.backends.cudnn.benchmark`` a first call asks for the largest of all candidates
(``get_plans_from_find``), and the later ones for that of the fastest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.cudnn.questions import ConvolutionQuestion, Operand
from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.convolution.choice import cuda_format
from pytest_torchmem.operators.libraries.nvidia import Cudnn, operand, prefers_mode_b
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    Made,
    Request,
    Workspace,
    bounded,
    contiguous_copy,
    dense_bytes,
    laid_out,
    like,
    passing,
    suggested_format,
    told,
    unknown,
)
from pytest_torchmem.torch_private.settings import (
    is_deterministic_convolution,
    precision,
    tries_all,
)


def as_told(cudnn: Cudnn, *requests: Request) -> Workspace:
    """Return the workspace of ``requests``, as sure as cuDNN's answers make it."""
    if any(answer.nbytes is None for answer in cudnn.answers):
        return unknown(*requests)
    return bounded(*requests) if tries_all() else told(*requests)


def forward(
    cudnn: Cudnn, input: Tensor, weight: Tensor, output: Tensor, settings: ConvolutionSettings
) -> tuple[Request, ...]:
    """``cudnn_convolution`` and ``cudnn_convolution_transpose``, of images and volumes."""
    if settings.transposed:
        return input_gradient(cudnn, output, weight, input, settings)
    wanted = suggested_format(output)
    held, workspace = _run(cudnn, "forward", (input, weight, output), "wx", wanted, settings)
    return Made(0), *passing(*held, workspace)


def input_gradient(
    cudnn: Cudnn, result: Tensor, weight: Tensor, gradient: Tensor, settings: ConvolutionSettings
) -> tuple[Request, ...]:
    """``cudnn_convolution_backward_input``; ``result`` has the shape of what is computed."""
    wanted = cuda_format(gradient, weight)
    operands = laid_out(result, wanted), weight, gradient
    held, workspace = _run(cudnn, "backward_input", operands, "wy", wanted, settings)
    return Made(0), *passing(*held, workspace)


def backward(
    cudnn: Cudnn,
    operands: tuple[Tensor, Tensor, Tensor],
    settings: ConvolutionSettings,
    output_mask: Sequence[bool],
    bias: Sequence[int],
) -> tuple[Request, ...]:
    """``cudnn_convolution_backward``, ``cudnn_convolution_transpose_backward``: the input's
    gradient, then the weight's, then the bias's with what its sum takes. ``operands`` are the
    gradient, the input and the weight.
    """
    gradient, input, weight = operands
    copied, dense = 0, 0
    if output_mask[1]:  # only then the input is made contiguous
        copied = contiguous_copy(input, cuda_format(input, weight))
        input = _contiguous(input, cuda_format(input, weight))
    wanted = suggested_format(input)
    if settings.transposed:
        dense = contiguous_copy(gradient, wanted)
        gradient = _contiguous(gradient, wanted)
    elif suggested_format(gradient) != wanted:  # to(): what is only strided stays
        dense = dense_bytes(gradient)
        gradient = laid_out(gradient, wanted)
    steps: tuple[Request, ...] = ()
    if output_mask[0] and settings.transposed:
        made = laid_out(input, cuda_format(gradient, weight))
        plain = settings._replace(transposed=False)  # whose gradient a transposed one is
        steps += forward(cudnn, gradient, weight, made, plain)
    elif output_mask[0]:
        steps += input_gradient(cudnn, input, weight, gradient, settings)
    if output_mask[1]:
        pair = (gradient, input) if settings.transposed else (input, gradient)
        wanted = cuda_format(*pair)
        given = pair[0], laid_out(weight, wanted), pair[1]
        held, workspace = _run(cudnn, "backward_weight", given, "yx", wanted, settings)
        steps += passing(*held, Made(1), workspace)
    return *passing(copied, dense, *steps), Made(2), *passing(*bias)


@operator("aten::cudnn_convolution").workspace("cuda")
def workspace(
    outputs: Tensor, input: Tensor, weight: Tensor, settings: ConvolutionSettings, cudnn: Cudnn
) -> Workspace:
    """Copies into one format, and cuDNN's workspace."""
    return as_told(cudnn, *forward(cudnn, input, weight, outputs, settings))


@operator("aten::cudnn_convolution_transpose").workspace("cuda")
def workspace_of_transposed(
    outputs: Tensor, input: Tensor, weight: Tensor, settings: ConvolutionSettings, cudnn: Cudnn
) -> Workspace:
    """As of ``cudnn_convolution``."""
    return workspace(outputs, input, weight, settings._replace(transposed=True), cudnn)


@operator("aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu").workspace("cuda")
def workspace_of_fused(
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
    cudnn: Cudnn,
    z: Tensor | None = None,
    alpha: float | None = None,
) -> Workspace:
    """Copies into one format, and cuDNN's workspace. Nothing added is the output times 0, and no
    bias is one of zeros.
    """
    if input.dim() == 3:
        return unknown()
    wanted, zeros, factor = cuda_format(input, weight), 0, 0.0
    if bias is None:
        bias = like(outputs, (outputs.shape[1],))
        zeros = dense_bytes(bias)
    copied, term = 0, outputs
    if z is not None:
        factor = 1.0 if alpha is None else float(alpha)
        copied, term = contiguous_copy(z, wanted), _contiguous(z, wanted)
    bias = bias.view(1, -1, *(1 for _ in range(input.dim() - 2)))
    given = (input, weight, outputs), "xw", wanted, settings
    added = operand(term, wanted), operand(bias, wanted)
    held, found = _run(cudnn, "forward", *given, added, factor)
    return as_told(cudnn, *passing(*held, copied, Made(0), zeros, found))


def _run(
    cudnn: Cudnn,
    direction: str,
    operands: tuple[Tensor, Tensor, Tensor],
    given: str,
    wanted: torch.memory_format,
    settings: ConvolutionSettings,
    added: tuple[Operand, Operand] | None = None,
    alpha: float = 1.0,
) -> tuple[tuple[int, ...], int]:
    """Return copies of what is ``given`` of x, w and y, and cuDNN's workspace, 0 where unknown."""
    by_name = dict(zip("xwy", operands, strict=True))
    held = tuple(contiguous_copy(by_name[name], wanted) for name in given)
    for name in given:
        by_name[name] = _contiguous(by_name[name], wanted)
    described = cuda_format(by_name["x"], by_name["w"])
    x, w, y = (operand(by_name[name], described) for name in "xwy")
    padding, stride, dilation = map(tuple, (settings.padding, settings.stride, settings.dilation))
    deterministic = is_deterministic_convolution() and added is None
    tf32 = precision("cuda", "conv") == "tf32"  # ``at::Context::allowTF32CuDNN``
    sides = padding, stride, dilation, deterministic, tf32, tries_all(), prefers_mode_b()
    question = ConvolutionQuestion(direction, x, w, y, *sides, added, alpha)
    return held, cudnn.ask(question) or 0


def _contiguous(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a tensor, or a copy of its geometry, that is contiguous in a format."""
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return torch.empty_like(tensor, memory_format=memory_format, device="meta")
