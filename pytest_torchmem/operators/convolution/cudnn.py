"""cuDNN's convolutions, where they are called by themselves; native/cudnn/ConvShared.cpp."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_torchmem.operators.arguments import ConvolutionSettings
from pytest_torchmem.operators.convolution.choice import cuda_format
from pytest_torchmem.operators.convolution.convolution import convolution_on_cuda
from pytest_torchmem.operators.geometry import contiguous_copy
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, unknown


@operator(
    "aten::cudnn_convolution", "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu"
).meta("cuda")
def convolution(
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """As of ``aten::convolution``."""
    settings = ConvolutionSettings(stride, padding, dilation, False, [0], groups)
    return convolution_on_cuda(input, weight, settings)


@operator("aten::cudnn_convolution_transpose").meta("cuda")
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """As of ``aten::convolution``."""
    settings = ConvolutionSettings(stride, padding, dilation, True, output_padding, groups)
    return convolution_on_cuda(input, weight, settings)


@operator(
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::cudnn_convolution_relu",
    "aten::cudnn_convolution_add_relu",
).workspace("cuda")
def workspace(input: Tensor, weight: Tensor) -> Workspace:
    """Copies into one format, and cuDNN's workspace."""
    wanted = cuda_format(input, weight)
    return unknown(contiguous_copy(input, wanted), contiguous_copy(weight, wanted))
