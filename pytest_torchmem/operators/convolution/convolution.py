"""``aten::convolution`` and its backward: one kernel to a trace, whichever library takes it.

native/Convolution.cpp (``_convolution``, ``convolution_backward``). On the CPU oneDNN takes it, or
ATen's own kernels do; on a GPU cuDNN, whose plan takes a workspace without limit that it alone
knows, or ATen's kernels (DepthwiseConv2d.cu, ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu,
NaiveDilatedConvolution.cu).

What ATen copies for cuDNN is in native/cudnn/ConvShared.cpp (``cudnn_convolution_forward_out``,
``cudnn_convolution_backward`` and what they call). A workspace is asked of the allocator at every
call and given back after it (``run_conv_plan`` of Conv_v8.cpp). With
``torch.backends.cudnn.benchmark`` a first call asks for the largest of all candidates
(``get_plans_from_find``), and the later ones for that of the fastest.

At the end convolutions of one library, where they are called by themselves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.cudnn.questions import ConvolutionQuestion, Operand
from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.convolution import choice, columns
from pytest_torchmem.operators.convolution.choice import as_images, cuda_format
from pytest_torchmem.operators.elementwise import sum_buffers
from pytest_torchmem.operators.libraries.nvidia import Cudnn, operand, prefers_mode_b
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.operators.workspace import (
    ALL,
    Made,
    Request,
    Workspace,
    asked_for,
    beyond,
    bounded,
    by_onednn,
    contiguous_copy,
    dense_bytes,
    laid_out,
    like,
    passing,
    suggested_format,
    told,
    unknown,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import REFERENCE, Host
from pytest_torchmem.torch_private.settings import (
    is_deterministic_convolution,
    precision,
    tries_all,
)

_forward = operator("aten::convolution", "aten::_convolution", kind=OperatorKind.LEAF)
_backward = operator("aten::convolution_backward", kind=OperatorKind.LEAF)
operator(
    "convolution_overrideable convolution_backward_overrideable mkldnn_convolution",
    "aten::_nnpack_spatial_convolution",
    kind=OperatorKind.LEAF,
)


def convolution_shape(
    input: Tensor, weight: Tensor, settings: ConvolutionSettings, bias: Tensor | None = None
) -> Tensor:
    """Return the output on ``meta``, contiguous; raises what torch raises for the arguments."""
    shape = _output_shape(input.shape, weight.shape, settings)
    if shape is not None and (bias is None or bias.shape == (shape[1],)):
        return input.new_empty(shape)
    dims = weight.dim() - 2
    sides = (list(one) for one in (settings.stride, settings.padding, settings.dilation))
    more = list(settings.output_padding) if settings.transposed else [0] * dims
    given = (*sides, settings.transposed, more, settings.groups)
    _check(input, weight, bias, given)
    result: Tensor = torch.ops.aten.convolution(input, weight, None, *given)
    return result


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, given: tuple[Any, ...]) -> None:
    """Raise what the kernel raises of shapes and settings, which ``meta`` takes or words otherwise.

    The checks are the same on every device and come before all else (native/Convolution.cpp,
    check_shape_forward). Of a batch without samples nothing is computed behind them.
    """
    hollow = torch.empty((), dtype=input.dtype, device="cpu")
    operands = [
        None if one is None else hollow.expand(one.shape) for one in (input[:0], weight, bias)
    ]
    try:
        torch.ops.aten.convolution(*operands, *given)
    except RuntimeError as error:
        if "channels, but got" not in str(error) and "dimensional input" not in str(error):
            raise
        # It names the input's shape, with the samples that there are.
        torch.ops.aten.convolution(hollow.expand(input.shape), *operands[1:], *given)


def _output_shape(
    input: Sequence[int], weight: Sequence[int], settings: ConvolutionSettings
) -> list[int] | None:
    """Return a valid call's output shape; ConvUtils.h, conv_output_size, conv_input_size."""
    dims, groups = len(weight) - 2, settings.groups
    given = (settings.stride, settings.padding, settings.dilation, settings.output_padding)
    numbers = [tuple(one) * (dims if len(one) == 1 else 1) for one in given]
    if dims < 1 or len(input) != dims + 2 or any(len(one) != dims for one in numbers):
        return None
    if not input[1] or input[1] != (weight[0] if settings.transposed else weight[1] * groups):
        return None
    if groups < 1 or weight[0] % groups:
        return None
    sizes = []
    for size, kernel, stride, padding, dilation, more in zip(
        input[2:], weight[2:], *numbers, strict=True
    ):
        window = dilation * (kernel - 1) + 1
        if stride < 1 or padding < 0 or dilation < 0:
            return None
        if settings.transposed:
            sizes.append((size - 1) * stride - 2 * padding + window + more)
        elif size + 2 * padding < window:
            return None
        else:
            sizes.append((size + 2 * padding - window) // stride + 1)
    filters = weight[1] * groups if settings.transposed else weight[0]
    return [input[0], filters, *sizes] if min(sizes) > 0 else None


@_forward.meta("cpu")
def convolution_on_cpu(
    input: Tensor, weight: Tensor, settings: ConvolutionSettings, bias: Tensor | None = None
) -> Tensor:
    """In the library's format. Transposed volumes are made like the input and then change their
    shape, which never makes a storage smaller; native/NaiveConvolutionTranspose3d.cpp.
    """
    result = convolution_shape(input, weight, settings, bias)
    if input.dim() == 3 or not result.numel():
        return result
    full, _, (images, filters) = as_images(settings, input, weight)
    call = choice.Convolution(REFERENCE, images, filters, False, full)
    if not call.uses_onednn() and _is_made_like(input, result, settings):
        return like(result, (input.numel(),))[: result.numel()].view(result.shape)
    return laid_out(result, call.memory_format)


def _is_made_like(input: Tensor, result: Tensor, settings: ConvolutionSettings) -> bool:
    """Whether ATen's kernel leaves a result on the larger storage that it made like the input."""
    larger = input.numel() > result.numel()
    return settings.transposed and settings.groups == 1 and input.dim() == 5 and larger


@_forward.meta("cuda")
def convolution_on_cuda(
    input: Tensor, weight: Tensor, settings: ConvolutionSettings, bias: Tensor | None = None
) -> Tensor:
    """In the library's format; ``meta`` does not know which library that is."""
    result = convolution_shape(input, weight, settings, bias)
    if input.dim() == 3 or not result.numel():
        return result
    if not choice.uses_cudnn(input) and _is_made_like(input, result, settings):
        return like(result, (input.numel(),))[: result.numel()].view(result.shape)
    return laid_out(result, cuda_format(input, weight))


class ConvolutionBackward(NamedTuple):
    """What is asked of ``aten::convolution_backward``, beside its settings."""

    grad_output: Tensor
    input: Tensor
    weight: Tensor
    output_mask: Sequence[bool]
    bias_sizes: Sequence[int] | None


@_backward.meta("cpu")
def convolution_backward_on_cpu(
    asked: ConvolutionBackward, settings: ConvolutionSettings
) -> tuple[Tensor | None, ...]:
    """In the library's format, whatever the gradient's is."""
    full, _, (input, weight) = as_images(settings, asked.input, asked.weight)
    call = choice.Convolution(REFERENCE, input, weight, False, full)
    line = asked.input.dim() == 3
    return _gradients(asked, torch.contiguous_format if line else call.memory_format)


@_backward.meta("cuda")
def convolution_backward_on_cuda(asked: ConvolutionBackward) -> tuple[Tensor | None, ...]:
    """In the library's format, whatever the gradient's is."""
    return _gradients(asked, cuda_format(asked.input, asked.weight))


@_backward.unread()
def not_asked_for(asked: ConvolutionBackward) -> list[Tensor]:
    """Of its own gradient and the bias's nothing is read; ``vmap`` gives an empty tensor for it."""
    of_input, of_weight, _ = asked.output_mask
    unread = (asked.weight, of_input), (asked.input, of_weight)
    return [operand for operand, is_read in unread if not is_read]


def _gradients(
    asked: ConvolutionBackward, memory_format: torch.memory_format
) -> tuple[Tensor | None, ...]:
    grad_output, input, weight, output_mask, bias_sizes = asked
    # The output of an input without channels has none either, whatever the bias has.
    bias = tuple(bias_sizes or (grad_output.shape[1],))
    operands = (like(grad_output, one.shape) for one in (input, weight))
    made = *(laid_out(one, memory_format) for one in operands), like(grad_output, bias)
    return asked_for(made, output_mask)


@_forward.workspace("cpu")
def workspace_on_cpu(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
) -> int | Workspace:
    """Operands in the kernel's layouts, its scratchpad and its result, then the output beside."""
    if input.numel() == 0 or outputs.numel() == 0:
        return 0
    settings, line, (input, weight, result) = as_images(settings, input, weight, outputs)
    call = choice.Convolution(machine, input, weight, bias is not None, settings)
    if not call.uses_onednn():
        return _by_aten(machine, input.dtype, line + columns.forward(call, result))
    from pytest_torchmem.operators.convolution import onednn

    taken = beyond(dense_bytes(outputs), onednn.forward(call, result))
    return by_onednn(machine, input.dtype, line + taken)


@_backward.workspace("cpu")
def backward_workspace_on_cpu(
    machine: Host,
    outputs: Sequence[Tensor | None],
    asked: ConvolutionBackward,
    settings: ConvolutionSettings,
) -> int | Workspace:
    """The input's gradient, then the weight's and the bias's, each from its own copies."""
    grad_output, input, weight, output_mask, _ = asked
    if input.numel() == 0 or grad_output.numel() == 0:
        return 0
    settings, line, images = as_images(settings, input, weight, grad_output)
    input, weight, gradient = images
    call = choice.Convolution(machine, input, weight, bool(output_mask[2]), settings)
    returned = sum(map(dense_bytes, asked_for(outputs, output_mask)))
    if not call.uses_onednn():
        taken = columns.backward(call, gradient, returned, output_mask)
        return _by_aten(machine, input.dtype, line + taken)
    from pytest_torchmem.operators.convolution import onednn

    taken = beyond(returned, onednn.backward(call, gradient, output_mask))
    return by_onednn(machine, input.dtype, line + taken)


def _by_aten(machine: Host, dtype: torch.dtype, nbytes: int) -> int | Workspace:
    """Return ATen's own workspace; in bfloat16 compared where oneDNN computes in it, too."""
    if dtype == torch.bfloat16 and machine.onednn and not machine.computes_in_bfloat16:
        return by_onednn(machine, dtype, nbytes)
    return nbytes


@_forward.workspace("cuda")
def workspace_on_cuda(
    machine: Gpu,
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
    cudnn: Cudnn,
) -> Workspace | tuple[Request, ...]:
    """Copies and cuDNN's workspace; of a depthwise one with ATen's kernel copies alone, exactly;
    ``cudnn_convolution``, ``conv_depthwise2d_cuda``, ``slow_conv2d_forward``.
    """
    if not input.numel() or not outputs.numel():
        return ()
    settings, line, (input, weight, output) = as_images(settings, input, weight, outputs)
    backend = choice.cuda_backend(machine, input, weight, settings, cudnn.version)
    if backend is choice.CudaBackend.DEPTHWISE:
        return passing(line, contiguous_copy(input), contiguous_copy(weight), ALL)
    if backend is choice.CudaBackend.SLOW:
        slow = columns.OnCuda(machine, input, weight, output, settings)
        return passing(line, *slow.forward(bias is not None))
    wanted = cuda_format(input, weight)
    copied = contiguous_copy(input, wanted)
    input = laid_out(input, wanted) if copied else input
    steps = _cudnn_forward(cudnn, input, weight, output, settings)
    return _as_told(cudnn, *passing(line, copied, *steps))


@_backward.workspace("cuda")
def backward_workspace_on_cuda(
    machine: Gpu, asked: ConvolutionBackward, settings: ConvolutionSettings, cudnn: Cudnn
) -> Workspace | tuple[Request, ...]:
    """Copies and cuDNN's workspace, then the sum of the bias's gradient;
    ``cudnn_convolution_backward``, ``conv_depthwise2d_backward_cuda_out``,
    ``conv_depthwise3d_backward_cuda``, ``slow_conv2d_backward``.
    """
    grad_output, input, weight, output_mask, _ = asked
    if not input.numel() or not grad_output.numel():
        return ()
    settings, line, images = as_images(settings, input, weight, grad_output)
    input, weight, gradient = images
    backend = choice.cuda_backend(machine, input, weight, settings, cudnn.version)
    if backend is choice.CudaBackend.SLOW:
        slow = columns.OnCuda(machine, input, weight, gradient, settings)
        return passing(line, *slow.backward(output_mask))
    bias: tuple[int, ...] = ()
    if output_mask[2]:
        dims = (0, *range(2, gradient.dim()))
        bias = sum_buffers(machine, gradient.shape, dims, gradient.dtype, gradient.stride())
    if backend is choice.CudaBackend.DEPTHWISE:  # with a dense copy of what each reads
        copies = [contiguous_copy(operand) for operand in (gradient, input, weight)]
        if input.dim() > 4:  # of volumes all at once
            made = Made(0), Made(1), *passing(*copies, Made(2), *passing(*bias))
            return passing(line, *made)
        of_weight = passing(copies[1], Made(1)) if output_mask[1] else ()
        of_input = passing(copies[2], Made(0)) if output_mask[0] else ()
        read = passing(copies[0], *of_weight, *of_input)
        return passing(line, *read, Made(2), *passing(*bias))
    steps = _cudnn_backward(cudnn, (gradient, input, weight), settings, output_mask, bias)
    return _as_told(cudnn, *passing(line, *steps))


def _as_told(cudnn: Cudnn, *requests: Request) -> Workspace:
    """Return the workspace of ``requests``, as sure as cuDNN's answers make it."""
    if any(answer.nbytes is None for answer in cudnn.answers):
        return unknown(*requests)
    return bounded(*requests) if tries_all() else told(*requests)


def _cudnn_forward(
    cudnn: Cudnn, input: Tensor, weight: Tensor, output: Tensor, settings: ConvolutionSettings
) -> tuple[Request, ...]:
    """``cudnn_convolution`` and ``cudnn_convolution_transpose``, of images and volumes."""
    if settings.transposed:
        return _cudnn_input_gradient(cudnn, output, weight, input, settings)
    wanted = suggested_format(output)
    held, workspace = _ask_cudnn(cudnn, "forward", (input, weight, output), "wx", wanted, settings)
    return Made(0), *passing(*held, workspace)


def _cudnn_input_gradient(
    cudnn: Cudnn, result: Tensor, weight: Tensor, gradient: Tensor, settings: ConvolutionSettings
) -> tuple[Request, ...]:
    """``cudnn_convolution_backward_input``; ``result`` has the shape of what is computed."""
    wanted = cuda_format(gradient, weight)
    operands = laid_out(result, wanted), weight, gradient
    held, workspace = _ask_cudnn(cudnn, "backward_input", operands, "wy", wanted, settings)
    return Made(0), *passing(*held, workspace)


def _cudnn_backward(
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
        steps += _cudnn_forward(cudnn, gradient, weight, made, plain)
    elif output_mask[0]:
        steps += _cudnn_input_gradient(cudnn, input, weight, gradient, settings)
    if output_mask[1]:
        pair = (gradient, input) if settings.transposed else (input, gradient)
        wanted = cuda_format(*pair)
        given = pair[0], laid_out(weight, wanted), pair[1]
        held, workspace = _ask_cudnn(cudnn, "backward_weight", given, "yx", wanted, settings)
        steps += passing(*held, Made(1), workspace)
    return *passing(copied, dense, *steps), Made(2), *passing(*bias)


def _ask_cudnn(
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


operator("cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu").meta("cuda")(
    convolution_on_cuda
)


@operator("aten::cudnn_convolution_transpose").meta("cuda")
def transposed_convolution(input: Tensor, weight: Tensor, settings: ConvolutionSettings) -> Tensor:
    """As of ``aten::convolution``."""
    return convolution_on_cuda(input, weight, settings._replace(transposed=True))


@operator("aten::cudnn_convolution").workspace("cuda")
def cudnn_workspace(
    outputs: Tensor, input: Tensor, weight: Tensor, settings: ConvolutionSettings, cudnn: Cudnn
) -> Workspace:
    """Copies into one format, and cuDNN's workspace."""
    return _as_told(cudnn, *_cudnn_forward(cudnn, input, weight, outputs, settings))


@operator("aten::cudnn_convolution_transpose").workspace("cuda")
def workspace_of_transposed(
    outputs: Tensor, input: Tensor, weight: Tensor, settings: ConvolutionSettings, cudnn: Cudnn
) -> Workspace:
    """As of ``cudnn_convolution``."""
    return cudnn_workspace(outputs, input, weight, settings._replace(transposed=True), cudnn)


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
    held, found = _ask_cudnn(cudnn, "forward", *given, added, factor)
    return _as_told(cudnn, *passing(*held, copied, Made(0), zeros, found))


operator("aten::slow_conv3d_forward", not_on=frozenset({"cuda"}))

# native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp
operator("aten::_slow_conv2d_forward", "aten::slow_conv3d_forward").meta()(convolution_shape)


@operator("aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d").meta()
def dilated_convolution(input: Tensor, weight: Tensor, settings: ConvolutionSettings) -> Tensor:
    """native/NaiveDilatedConvolution.cpp, cuda/DepthwiseConv2d.cu: shapes tell the groups."""
    groups = input.shape[1] // weight.shape[1]
    return convolution_shape(input, weight, settings._replace(groups=groups))


@operator("aten::slow_conv_transpose3d").meta()
def slow_convolution_transpose(
    input: Tensor, weight: Tensor, settings: ConvolutionSettings
) -> Tensor:
    """native/NaiveConvolutionTranspose3d.cpp."""
    return convolution_shape(input, weight, settings._replace(transposed=True))


@operator("aten::_slow_conv2d_backward.output_mask").meta()
def slow_convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """native/ConvolutionMM2d.cpp."""
    results = (like(input), like(weight), like(grad_output, (weight.shape[0],)))
    return asked_for(results, output_mask)
