"""Convolutions on the CPU: oneDNN's kernels, and ATen's own where those are not asked.

native/Convolution.cpp chooses (``ConvParams::use_mkldnn``, ``_select_conv_backend``);
native/mkldnn/Conv.cpp calls oneDNN through ideep, which copies operands into the layouts that the
kernel wants; ``onednn/`` knows those and the scratchpads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import ConvolutionSettings
from pytest_torchmem.operators.convolution.cpu_native import native, native_backward
from pytest_torchmem.operators.geometry import (
    Outputs,
    beyond,
    contiguous_copy,
    dense_bytes,
    suggested_format,
)
from pytest_torchmem.operators.libraries.onednn import convolution_list
from pytest_torchmem.operators.libraries.onednn.confidence import by_onednn
from pytest_torchmem.operators.libraries.onednn.problem import Primitive, Problem, Sizes
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.targets.host import Host


@dataclass(frozen=True)
class Convolution:
    """The arguments of a convolution, with lines as images of height 1: ``view1d_as_2d``."""

    machine: Host
    input: Tensor
    weight: Tensor
    bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def dims(self) -> int:
        """Dimensions in space."""
        return self.input.dim() - 2

    @property
    def memory_format(self) -> torch.memory_format:
        """Channels last where either operand lies so; ``mkldnn_conv_use_channels_last``."""
        for operand in (self.input, self.weight):
            found = suggested_format(operand)
            if found != torch.contiguous_format:
                return found
        return torch.contiguous_format

    @property
    def channels_last(self) -> bool:
        """Whether operands are brought into channels last."""
        return self.memory_format != torch.contiguous_format

    def uses_onednn(self) -> bool:
        """``ConvParams::use_mkldnn``: not for small single images."""
        machine, input, weight = self.machine, self.input, self.weight
        if not machine.onednn:
            return False
        if self.transposed and any(
            more >= step for more, step in zip(self.output_padding, self.stride, strict=True)
        ):
            return False
        if input.dtype == torch.bfloat16:
            return machine.capability == "AVX512"
        if input.dtype != torch.float32:
            return False
        height, width = weight.shape[-2:]
        worthwhile = (
            any(step != 1 for step in (*self.stride, *self.dilation))
            or input.shape[0] >= 16
            or width != 1
            or height != 1
            or machine.threads > 1
        )
        return worthwhile and (
            self.groups > 1
            or (width > 3 and height > 3)
            or input.shape[0] > 1
            or math.prod(input.shape[:4]) > 20480
        )

    def problem(self, result: Tensor) -> Problem:
        """Return what oneDNN is asked, where ``result`` is the output or its gradient."""
        input, output = tuple(self.input.shape[2:]), tuple(result.shape[2:])
        channels, filters = self.input.shape[1], result.shape[1]
        if self.transposed:
            input, output, channels, filters = output, input, filters, channels
        return Problem(
            host=self.machine,
            dtype=self.input.dtype,
            dims=self.dims,
            batch=self.input.shape[0],
            groups=self.groups,
            channels=channels,
            filters=filters,
            input=_deep(input, 1),
            output=_deep(output, 1),
            kernel=_deep(tuple(self.weight.shape[2:]), 1),
            stride=_deep(self.stride, 1),
            dilation=_deep(self.dilation, 1),
            padding=_deep(self.padding, 0),
            bias=self.bias,
            channels_last=self.channels_last,
        )


def _deep(sizes: tuple[int, ...], filling: int) -> Sizes:
    """Depth, height and width, of an image too."""
    depth, height, width = (filling,) * (3 - len(sizes)) + sizes
    return depth, height, width


def _convolution(
    machine: Host, input: Tensor, weight: Tensor, bias: bool, settings: ConvolutionSettings
) -> Convolution:
    dims = input.dim() - 2

    def expanded(values: Sequence[int], before: int) -> tuple[int, ...]:
        full = tuple(values) * dims if len(values) == 1 else tuple(values)
        return (before, *full) if dims == 1 else full

    if dims == 1:
        input, weight = input.unsqueeze(2), weight.unsqueeze(2)
    return Convolution(
        machine,
        input,
        weight,
        bias,
        expanded(settings.stride, 1),
        expanded(settings.padding, 0),
        expanded(settings.dilation, 1),
        settings.transposed,
        expanded(settings.output_padding, 0),
        settings.groups,
    )


def uses_onednn(
    machine: Host, input: Tensor, weight: Tensor, settings: ConvolutionSettings
) -> bool:
    """Return whether ATen gives a convolution to oneDNN; ``ConvParams::use_mkldnn``."""
    return _convolution(machine, input, weight, False, settings).uses_onednn()


@operator("aten::convolution", "aten::_convolution").workspace("cpu")
def convolution(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
) -> int | Workspace:
    """Operands in the kernel's layouts, its scratchpad and its result, then the output beside
    that.
    """
    if input.numel() == 0 or outputs.numel() == 0:
        return 0
    input, line = _contiguous_line(input)
    call = _convolution(machine, input, weight, bias is not None, settings)
    result = outputs.unsqueeze(2) if outputs.dim() == 3 else outputs
    if not call.uses_onednn():
        return line + native(call, result)
    problem = call.problem(result)
    if call.transposed:
        primitive = convolution_list.transposed_forward(problem)
        requests = _as_transposed(problem, primitive)
    else:
        primitive = convolution_list.forward(problem)
        requests = _as_forward(problem, primitive)
    copies = _format_copies(call, call.input, call.weight)
    taken = line + beyond(dense_bytes(outputs), [copies, *requests])
    return by_onednn(machine, input.dtype, taken)


@operator("aten::convolution_backward").workspace("cpu")
def convolution_backward(
    machine: Host,
    outputs: Sequence[Tensor | None],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    settings: ConvolutionSettings,
    output_mask: Sequence[bool],
) -> int | Workspace:
    """The input's gradient, then the weight's and the bias's, each from its own copies."""
    if input.numel() == 0 or grad_output.numel() == 0:
        return 0
    input, line = _contiguous_line(input)
    call = _convolution(machine, input, weight, bool(output_mask[2]), settings)
    gradient = grad_output.unsqueeze(2) if grad_output.dim() == 3 else grad_output
    returned = _returned(outputs, output_mask)
    if not call.uses_onednn():
        return line + native_backward(call, gradient, returned, output_mask)
    problem = call.problem(gradient)
    requests = [_format_copies(call, gradient, call.input, call.weight)]
    if output_mask[0]:
        if call.transposed:
            requests += _as_forward(problem, convolution_list.transposed_backward_data(problem))
        else:
            requests += _as_transposed(problem, convolution_list.backward_data(problem))
    if output_mask[1] or output_mask[2]:
        chosen = (
            convolution_list.transposed_backward_weights
            if call.transposed
            else convolution_list.backward_weights
        )
        filters = problem.channels if call.transposed else problem.filters
        requests += _of_weight(problem, chosen(problem), filters if output_mask[2] else 0)
    return by_onednn(machine, input.dtype, line + beyond(returned, requests))


