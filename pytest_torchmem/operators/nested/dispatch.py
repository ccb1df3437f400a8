"""What CUDA does with nested tensors in another way than the CPU.

Sizes, strides and offsets stay on the host; a kernel is given those it needs as one array of
32-bit integers on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.operators.arguments import AttentionLayer
from pytest_torchmem.operators.attention.choice import FLASH, MATH, choose_nested
from pytest_torchmem.operators.nested.context import NestedTensors
from pytest_torchmem.operators.nested.kernels import from_padded_by_mask, to_padded_by_parts
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.tensors import nested_sizes

_aten: Any = torch.ops.aten
_TENSOR_CORES = 8


def _on_gpu(beside: Tensor, count: int) -> Tensor:
    """Sizes and offsets for a kernel."""
    return beside.new_empty((count,), dtype=torch.int32)


@operator("aten::_nested_tensor_from_tensor_list").nested("cuda")
def from_tensors(nested: NestedTensors, list: Sequence[Tensor]) -> Tensor:
    """A concatenation of the parts; native/nested/NestedTensorUtils.h, wrap_tensor_node."""
    buffer = torch.cat([part.reshape(-1) for part in list])
    return nested.wrap(buffer, nested.table([part.shape for part in list]))


@operator("aten::_nested_from_padded").nested("cuda")
def nested_from_padded(
    nested: NestedTensors,
    padded: Tensor,
    cpu_nested_shape_example: Tensor,
    fuse_transform_0213: bool = False,
) -> Tensor:
    """native/nested/cuda/NestedTensorTransformerFunctions.cpp, nested_from_padded_cuda."""
    dimensions = 4 if fuse_transform_0213 else 3
    if padded.dim() != dimensions or padded.dtype not in (torch.float32, torch.float16):
        return from_padded_by_mask(nested, padded, cpu_nested_shape_example, fuse_transform_0213)
    rows: list[list[int]] = cpu_nested_shape_example.tolist()
    buffer = padded.new_empty((sum(map(math.prod, rows)),))
    metadata = _on_gpu(padded, cpu_nested_shape_example.numel() + padded.dim() + len(rows) + 1)
    del metadata
    return nested.wrap(buffer, cpu_nested_shape_example)


@operator("aten::to_padded_tensor").nested("cuda")
def to_padded_tensor(self: Tensor, padding: float, output_size: list[int] | None = None) -> Tensor:
    """native/nested/cuda/NestedTensorTransformerFunctions.cpp,
    NestedTensor_to_padded_tensor_cuda.
    """
    dtypes = (torch.float32, torch.float64, torch.float16)
    if self.dim() not in (2, 3, 4) or self.dtype not in dtypes:
        return to_padded_by_parts(self, padding, output_size)
    sizes = nested_sizes(self)
    rows: list[list[int]] = sizes.tolist()
    shape = [len(rows), *(max(column) for column in zip(*rows, strict=True))]
    output = self.values().new_empty(shape if output_size is None else output_size)
    columns = sizes.size(1)
    if self.dim() == 3 and output_size is None:  # the last two dimensions are taken for one
        columns = 1
    metadata = _on_gpu(output, len(rows) + 1 + len(rows) * columns)
    del metadata
    return output


@operator("aten::_transform_bias_rescale_qkv").nested("cuda")
def transform_bias_rescale_qkv(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """native/transformers/cuda/attention.cu, transform_bias_rescale_qkv_cuda: padded to a length
    that suits tensor cores.
    """
    lengths = [row[0] for row in nested_sizes(qkv).tolist()]
    steps, batch = max(lengths), len(lengths)
    steps += -steps % _TENSOR_CORES
    head = qkv_bias.size(0) // 3 // num_heads
    projected = qkv_bias.new_empty((3, batch, num_heads, steps, head))
    metadata = _on_gpu(projected, 2 * batch + 1)
    del metadata
    return tuple(projected.view(3 * batch, num_heads, steps, head).split(batch))


@operator("aten::_native_multi_head_attention").nested("cuda")
def native_multi_head_attention(
    nested: NestedTensors, layer: AttentionLayer
) -> tuple[Tensor, Tensor | None]:
    """native/transformers/cuda/attention.cu, native_multi_head_attention_cuda."""
    if layer.mask is not None:
        raise RuntimeError("NestedTensor with mask is not supported yet")
    if not layer.query is layer.key is layer.value:
        raise UnsupportedOperatorError(
            "attention between two nested tensors of the strided layout is not modelled on cuda; "
            "torch.nested with layout=torch.jagged is"
        )
    sizes = nested_sizes(layer.query)
    head = layer.embed_dim // layer.num_head
    rows = layer.query.values().view(-1, layer.embed_dim)
    if head % 8 == 0 and not layer.need_weights:
        lengths = [row[0] for row in sizes.tolist()]
        backend = choose_nested(nested.gpu, rows.dtype, head, lengths)
        if backend != MATH and 1 not in lengths:
            x = functional.linear(rows, layer.qkv_weight, layer.qkv_bias)
            attended = _fused(backend, x, layer.num_head, lengths)
            output = functional.linear(attended, layer.proj_weight, layer.proj_bias)
            return nested.wrap(output.view(-1), sizes), None
    return _unfused(nested, layer, rows, sizes)


def _unfused(
    nested: NestedTensors, layer: AttentionLayer, rows: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Project, multiply, softmax, multiply, project: padded in between."""
    heads = layer.num_head
    projected = torch.mm(rows, layer.qkv_weight.t())
    qkv = nested.wrap(projected.view(-1), nested.with_last_size(sizes, 3 * layer.embed_dim))
    del projected
    q, k, v = _aten._transform_bias_rescale_qkv.default(qkv, layer.qkv_bias, heads)
    del qkv
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores = scores.view(q.size(0), heads, q.size(2), q.size(2))
    weights = _aten._nested_tensor_softmax_with_shape.default(scores, layer.query)
    del scores
    torch.bmm(weights.flatten(0, 1), v.flatten(0, 1), out=q.flatten(0, 1))
    kept = weights if layer.need_weights else None
    del weights
    merged = _aten._nested_from_padded.default(q, sizes, True)
    output = torch.addmm(
        layer.proj_bias, merged.values().view(-1, layer.embed_dim), layer.proj_weight.t()
    )
    width = layer.proj_weight.size(0)
    result = nested.wrap(output.view(-1), nested.with_last_size(sizes, width))
    if kept is not None and layer.average_attn_weights:
        kept = kept.sum(1)
        kept /= heads
    return result, kept


def _fused(backend: int, projected: Tensor, heads: int, lengths: list[int]) -> Tensor:
    """Attention of sequences that lie one behind the other; their ends are on the GPU twice.

    native/nested/cuda/NestedTensorTransformerUtils.cpp, sdpa_nested_preprocessing.
    """
    longest, total = max(lengths), sum(lengths)
    ends, key_ends = (_on_gpu(projected, len(lengths) + 1) for _ in range(2))
    q, k, v = (part.view(total, heads, -1) for part in projected.chunk(3, -1))
    if backend == FLASH:
        output = _aten._flash_attention_forward.default(
            q, k, v, ends, key_ends, longest, longest, 0.0, False, False
        )[0]
    else:
        q, k, v = (part.unsqueeze(0) for part in (q, k, v))
        output = _aten._efficient_attention_forward.default(
            q, k, v, None, ends, key_ends, longest, longest, 0.0, 0, False
        )[0]
    merged: Tensor = output.reshape(total, -1)
    return merged
