"""Convolutions of one library, where they are called by themselves: cuDNN's and ATen's own.

native/cudnn/ConvShared.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.convolution.convolution import convolution_on_cuda, convolution_shape
from pytest_torchmem.operators.convolution.cudnn import as_told, forward, forward_with_relu
from pytest_torchmem.operators.geometry import like
from pytest_torchmem.operators.libraries.cudnn import Cudnn
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import Workspace, unknown


@operator(*aten("cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu")).meta("cuda")
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


@operator("aten::cudnn_convolution").workspace("cuda")
def workspace(
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    cudnn: Cudnn,
) -> Workspace:
    """Copies into one format, and cuDNN's workspace."""
    settings = ConvolutionSettings(stride, padding, dilation, groups=groups)
    return as_told(cudnn, *forward(cudnn, input, weight, outputs, settings))


@operator("aten::cudnn_convolution_transpose").workspace("cuda")
def workspace_of_transposed(
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    cudnn: Cudnn,
) -> Workspace:
    """As of ``cudnn_convolution``."""
    settings = ConvolutionSettings(stride, padding, dilation, True, output_padding, groups)
    return as_told(cudnn, *forward(cudnn, input, weight, outputs, settings))


_ALONE = """
    cudnn_convolution_relu cudnn_convolution_add_relu slow_conv3d_forward slow_conv_dilated2d
    slow_conv_dilated3d
"""


@operator(*aten(_ALONE)).flops()
def flops(weight: Tensor, outputs: Tensor) -> int:
    """As ``conv_flop_count`` of torch/utils/flop_counter.py; an activation is pointwise."""
    return 2 * outputs.numel() * weight[0].numel()


@operator(*aten("cudnn_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d")).flops()
def transposed_flops(arguments: Mapping[str, Any], weight: Tensor) -> int:
    """As ``conv_flop_count`` of torch/utils/flop_counter.py: the input is what filters go over."""
    input: Tensor = arguments["input"] if "input" in arguments else arguments["self"]
    return 2 * input.numel() * weight[0].numel()


@operator("aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu").workspace("cuda")
def workspace_of_fused(
    outputs: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    cudnn: Cudnn,
    z: Tensor | None = None,
    alpha: float | None = None,
) -> Workspace:
    """Copies into one format, a bias of zeros where there is none, and cuDNN's workspace."""
    if input.dim() == 3:
        return unknown()
    settings = ConvolutionSettings(stride, padding, dilation, groups=groups)
    factor = 0.0 if z is None else 1.0 if alpha is None else float(alpha)
    operands = input, weight, outputs
    return as_told(cudnn, *forward_with_relu(cudnn, operands, z, bias, factor, settings))


operator("aten::slow_conv3d_forward", not_on=frozenset({"cuda"}))


@operator("aten::_slow_conv2d_forward", "aten::slow_conv3d_forward").meta()
def slow_convolution(
    input: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp."""
    settings = ConvolutionSettings(stride, padding, [1] * len(kernel_size))
    return convolution_shape(input, weight, settings)


@operator("aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d").meta()
def dilated_convolution(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """native/NaiveDilatedConvolution.cpp, cuda/DepthwiseConv2d.cu: shapes tell the groups."""
    groups = input.shape[1] // weight.shape[1]
    settings = ConvolutionSettings(stride, padding, dilation, groups=groups)
    return convolution_shape(input, weight, settings)


@operator("aten::slow_conv_transpose3d").meta()
def slow_convolution_transpose(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    output_padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
) -> Tensor:
    """native/NaiveConvolutionTranspose3d.cpp."""
    settings = ConvolutionSettings(stride, padding, dilation, True, output_padding)
    return convolution_shape(input, weight, settings)


@operator("aten::_slow_conv2d_backward.output_mask").meta()
def slow_convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """native/ConvolutionMM2d.cpp."""
    results = (like(input), like(weight), like(grad_output, (weight.shape[0],)))
    return tuple(
        result if wanted else None for result, wanted in zip(results, output_mask, strict=True)
    )
