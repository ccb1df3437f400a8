"""Products of scaled and of whole numbers, and of groups: cuBLASLt's, or CUTLASS's on Hopper; and
with a result of another type than their operands (``torch.mm(..., out_dtype=)``).

native/cuda/Blas.cpp, ``_mm_dtype_cuda``, ``_bmm_dtype_cuda``, ``_addmm_dtype_cuda`` and
``_baddbmm_dtype_cuda``: cuBLAS adds up in float32 and does not round. The CPU has no such kernel.

Fake quantization, which training for quantized inference rounds with, has no geometry in torch;
native/quantized/FakeQuantPerTensorAffine.cpp and FakeQuantPerChannelAffine.cpp, on both devices.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_torchmem.operators.libraries.nvidia import beside_buffer
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.operators.workspace import Workspace, lying_alike, round_up, unknown
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.targets.gpus import Gpu

_ALIGNMENT = 16


@operator("aten::_int_mm", "aten::_scaled_mm").workspace("cuda")
def lt_product(
    machine: Gpu,
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Workspace | int:
    """cuBLASLt; scales of rows or blocks go to CUTLASS on Hopper, which takes its own;
    native/cuda/Blas.cpp, ``_int_mm_cuda``; native/cuda/ScaledBlas.cpp, ``_scaled_mm_out_cuda``.
    """
    if not (input.numel() and mat2.numel()):
        return 0
    found = beside_buffer(machine, lt=True)
    if any(scale is not None and scale.numel() > 1 for scale in (scale_a, scale_b)):
        return Workspace((), Confidence.UNKNOWN, found.kept)
    return found


@operator("aten::_scaled_mm.out").meta()
def scaled_into(input: Tensor, mat2: Tensor, out: Tensor) -> Tensor:
    """What is given, in the product's shape; native/cuda/ScaledBlas.cpp, ``_scaled_mm_out_cuda``.

    Compiled code calls it (torch/_inductor/kernel/mm.py, ``aten__fp8_mm``); torch has no kernel
    for ``meta``.
    """
    return out.resize_(input.shape[0], mat2.shape[1])


_LANES = (8, 4)
"""Rows and columns of the lanes of a warp, over its tile of 8 rows and 16 columns."""


@operator("aten::_convert_weight_to_int4pack").values("cuda")
def int4_packed(input: Tensor, innerKTiles: int) -> Tensor:
    """Eight numbers of two tiles in each ``int32``; ``matrix_to_m16n8k16_Bint4_layout``. Of the two
    numbers of a byte the first is in its upper half.
    """
    rows, width = input.shape
    tiles, pairs = -(-rows // 8), innerKTiles // 2
    whole = functional.pad(input.long(), (0, 0, 0, tiles * 8 - rows))
    lanes = whole.view(tiles, 8, width // (innerKTiles * 8), pairs, 2, 2, 4)
    four = lanes.permute(0, 2, 1, 6, 3, 4, 5).reshape(tiles, -1, 32, pairs, 4)
    shift = torch.arange(0, 16, 4)
    return (((four >> 4) << shift) + ((four & 15) << (shift + 16))).sum(-1).int()


@operator("aten::_weight_int4pack_mm").check("cuda")
def int4_operands(input: Tensor, mat2: Tensor, qGroupSize: int, qScaleAndZeros: Tensor) -> None:
    """What ``_weight_int4pack_mm_cuda`` checks."""
    tiles = mat2.shape[3] * 2 if mat2.dim() == 4 else 0
    expected = {
        "A.dtype() == at::kBFloat16": input.dtype == torch.bfloat16,
        "A.is_contiguous()": input.is_contiguous(),
        "A.dim() == 2": input.dim() == 2,
        "B.dtype() == at::kInt": mat2.dtype == torch.int32,
        "B.is_contiguous()": mat2.is_contiguous(),
        "B_innerKTiles == 2 || B_innerKTiles == 4 || B_innerKTiles == 8": tiles in (2, 4, 8),
        "B.size(1) == k / (B_innerKTiles * kKTileSize)": bool(tiles)
        and mat2.shape[1] == input.shape[-1] // (tiles * 16),
        "qGroupSize == 32 || qGroupSize == 64 || qGroupSize == 128 || qGroupSize == 256": (
            qGroupSize in (32, 64, 128, 256)
        ),
        "qScaleAndZeros.dim() == 3": qScaleAndZeros.dim() == 3,
    }
    for text, holds in expected.items():
        if not holds:
            raise RuntimeError(f"Expected {text} to be true, but got false.")


# Rows of 8 for each tile; torch's own asks for an attribute that fake tensors alone have.
operator("aten::_weight_int4pack_mm").meta()(
    lambda input, mat2: input.new_empty(input.shape[0], mat2.shape[0] * 8)
)


@operator("aten::_weight_int4pack_mm").values("cuda")
def int4_multiplied(input: Tensor, mat2: Tensor, qGroupSize: int, qScaleAndZeros: Tensor) -> Tensor:
    """The product with numbers from -8 to 7, times a scale and plus a zero for each group."""
    tiles, several, _, pairs = mat2.shape
    bits = mat2.long().unsqueeze(-1) >> torch.arange(0, 32, 4)  # of four bytes the upper, the lower
    lanes = (bits & 15).view(tiles, several, *_LANES, pairs, 2, 2, 2)
    weight = lanes.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(tiles * 8, -1) - 8
    scale, zero = qScaleAndZeros.float().repeat_interleave(qGroupSize, 0).unbind(-1)
    # The kernel has the weight in bfloat16, and adds up in float32.
    weight = (weight * scale.t() + zero.t()).bfloat16()
    return (input.float() @ weight.float().t()).bfloat16()


# Registered for every backend, and reading and writing data all the same.
grouped_mm = operator("aten::_grouped_mm", kind=OperatorKind.LEAF)


@grouped_mm.check()
def grouped_operands(
    input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """native/GroupedMMUtils.h, ``_grouped_mm_validate_inputs``: both devices' kernels ask it."""
    for one in (input, mat2):
        rows, columns = one.shape[-2:]
        of_row, of_column = one.stride()[-2:]
        if of_row == 1 and of_column >= max(1, rows):
            leading = of_column
        elif of_column == 1 and of_row >= max(1, columns):
            leading = of_row
        else:
            raise RuntimeError(
                f"Invalid strides/sizes, got {list(one.stride())} for strides and "
                f"{list(one.shape)} for sizes"
            )
        if leading % (16 // one.element_size()):
            raise RuntimeError("strides should be multiple of 16 bytes")
    if offs is not None and offs.dtype != torch.int32:
        raise RuntimeError("Offsets have to be int32")
    if bias is not None:
        raise RuntimeError("Bias not supported yet")


@grouped_mm.meta()
def grouped_rows(
    input: Tensor, mat2: Tensor, offs: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Rows of the output begin at multiples of 16 bytes; ``create_grouped_gemm_output_tensor``.
    native/GroupedMMUtils.h. Groups are the last operand's batches, or cut out by ``offs``.
    """
    dtype = out_dtype or input.dtype
    shape: tuple[int, ...] = (input.size(-2), mat2.size(-1))
    if input.dim() == mat2.dim():
        groups = input.size(0) if input.dim() == 3 else (0 if offs is None else offs.size(0))
        shape = (groups, *shape)
    row = round_up(shape[-1] * dtype.itemsize, _ALIGNMENT) // dtype.itemsize
    stride = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@grouped_mm.workspace("cpu")
def product_after_product(input: Tensor) -> Workspace | int:
    """A product into every group's rows; in other types than float32 oneDNN's, of which nothing is
    known. native/GroupedMMUtils.h, ``_grouped_mm_fallback``.
    """
    return 0 if input.dtype == torch.float32 else unknown()


@grouped_mm.workspace("cuda")
def product_for_every_group(machine: Gpu, input: Tensor) -> Workspace:
    """Of cuBLAS; in bfloat16 on Hopper and Blackwell CUTLASS, with its own.
    native/cuda/GroupedBlas.cpp, ``_grouped_mm_cuda`` (``_scaled_mm_allowed_device``: by major).
    """
    if machine.capability[0] in (9, 10) and input.dtype == torch.bfloat16:
        return unknown()
    return beside_buffer(machine)


@operator("mm.dtype mm.dtype_out bmm.dtype bmm.dtype_out").values("cuda")
def product(
    input: Tensor, mat2: Tensor, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The product, of operands in the type of the result."""
    found = input.to(out_dtype) @ mat2.to(out_dtype)
    return found if out is None else out.copy_(found)


@operator("addmm.dtype addmm.dtype_out baddbmm.dtype baddbmm.dtype_out").values("cuda")
def added_product(arguments: Mapping[str, Any], out: Tensor | None = None) -> Tensor:
    """The product and what is added to it."""
    names = ("mat1", "mat2") if "mat1" in arguments else ("batch1", "batch2")
    first, second = (arguments[name] for name in names)
    found: Tensor = product(first, second, arguments["out_dtype"]) * arguments.get("alpha", 1)
    beta = arguments.get("beta", 1)
    found = found if beta == 0 else found + arguments["self"].to(found.dtype) * beta
    return found if out is None else out.copy_(found)


@operator("aten::baddbmm.dtype", "aten::baddbmm.dtype_out").meta()
def added_products_geometry(
    batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """A matrix for each pair; torch's own decomposition of every overload takes the type for
    ``beta`` (torch/_decomp/decompositions.py, ``baddbmm``).
    """
    shape = batch1.shape[0], batch1.shape[1], batch2.shape[2]
    return batch1.new_empty(shape, dtype=out_dtype) if out is None else out.resize_(shape)


@operator(
    """
        fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    """
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
