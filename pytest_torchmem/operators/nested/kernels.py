"""Kernels of nested tensors that reach into memory, as far as they allocate."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.operators.arguments import EncoderLayer
from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.encoder_layer.paths import first_product, run_encoder_layer
from pytest_torchmem.operators.indexing.cpu import selects_serially
from pytest_torchmem.operators.nested.context import NestedTensors
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.kernels import run_nested_kernel
from pytest_torchmem.torch_private.tensors import nested_sizes

_aten: Any = torch.ops.aten


@operator("aten::_nested_tensor_from_tensor_list").nested("cpu")
def from_tensors(nested: NestedTensors, call: GivenCall) -> Tensor:
    """One buffer that the parts are copied to where all of them are contiguous, else the buffer of
    a concatenation; native/nested/NestedTensorUtils.h, wrap_tensor_node.
    """
    parts, *options = call.args
    dtypes = {part.dtype for part in parts}
    dense = len(dtypes) == 1 and all(part.is_contiguous() for part in parts)
    if not dense or any(option is not None for option in (*options, *call.kwargs.values())):
        operator = _aten._nested_tensor_from_tensor_list.default
        made: Tensor = run_nested_kernel(operator, *call.args, **call.kwargs)
        return made
    buffer = parts[0].new_empty((sum(part.numel() for part in parts),))
    return nested.wrap(buffer, nested.table([list(part.shape) for part in parts]))


@operator("aten::_padded_dense_to_jagged_forward").nested()
def padded_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """The values of a jagged tensor; native/nested/NestedTensorTransformerFunctions.cpp,
    _padded_dense_to_jagged_forward_cpu; native/nested/cuda/NestedTensorTransformerFunctions.cu.
    """
    total = offsets[0].tolist()[-1] if total_L is None else total_L
    return dense.new_empty((total, *dense.shape[2:]))


@operator("aten::native_layer_norm").nested()
def layer_norm(
    nested: NestedTensors, input: Tensor, normalized_shape: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """native/nested/NestedTensorMath.cpp, nested_layer_norm; the statistics are float on CUDA."""
    buffer = input.values()
    count = buffer.numel() // math.prod(normalized_shape)
    output = torch.empty_like(buffer)
    half = buffer.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half and buffer.device.type == "cuda" else buffer.dtype
    mean = buffer.new_empty((count,), dtype=dtype)
    rstd = buffer.new_empty((count,), dtype=dtype)
    return nested.wrap(output, nested_sizes(input)), mean, rstd


@operator("aten::_transform_bias_rescale_qkv").nested("cpu")
def transform_bias_rescale_qkv(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """native/transformers/attention.cpp, transform_bias_rescale_qkv_cpu."""
    padded = qkv.to_padded_tensor(0)
    batch, steps, size = padded.shape
    head = size // 3 // num_heads
    projected = padded.new_empty((3, batch, num_heads, steps, head))
    bias = qkv_bias.contiguous()
    parts = projected.view(3 * batch, num_heads, steps, head).split(batch)
    del bias
    return tuple(parts)


def _padding_masks(padded: Tensor, rows: list[list[int]]) -> list[Tensor]:
    """A mask for each part, of the shape of the largest."""
    target = [
        max(padded.size(column + 1), *(row[column] for row in rows))
        for column in range(padded.dim() - 1)
    ]
    masks = []
    for row in rows:
        mask = padded.new_full(row, True, dtype=torch.bool)
        missing = [
            side
            for size, goal in zip(reversed(row), reversed(target), strict=True)
            for side in (0, goal - size)
        ]
        masks.append(functional.pad(mask, missing))
        del mask
    return masks


@operator("aten::_nested_from_padded").nested("cpu")
def from_padded_by_mask(
    nested: NestedTensors,
    padded: Tensor,
    cpu_nested_shape_example: Tensor,
    fuse_transform_0213: bool = False,
) -> Tensor:
    """native/nested/NestedTensorMath.cpp, nested_from_padded_generic.

    ``masked_select`` is told again, because a mask for every element is too large to be known:
    native/TensorAdvancedIndexing.cpp, masked_select_out_impl_cpu.
    """
    if fuse_transform_0213:
        batch, heads, steps, size = padded.shape
        padded = padded.permute(0, 2, 1, 3).contiguous().view(batch, steps, heads * size)
    rows: list[list[int]] = cpu_nested_shape_example.tolist()
    masks = _padding_masks(padded, rows)
    mask = torch.stack(masks)
    count = mask.sum()
    del count
    buffer = padded.new_empty((sum(map(math.prod, rows)),))
    if buffer.numel() and not selects_serially(nested.host, padded):
        selected = torch.empty(mask.shape, dtype=torch.int64)
        positions = torch.empty(mask.shape, dtype=torch.int64)
        del selected, positions
    made = nested.wrap(buffer, cpu_nested_shape_example)
    del masks
    return made


def to_padded_by_parts(self: Tensor, padding: float, output_size: list[int] | None) -> Tensor:
    """native/nested/NestedTensorMath.cpp, NestedTensor_to_padded_tensor_generic."""
    padded: Tensor = run_nested_kernel(_aten.to_padded_tensor.default, self, padding, output_size)
    return padded


@operator("aten::_transformer_encoder_layer_fwd").nested()
def transformer_encoder_layer(nested: NestedTensors, layer: EncoderLayer) -> Tensor:
    """native/transformers/transformer.cpp, ``ffn``: on the buffer, with sizes of their own."""

    def feed_forward(x: Tensor) -> Tensor:
        sizes = nested_sizes(x)
        hidden = first_product(layer, x.values().view(-1, layer.embed_dim))
        width = layer.ffn_weight_1.size(0)
        x = nested.wrap(hidden.view(-1), nested.with_last_size(sizes, width))
        del hidden
        rows = x.values().view(-1, width)
        output = torch.addmm(layer.ffn_bias_2, rows, layer.ffn_weight_2.t())
        return nested.wrap(
            output.view(-1), nested.with_last_size(sizes, layer.ffn_weight_2.size(0))
        )

    return run_encoder_layer(layer, feed_forward)
