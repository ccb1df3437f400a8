"""Fake quantization, which training for quantized inference rounds with; torch has no geometry.

native/quantized/FakeQuantPerTensorAffine.cpp and FakeQuantPerChannelAffine.cpp, on both devices.
"""

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import lying_alike
from pytest_torchmem.operators.registry import aten, operator


@operator(
    *aten("""
        fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    """)
).meta()
def rounded_and_mask(input: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded numbers, and which of them the backward lets pass."""
    return lying_alike(input), lying_alike(input, dtype=torch.bool)


@operator("aten::_fake_quantize_learnable_per_tensor_affine").decomposition()
def learnable_per_tensor(self: Tensor, quant_min: int, quant_max: int) -> Tensor:
    """The kernel without learned numbers; they are read on the host."""
    # Any zero point between the limits makes tensors of the same sizes.
    rounded: Tensor
    rounded, _ = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask.default(
        self, 1.0, quant_min, quant_min, quant_max
    )
    return rounded


@operator("aten::_fake_quantize_learnable_per_tensor_affine_backward").decomposition()
def learnable_per_tensor_backward(self: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scale and zero point for each number, which are added up."""
    of_input, of_scale, of_zero_point = (torch.empty_like(self) for _ in range(3))
    return of_input, of_scale.sum().unsqueeze(0), of_zero_point.sum().unsqueeze(0)


@operator("aten::_fake_quantize_learnable_per_channel_affine").decomposition()
def learnable_per_channel(
    self: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """The kernel without learned numbers, of the zero points rounded to whole numbers."""
    whole = zero_point.round().clamp_(quant_min, quant_max).to(torch.int)
    return torch.fake_quantize_per_channel_affine(self, scale, whole, axis, quant_min, quant_max)


@operator("aten::_fake_quantize_learnable_per_channel_affine_backward").decomposition()
def learnable_per_channel_backward(
    self: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scales and zero points for each number, which are added up by channel."""
    _rounded = zero_point.round().clamp_(quant_min, quant_max)
    _ = _rounded.min(), _rounded.max()
    del _
    of_input, of_scale, of_zero_point = (torch.empty_like(self) for _ in range(3))
    others = [dim for dim in range(self.dim()) if dim != axis]
    return of_input, of_scale.sum(others), of_zero_point.sum(others)
