"""Which library takes a convolution, and the memory format that it brings operands into.

native/Convolution.cpp (``ConvParams``, ``_select_conv_backend``,
``determine_backend_memory_format``) and native/ConvUtils.h. What a library writes lies in the
format that it brought its operands into, outputs and gradients alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import ConvolutionSettings
from pytest_torchmem.operators.geometry import suggested_format
from pytest_torchmem.targets.host import Host

_CUDNN_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def onednn_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """``mkldnn_conv_use_channels_last``: never for float64."""
    if torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    return _of_either(input, weight)


def native_cpu_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """``thnn_conv_use_channels_last``: of images alone, in every type."""
    return _of_either(input, weight) if input.dim() == 4 else torch.contiguous_format


def cuda_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """``cudnn_conv_suggest_memory_format``: never for float64, nor for ATen's own kernels."""
    return onednn_format(input, weight) if uses_cudnn(input) else torch.contiguous_format


def _of_either(input: Tensor, weight: Tensor) -> torch.memory_format:
    """Channels last where either operand suggests it."""
    for operand in (input, weight):
        found = suggested_format(operand)
        if found != torch.contiguous_format:
            return found
    return torch.contiguous_format


def uses_cudnn(input: Tensor) -> bool:
    """``ConvParams::use_cudnn``, of a build with cuDNN."""
    return torch.backends.cudnn.enabled and input.dtype in _CUDNN_TYPES


def is_native_depthwise(
    input: Tensor, weight: Tensor, settings: ConvolutionSettings
) -> bool | None:
    """Whether ATen's own CUDA kernel takes a depthwise convolution; None where cuDNN may.

    ``is_depthwise``, ``use_cudnn_depthwise``: channels last goes to cuDNN, and of float16 what
    ``check_cudnn_depthwise_workload_with_filter`` accepts. One of a single dimension is taken for
    one of two.
    """
    channels = input.shape[1]
    if settings.transposed or not settings.groups == channels > 1 or weight.shape[0] % channels:
        return False
    if not uses_cudnn(input):
        return True
    if cuda_format(input, weight) != torch.contiguous_format:
        return False
    flat = input.dim() < 5 and set(settings.dilation) == {1}
    return None if input.dtype == torch.float16 and flat and channels >= 32 else True


@dataclass(frozen=True)
class Convolution:
    """The arguments of a convolution on a CPU, lines as images of height 1: ``view1d_as_2d``."""

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

    @classmethod
    def of(
        cls,
        machine: Host,
        input: Tensor,
        weight: Tensor,
        bias: bool,
        settings: ConvolutionSettings,
    ) -> Convolution:
        """Return the convolution that an operator's arguments ask for."""
        dims = input.dim() - 2

        def expanded(values: Sequence[int], before: int) -> tuple[int, ...]:
            full = tuple(values) * dims if len(values) == 1 else tuple(values)
            return (before, *full) if dims == 1 else full

        if dims == 1:
            input, weight = input.unsqueeze(2), weight.unsqueeze(2)
        return cls(
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

    @property
    def dims(self) -> int:
        """Dimensions in space."""
        return self.input.dim() - 2

    @property
    def memory_format(self) -> torch.memory_format:
        """The format that operands are brought into."""
        rule = onednn_format if self.uses_onednn() else native_cpu_format
        return rule(self.input, self.weight)

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
