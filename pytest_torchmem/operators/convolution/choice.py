"""Which library takes a convolution, and the memory format that it brings operands into.

native/Convolution.cpp (``ConvParams``, ``_select_conv_backend``,
``determine_backend_memory_format``) and native/ConvUtils.h. What a library writes lies in the
format that it brought its operands into, outputs and gradients alike.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.cudnn.questions import Version
from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.workspace import HALVES, contiguous_copy, like, suggested_format
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.settings import depthwise_kernel

_CUDNN_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST_INDEX = 2**31 - 1


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
    formats = map(suggested_format, (input, weight))
    return next((one for one in formats if one != torch.contiguous_format), torch.contiguous_format)


def uses_cudnn(input: Tensor) -> bool:
    """Whether a build with cuDNN asks it at all; ``ConvParams::use_cudnn``."""
    return torch.backends.cudnn.enabled and input.dtype in _CUDNN_TYPES


class CudaBackend(Enum):
    """Whose kernels take a convolution on a GPU; ``ConvBackend``."""

    CUDNN = "cuDNN"
    DEPTHWISE = "ATen's depthwise kernels"
    SLOW = "ATen's kernels"


def cuda_backend(
    gpu: Gpu, input: Tensor, weight: Tensor, settings: ConvolutionSettings, version: Version
) -> CudaBackend:
    """``_select_conv_backend`` for images and volumes, of a build with this cuDNN."""
    channels, groups = input.shape[1], settings.groups
    if not settings.transposed and groups == channels > 1 and not weight.shape[0] % channels:
        native = not _cudnn_takes_depthwise(gpu, input, weight, settings, version)
        return CudaBackend.DEPTHWISE if native else CudaBackend.CUDNN
    taken = _cudnn_takes(gpu, input, weight, settings, version)
    return CudaBackend.CUDNN if taken else CudaBackend.SLOW


def _cudnn_takes(
    gpu: Gpu, input: Tensor, weight: Tensor, settings: ConvolutionSettings, version: Version
) -> bool:
    """``ConvParams::use_cudnn``; bfloat16 from sm80 on (CUDAHooks.cpp,
    ``supportsBFloat16ConvolutionWithCuDNNv8``). With cuDNN 9.8 to 9.14, torch 2.9.1 and its
    successors leave contiguous volumes in half precision to ATen (pytorch/pytorch#163581).
    """
    if not uses_cudnn(input):
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype) and gpu.capability < (8, 0):
        return False
    contiguous = cuda_format(input, weight) == torch.contiguous_format
    volume = weight.dim() == 5 and input.dtype in HALVES
    if contiguous and volume and (9, 8) <= version[:2] < (9, 15):
        return all(size == 1 for size in weight.shape[2:])
    return not settings.transposed or all(
        more < step for more, step in zip(settings.output_padding, settings.stride, strict=True)
    )


def _cudnn_takes_depthwise(
    gpu: Gpu, input: Tensor, weight: Tensor, settings: ConvolutionSettings, version: Version
) -> bool:
    """``ConvParams::use_cudnn_depthwise``: channels last, and of float16 what pays."""
    if not uses_cudnn(input):
        return False
    channels_last = cuda_format(input, weight) != torch.contiguous_format
    if max(input.numel(), weight.numel()) > _LARGEST_INDEX:  # canUse32BitIndexMath
        return not (channels_last and (9, 10, 0) < version < (9, 15, 0))
    if channels_last:
        return True
    stride = settings.stride
    pays = (
        input.dtype == weight.dtype == torch.float16
        and _cudnn_takes(gpu, input, weight, settings, version)
        and input.dim() == 4
        and set(settings.dilation) == {1}
        and (stride[0] == stride[1] or input.shape[2] == 1)
        and input.shape[1] >= 32
    )
    if not pays or depthwise_kernel() != "auto":
        return pays and depthwise_kernel() == "cudnn"
    return _depthwise_pays(input, weight, stride[1])


def _depthwise_pays(input: Tensor, weight: Tensor, stride: int) -> bool:
    """``check_cudnn_depthwise_workload_with_filter``."""
    batch, channels, height, width = input.shape
    if height == 1 and stride == 1:
        return True
    size = weight.shape[3]
    if weight.shape[2] != size or size not in (1, 3, 5) or width < 7:
        return False
    if stride != 2:
        return stride == 1
    if size == 1:
        return width <= 28 if batch == 1 else batch <= 16 and channels >= 128 and width <= 7
    return batch == 1 or channels >= 512 or (channels >= 256 and width >= 28)


def as_images(
    settings: ConvolutionSettings, input: Tensor, *others: Tensor
) -> tuple[ConvolutionSettings, int, list[Tensor]]:
    """Return settings with a number for each dimension, lines as images of height 1, and the bytes
    of the contiguous input that a line takes, so that it is never taken for channels last;
    ``view1d_as_2d``, ``view4d``.
    """
    dims = input.dim() - 2

    def expanded(values: Sequence[int], before: int) -> tuple[int, ...]:
        full = tuple(values) * dims if len(values) == 1 else tuple(values)
        return (before, *full) if dims == 1 else full

    full = settings._replace(
        stride=expanded(settings.stride, 1),
        padding=expanded(settings.padding, 0),
        dilation=expanded(settings.dilation, 1),
        output_padding=expanded(settings.output_padding, 0),
    )
    if dims != 1:
        return full, 0, [input, *others]
    copied = contiguous_copy(input)
    input = like(input) if copied else input
    return full, copied, [tensor.unsqueeze(2) for tensor in (input, *others)]


class Convolution(NamedTuple):
    """The arguments of a convolution on a CPU, ``as_images``."""

    machine: Host
    input: Tensor
    weight: Tensor
    bias: bool
    settings: ConvolutionSettings

    @property
    def dims(self) -> int:
        """Dimensions in space."""
        return self.input.dim() - 2

    @property
    def is_dilated(self) -> bool:
        """Whether there are gaps between the places that a filter looks at."""
        return any(gap != 1 for gap in self.settings.dilation)

    @property
    def memory_format(self) -> torch.memory_format:
        """The format that operands are brought into."""
        rule = onednn_format if self.uses_onednn() else native_cpu_format
        return rule(self.input, self.weight)

    def uses_onednn(self) -> bool:
        """``ConvParams::use_mkldnn``: not for small single images."""
        machine, input, weight, settings = self.machine, self.input, self.weight, self.settings
        if not machine.onednn:
            return False
        if settings.transposed and any(
            more >= step
            for more, step in zip(settings.output_padding, settings.stride, strict=True)
        ):
            return False
        if input.dtype == torch.bfloat16:
            return machine.capability == "AVX512"
        if input.dtype != torch.float32:
            return False
        height, width = weight.shape[-2:]
        worthwhile = (
            any(step != 1 for step in (*settings.stride, *settings.dilation))
            or input.shape[0] >= 16
            or width != 1
            or height != 1
            or machine.threads > 1
        )
        return worthwhile and (
            settings.groups > 1
            or (width > 3 and height > 3)
            or input.shape[0] > 1
            or math.prod(input.shape[:4]) > 20480
        )