def _contiguous_line(input: Tensor) -> tuple[Tensor, int]:
    """Return an input of one dimension contiguous, and the bytes that takes, so that it is never
    taken for channels last; native/Convolution.cpp, _convolution and convolution_backward.
    """
    copied = contiguous_copy(input) if input.dim() == 3 else 0
    if copied:
        input = torch.empty(input.shape, dtype=input.dtype, device="meta")
    return input, copied


def _returned(outputs: Outputs, mask: Sequence[bool]) -> int:
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return sum(dense_bytes(output) for output, wanted in zip(tensors, mask, strict=True) if wanted)


def _format_copies(call: Convolution, *operands: Tensor) -> int:
    """Copies into the layout of the call: channels last where any operand lies so."""
    return sum(contiguous_copy(operand, call.memory_format) for operand in operands)


def _as_forward(problem: Problem, primitive: Primitive) -> list[int]:
    """Requests of a kernel that reads the input and writes the output."""
    source = (problem.channels, problem.input_space, primitive.input)
    result = (problem.filters, problem.output_space, primitive.output)
    return _requests(problem, primitive, source, result, problem.output_bytes(problem.filters))


def _as_transposed(problem: Problem, primitive: Primitive) -> list[int]:
    """Requests of a kernel that reads the output, or its gradient, and writes the input's."""
    source = (problem.filters, problem.output_space, primitive.output)
    result = (problem.channels, problem.input_space, primitive.input)
    return _requests(problem, primitive, source, result, problem.input_bytes(problem.channels))


def _requests(
    problem: Problem,
    primitive: Primitive,
    source: tuple[int, int, int],
    result: tuple[int, int, int],
    plain: int,
) -> list[int]:
    """Requests of one kernel, the result included: channels, pixels and own bytes of both sides.

    Channels last, the kernel writes where the caller wants it. Else what it writes is copied, twice
    where it chose channels last: ``mkldnn_to_dense`` keeps that layout.
    """
    working = primitive.weight + primitive.scratchpad
    if problem.channels_last:
        return [plain, working, -working]

    def stays(channels: int, pixels: int) -> bool:
        """One channel or one pixel lies the same both ways."""
        return primitive.channels_last and (channels == 1 or pixels == 1)

    working += 0 if stays(*source[:2]) else source[2]
    written = result[2] or plain
    turned = primitive.channels_last and not stays(*result[:2])
    turn = [plain, -plain] if turned else []
    return [written, working, -working, plain, *turn, -written]


def _of_weight(problem: Problem, primitive: Primitive, bias: int) -> list[int]:
    """Requests of mkldnn_convolution_backward_weights, the gradients included."""
    plain = problem.weight_bytes
    written = primitive.weight or plain
    summed = bias * problem.element_size
    working = primitive.input + primitive.output + primitive.scratchpad
    turn = [plain, -plain] if problem.channels_last else []
    return [working, written + summed, -working, summed, plain, *turn, -written - summed]
