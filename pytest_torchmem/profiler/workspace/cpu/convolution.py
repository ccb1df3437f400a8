"""Convolutions on the CPU: oneDNN's blocked copies, and the im2col buffers of ATen's own kernels.

native/Convolution.cpp chooses (``ConvParams::use_mkldnn``, ``_select_conv_backend``),
native/mkldnn/Conv.cpp calls oneDNN, whose kernels want their operands in blocks of channels: 16 of
them for AVX512, 8 for AVX2. Read off oneDNN 3.12 on AVX512 (torch 2.13).

In float32 forwards are exact on contiguous images, and on channels-last ones but for filters that
oneDNN pads further than to whole blocks. Gradients are exact for most kernels of one stride and
group; where threads share a batch in 1 by 1 kernels, in grouped or dilated kernels that oneDNN has
no vector code for, and in strided gradients of the input, they are off by a scratchpad: some KiB,
at most some copies of the weight's gradient or of one image's columns. In bfloat16 the gradient of
a weight lacks the transposed operands and the sums in float, up to several copies of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.host import Host
from pytest_torchmem.profiler.workspace import workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import (
    Outputs,
    beyond,
    contiguous_copy,
    dense_bytes,
    suggested_format,
)
from pytest_torchmem.profiler.workspace.cpu.threads import reduction_groups, threads_on_batch

_ALIGNMENT = 128
"""What oneDNN adds to a scratchpad so that it can align it."""

_BATCH = 4120
"""Bytes of the list of blocks that a brgemm kernel multiplies, per thread; and a page."""

_PAGE = 4096


@dataclass(frozen=True)
class Problem:
    """One convolution: ``input`` has ``channels`` and ``output`` ``filters``, as if not transposed.

    Of a transposed convolution the input is what the convolution would give back.
    """

    machine: Host
    dtype: torch.dtype
    batch: int
    channels: int
    filters: int
    input: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]
    strided: bool
    padded: bool
    groups: int
    channels_last: bool

    @property
    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def block(self) -> int:
        return 16 if self.machine.capability == "AVX512" else 8

    def pad(self, channels: int) -> int:
        """Channels in whole blocks."""
        return -(-channels // self.block) * self.block

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.channels == self.filters

    @property
    def first(self) -> bool:
        """Few input channels, which are not blocked: the first layer of a network."""
        return self.groups == 1 and self.channels < self.block and math.prod(self.kernel) > 1

    @property
    def stride_product(self) -> int:
        """About the product of all strides, from the sizes."""
        return math.prod(
            max(1, round(size / result))
            for size, result in zip(self.input, self.output, strict=True)
        )

    @property
    def unblocked(self) -> bool:
        """Groups that do not fill vectors: oneDNN's im2col kernel (``gemm_convolution``)."""
        if self.groups == 1 or self.depthwise:
            return False
        return bool(self.channels // self.groups % 8 or self.filters // self.groups % 8)

    def input_bytes(self, channels: int) -> int:
        return self.batch * channels * math.prod(self.input) * self.element_size

    def output_bytes(self, filters: int) -> int:
        return self.batch * filters * math.prod(self.output) * self.element_size

    @property
    def blocked_input(self) -> int:
        """The reordered input; nothing where it is taken as it is."""
        return 0 if self.first or self.unblocked else self.input_bytes(self.pad(self.channels))

    @property
    def blocked_output(self) -> int:
        filters = self.filters if self.unblocked else self.pad(self.filters)
        return self.output_bytes(filters)

    @property
    def weight_bytes(self) -> int:
        size = self.filters * self.channels // self.groups * math.prod(self.kernel)
        return size * self.element_size

    @property
    def blocked_weight(self) -> int:
        taps = math.prod(self.kernel) * self.element_size
        if self.unblocked:
            return 0
        if self.depthwise:
            return self.pad(self.groups) * taps
        if self.groups > 1:
            return self.weight_bytes
        channels = self.channels if self.first or self.channels_last else self.pad(self.channels)
        if self.element_size == 2:
            channels += channels % 2
        filters = self.pad(self.filters)
        if self.channels_last and filters >= 4 * self.block:
            filters = -(-filters // (4 * self.block)) * 4 * self.block
        return filters * channels * taps

    @property
    def padded_bias(self) -> int:
        """A bias whose length is not whole blocks is copied into one that is."""
        if self.filters % self.block == 0 or self.unblocked or self.channels_last:
            return 0
        return self.pad(self.filters) * self.element_size + _ALIGNMENT

    @property
    def columns(self) -> int:
        """im2col of one image and one group."""
        size = self.channels // self.groups * math.prod(self.kernel) * math.prod(self.output)
        return size * self.element_size

    @property
    def brgemm(self) -> int:
        """Scratchpad of oneDNN's channels-last kernels."""
        if self.groups > 1:
            return 0
        if self.machine.threads == 1 and not self.strided and math.prod(self.kernel) == 1:
            return 0
        return self.machine.threads * _BATCH + _PAGE


def _is_nhwc(tensor: Tensor) -> bool:
    return suggested_format(tensor) != torch.contiguous_format


def _expanded(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) * dims if len(values) == 1 else tuple(values)


def _problem(
    machine: Host,
    input: Tensor,
    weight: Tensor,
    output: tuple[int, ...],
    stride: Sequence[int],
    padding: Sequence[int],
    transposed: bool,
    groups: int,
) -> Problem:
    dims = input.dim() - 2
    sizes, results = tuple(input.shape[2:]), output[2:]
    channels, filters = input.shape[1], output[1]
    if transposed:
        sizes, results, channels, filters = results, sizes, filters, channels
    return Problem(
        machine=machine,
        dtype=input.dtype,
        batch=input.shape[0],
        channels=channels,
        filters=filters,
        input=sizes,
        output=results,
        kernel=tuple(weight.shape[2:]),
        strided=any(step != 1 for step in _expanded(stride, dims)),
        padded=any(amount != 0 for amount in _expanded(padding, dims)),
        groups=groups,
        channels_last=_is_nhwc(input) or _is_nhwc(weight),
    )


def uses_onednn(
    machine: Host,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """``ConvParams::use_mkldnn``: not for small single images, where ATen's kernel is faster."""
    dims = input.dim() - 2
    strides, dilations = _expanded(stride, dims), _expanded(dilation, dims)
    if not machine.onednn:
        return False
    if transposed:
        extra = _expanded(output_padding, dims)
        if any(more >= step for more, step in zip(extra, strides, strict=True)):
            return False
    if input.dtype in (torch.bfloat16, torch.float16):
        return machine.capability == "AVX512"
    if input.dtype != torch.float32:
        return False
    kernel = (1, *weight.shape[2:]) if dims == 1 else tuple(weight.shape[2:])
    leading = math.prod(input.shape) if dims == 1 else math.prod(input.shape[:4])
    worthwhile = (
        any(step != 1 for step in (*strides, *dilations))
        or input.shape[0] >= 16
        or kernel[-1] != 1
        or kernel[-2] != 1
        or machine.threads > 1
    )
    large = (
        groups > 1 or (kernel[-1] > 3 and kernel[-2] > 3) or input.shape[0] > 1 or leading > 20480
    )
    return worthwhile and large


@workspace("aten::convolution", "aten::_convolution", device="cpu")
def convolution(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *flags: bool,
) -> int:
    """Blocked input, weight and output, then the output beside its blocked form."""
    if input.numel() == 0 or outputs.numel() == 0:
        return 0
    problem = _problem(
        machine, input, weight, tuple(outputs.shape), stride, padding, transposed, groups
    )
    if not uses_onednn(
        machine, input, weight, stride, dilation, transposed, output_padding, groups
    ):
        return _native(problem, input, weight, dilation, transposed)
    copies = _format_copies(problem, input, weight)
    result = dense_bytes(outputs)
    if transposed:
        return copies + _input_gradient(problem, result, weight)
    if problem.channels_last:
        scratch = problem.brgemm + problem.blocked_weight
        return copies + (machine.threads * problem.columns if problem.unblocked else scratch)
    pad = problem.padded_bias if bias is not None else 0
    if problem.unblocked:
        return copies + max(machine.threads * problem.columns + _ALIGNMENT, result)
    if problem.depthwise and len(problem.kernel) == 3 and problem.groups % problem.block:
        plain = problem.input_bytes(problem.channels) + problem.blocked_weight
        return copies + max(plain, 2 * result)
    kernel = pad + problem.blocked_input + problem.blocked_weight + problem.blocked_output
    return copies + max(kernel, problem.blocked_output + result) - result


def _format_copies(problem: Problem, *operands: Tensor) -> int:
    """Copies into the layout that the call uses: channels last where any operand lies so."""
    memory_format = torch.contiguous_format
    if problem.channels_last:
        memory_format = torch.channels_last if len(problem.kernel) == 2 else torch.channels_last_3d
    return sum(contiguous_copy(operand, memory_format) for operand in operands)


def _native(
    problem: Problem, input: Tensor, weight: Tensor, dilation: Sequence[int], transposed: bool
) -> int:
    """native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp (im2col of the whole batch),
    NaiveDilatedConvolution.cpp and NaiveConvolutionTranspose2d.cpp (of one image).
    """
    spatial = len(problem.kernel)
    dilated = any(step != 1 for step in dilation)
    channels_last = problem.channels_last and spatial == 2
    if channels_last:
        copies = sum(contiguous_copy(operand, torch.channels_last) for operand in (input, weight))
    else:
        copies = contiguous_copy(input) + contiguous_copy(weight)
    if transposed:
        return copies + problem.columns
    if dilated:
        return copies + problem.columns
    plain = math.prod(problem.kernel) == 1 and not problem.strided and not problem.padded
    if plain and spatial < 3:
        return copies
    return copies + problem.batch * problem.columns * problem.groups


def _input_gradient(problem: Problem, result: int, weight: Tensor) -> int:
    """Gradient of a convolution's input, which is the forward of a transposed one.

    Strided ones run channels last whatever the layout, and are brought back in two steps.
    """
    strided_kernel = problem.strided and problem.groups == 1
    by_rows = (problem.machine.threads * 6 * _PAGE if strided_kernel else 0) + _ALIGNMENT
    scratch = problem.brgemm + (by_rows if problem.groups == 1 else 0)
    if problem.unblocked:
        columns = problem.machine.threads * problem.columns + _ALIGNMENT
        return columns if problem.channels_last else max(columns, result)
    if problem.channels_last:
        return _gradient_weight(problem) + scratch
    if strided_kernel:
        plain = problem.output_bytes(problem.filters) + _gradient_weight(problem)
        return max(scratch + plain, 2 * result)
    blocked = problem.input_bytes(problem.pad(problem.channels))
    kernel = problem.blocked_output + _gradient_weight(problem) + blocked
    return max(kernel, blocked + result) - result


def _gradient_weight(problem: Problem) -> int:
    """The weight as the kernel of the input's gradient wants it: input channels blocked too."""
    if problem.groups > 1:
        return problem.blocked_weight
    taps = math.prod(problem.kernel) * problem.element_size
    plain = problem.strided or problem.channels_last
    filters = problem.filters if plain else problem.pad(problem.filters)
    return filters * problem.pad(problem.channels) * taps


@workspace("aten::convolution_backward", device="cpu")
def convolution_backward(
    machine: Host,
    outputs: Sequence[Tensor | None],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> int:
    """The input's gradient, then the weight's, each from its own blocked copies."""
    if input.numel() == 0 or grad_output.numel() == 0:
        return 0
    problem = _problem(
        machine, input, weight, tuple(grad_output.shape), stride, padding, transposed, groups
    )
    if not uses_onednn(
        machine, input, weight, stride, dilation, transposed, output_padding, groups
    ):
        return _native_backward(problem, outputs, grad_output, input, weight, dilation, transposed)
    copies = _format_copies(problem, grad_output, input, weight)
    gradient = dense_bytes(outputs[0]) if output_mask[0] else 0
    requests: list[int] = [copies]
    if gradient:
        if transposed:
            peak = _forward_of_gradient(problem, gradient)
        else:
            peak = _input_gradient(problem, gradient, weight)
        requests += [gradient + peak, -peak]
    if output_mask[1] or output_mask[2]:
        requests += _weight_gradient(problem, bool(output_mask[2]))
    return beyond(_returned(outputs, output_mask), requests)


def _returned(outputs: Outputs, mask: Sequence[bool]) -> int:
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return sum(dense_bytes(output) for output, wanted in zip(tensors, mask, strict=True) if wanted)


def _forward_of_gradient(problem: Problem, result: int) -> int:
    """The gradient of a transposed convolution's input is a plain convolution."""
    if problem.channels_last:
        return problem.blocked_weight + problem.brgemm + _ALIGNMENT * (problem.groups == 1)
    if problem.unblocked:
        return max(problem.machine.threads * problem.columns + _ALIGNMENT, result)
    kernel = problem.blocked_input + problem.blocked_weight + problem.blocked_output
    return max(kernel, problem.blocked_output + result) - result


def _weight_gradient(problem: Problem, bias: bool) -> list[int]:
    """Requests of mkldnn_convolution_backward_weights, outputs included."""
    weight = problem.weight_bytes
    channels = problem.channels if problem.first else problem.pad(problem.channels)
    blocked = problem.pad(problem.filters) * channels * math.prod(problem.kernel)
    blocked *= problem.element_size
    if problem.groups > 1:
        blocked = problem.blocked_weight or weight
    bias_bytes = problem.filters * problem.element_size if bias else 0
    scratch = _weight_reduction(problem, bias, blocked)
    if problem.channels_last:
        return [
            blocked + scratch,
            bias_bytes,
            bias_bytes - scratch,
            weight,
            weight,
            -weight,
            -blocked,
            -bias_bytes,
        ]
    operands = problem.blocked_output + problem.blocked_input
    return [
        operands,
        blocked,
        scratch,
        bias_bytes,
        -operands - scratch,
        bias_bytes,
        weight,
        -blocked,
        -bias_bytes,
    ]


def _weight_reduction(problem: Problem, bias: bool, blocked: int) -> int:
    """Copies of the weight's gradient for threads that share a batch, and of the bias's;
    jit_avx512_common_conv_kernel.cpp, init_scratchpad, and jit_avx512_common_convolution.cpp.
    """
    if problem.groups > 1 or problem.element_size != 4 or math.prod(problem.kernel) == 1:
        return 0
    outer = problem.pad(problem.filters) // problem.block
    scratch = problem.padded_bias if bias else 0
    channels = problem.channels if problem.first else problem.block
    sharing = threads_on_batch(
        threads=problem.machine.threads,
        batch=problem.batch,
        depth=problem.output[0] if len(problem.output) == 3 else 1,
        channel_blocks=1 if problem.first else problem.pad(problem.channels) // problem.block,
        filter_blocks=outer,
        input=channels * math.prod(problem.input) // problem.stride_product,
        output=problem.block * math.prod(problem.output),
        weight=channels * problem.block * math.prod(problem.kernel),
    )
    if sharing > 1:
        size = blocked + problem.pad(problem.filters) * problem.element_size
        scratch += size * (sharing - 1) + 2 * _PAGE + _ALIGNMENT
    if bias:
        groups, members, jobs = reduction_groups(
            problem.machine.threads, problem.block, outer, problem.batch
        )
        if members > 1:
            space = groups * (members - 1) * jobs * problem.block * problem.element_size
            scratch += space + _PAGE + (groups + 1) * _PAGE
    return scratch


def _native_backward(
    problem: Problem,
    outputs: Sequence[Tensor | None],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    dilation: Sequence[int],
    transposed: bool,
) -> int:
    """One image's columns for the input's gradient, the whole batch's for the weight's;
    native/ConvolutionMM2d.cpp, slow_conv2d_backward_out_cpu_template.
    """
    columns = problem.columns * problem.groups
    copies = contiguous_copy(grad_output)
    if problem.channels_last and len(problem.kernel) == 2:
        copies = contiguous_copy(grad_output, torch.channels_last)
        copies += contiguous_copy(weight, torch.channels_last)
    else:
        copies += contiguous_copy(input) + contiguous_copy(weight)
    plain = math.prod(problem.kernel) == 1 and not problem.strided and not problem.padded
    dilated = any(step != 1 for step in dilation)
    if transposed or dilated:
        return copies + columns
    if plain and len(problem.kernel) < 3:
        return copies
    return copies + problem.batch * columns
