"""Multi-head attention and encoder layers in inference: one operator, which is a sequence of others
behind, on CUDA as well.

native/transformers/attention.cpp, cuda/attention.cu, and transformer.cpp
(``transformer_encoder_layer_forward``).
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.operators.attention.dot_product import FLASH, MATH, choose, choose_nested
from pytest_torchmem.operators.calls import AttentionArguments, CompositeCall, GivenCall
from pytest_torchmem.operators.layouts import NestedTensors, sizes_on_gpu
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import CONTIGUOUS, copied, like
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private import kernels, tensors

_aten: Any = torch.ops.aten
_TENSOR_CORES = 8
_attention = operator("aten::_native_multi_head_attention")
_projection = operator("aten::_transform_bias_rescale_qkv")
_projection_of_dense: Any = _aten._transform_bias_rescale_qkv.default


class AttentionLayer(NamedTuple):
    """What the layer is given, by the names of the schema's arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim: int
    num_head: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    mask: Tensor | None = None
    need_weights: bool = True
    average_attn_weights: bool = True
    mask_type: int | None = None


@_attention.decomposition("cpu")
def by_kernel(call: GivenCall) -> Any:
    """C++ that calls operators; native/transformers/attention.cpp, native_multi_head_attention_cpu;
    native/transformers/transformer.cpp, transformer_encoder_layer_forward.
    """
    return kernels.run_cpu_kernel(call.overload, *call.args, **call.kwargs)


# Copies of what is not dense; transform_bias_rescale_qkv_cpu.
_projection.workspace("cpu")(copied(qkv=CONTIGUOUS, qkv_bias=CONTIGUOUS))


@_attention.path("cuda")
def fused_or_unfused(machine: Gpu, call: CompositeCall, layer: AttentionLayer) -> Any:
    """``native_multi_head_attention_cuda``: a fused attention where one takes it."""
    query, heads = layer.query, layer.num_head
    if query.dim() != 3:
        return call()
    batch, steps, embed = query.shape
    size = embed // heads
    # A mask of padding has not the shape that fused kernels want.
    fused = query is layer.key is layer.value and not layer.need_weights and layer.mask is None
    if fused:
        parts = query.view(batch, steps, heads, size).transpose(1, 2)
        if choose(machine, AttentionArguments(parts, parts, parts)) != MATH:
            projected = functional.linear(query, layer.qkv_weight, layer.qkv_bias)
            q, k, v = (
                part.view(batch, -1, heads, size).transpose(1, 2) for part in projected.chunk(3, -1)
            )
            output = functional.scaled_dot_product_attention(q, k, v)
            merged = output.transpose(1, 2).reshape(batch, -1, embed)
            return functional.linear(merged, layer.proj_weight, layer.proj_bias), None
    # Project, multiply, softmax, multiply, project.
    projected = _qkv_projection(layer.query, layer.key, layer.value, layer.qkv_weight)
    q, k, v = _projection_of_dense(projected, layer.qkv_bias, heads)
    del projected
    kept = _attend(layer, q, k, v)
    merged = q.transpose(1, 2).reshape(batch, steps, embed)
    result = functional.linear(merged, layer.proj_weight, layer.proj_bias)
    del merged
    return result, _averaged(kept, layer)


def _attend(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Multiply, softmax, multiply, into ``q``; return the weights where they are needed."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores = scores.view(*q.shape[:3], k.size(2))
    if layer.query.is_nested:
        weights = _aten._nested_tensor_softmax_with_shape.default(scores, layer.query)
    elif layer.mask is None:  # ``masked_softmax``: in place
        weights = _aten._softmax.out(scores, -1, False, out=scores)
    else:
        weights = _aten._masked_softmax.default(scores, layer.mask.bool(), 3, layer.mask_type)
    del scores
    torch.bmm(weights.flatten(0, 1), v.flatten(0, 1), out=q.flatten(0, 1))
    return weights if layer.need_weights else None


def _averaged(weights: Tensor | None, layer: AttentionLayer) -> Tensor | None:
    if weights is None or not layer.average_attn_weights:
        return weights
    return weights.sum(1).div_(layer.num_head)


def _qkv_projection(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """``qkv_projection``: one product where all three are the same."""
    if query is key is value:
        return functional.linear(query, weight)
    parts = [
        functional.linear(tensor, part)
        for tensor, part in zip((query, key, value), weight.chunk(3), strict=True)
    ]
    return torch.cat(parts, 2)


# -- of nested tensors -----------------------------------------------------------------------------


@_attention.nested("cuda")
def of_nested(nested: NestedTensors, layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
    """native/transformers/cuda/attention.cu, native_multi_head_attention_cuda."""
    if layer.mask is not None:
        raise RuntimeError("NestedTensor with mask is not supported yet")
    if not layer.query is layer.key is layer.value:
        raise UnsupportedOperatorError(
            "attention between two nested tensors of the strided layout is not modelled on cuda; "
            "torch.nested with layout=torch.jagged is"
        )
    sizes = tensors.nested_sizes(layer.query)
    head = layer.embed_dim // layer.num_head
    rows = layer.query.values().view(-1, layer.embed_dim)
    if head % 8 == 0 and not layer.need_weights:
        lengths = [row[0] for row in sizes.tolist()]
        backend = choose_nested(nested.gpu, rows.dtype, head, lengths)
        if backend != MATH and 1 not in lengths:
            x = functional.linear(rows, layer.qkv_weight, layer.qkv_bias)
            attended = _fused_of_nested(nested, backend, x, layer.num_head, lengths)
            output = functional.linear(attended, layer.proj_weight, layer.proj_bias)
            return nested.wrap(output.view(-1), sizes), None
    # Project, multiply, softmax, multiply, project: padded in between.
    heads = layer.num_head
    projected = torch.mm(rows, layer.qkv_weight.t())
    qkv = nested.wrap(projected.view(-1), nested.with_last_size(sizes, 3 * layer.embed_dim))
    del projected
    q, k, v = _projection_of_dense(qkv, layer.qkv_bias, heads)
    del qkv
    kept = _attend(layer, q, k, v)
    merged = _aten._nested_from_padded.default(q, sizes, True)
    output = torch.addmm(
        layer.proj_bias, merged.values().view(-1, layer.embed_dim), layer.proj_weight.t()
    )
    width = layer.proj_weight.size(0)
    result = nested.wrap(output.view(-1), nested.with_last_size(sizes, width))
    return result, _averaged(kept, layer)


def _fused_of_nested(
    nested: NestedTensors, backend: int, projected: Tensor, heads: int, lengths: list[int]
) -> Tensor:
    """Attention of sequences that lie one behind the other; their ends are on the GPU twice;
    native/nested/cuda/NestedTensorTransformerUtils.cpp, sdpa_nested_preprocessing.
    """

    def kernel(made: Tensor) -> None:
        made.copy_(torch.tensor([0, *accumulate(lengths)]))

    longest, total = max(lengths), sum(lengths)
    ends, key_ends = (sizes_on_gpu(projected, len(lengths) + 1) for _ in range(2))
    for made in (ends, key_ends):
        nested.launch("sdpa_nested_preprocessing", kernel, made)
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


# -- projections -----------------------------------------------------------------------------------


@_projection.meta()
def views_of_projection(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Three views of one tensor; native/transformers/attention.cpp."""
    batch, length = qkv.shape[:2]
    width = qkv.shape[2] // 3
    whole = like(qkv, (3, batch, num_heads, length, width // num_heads))
    return whole[0], whole[1], whole[2]


@_projection.nested("cpu")
def padded_projection_on_cpu(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> Any:
    """native/transformers/attention.cpp, transform_bias_rescale_qkv_cpu."""
    padded = qkv.to_padded_tensor(0)
    return _projection_of_dense(padded, qkv_bias, num_heads)


@_projection.nested("cuda")
def padded_projection_on_cuda(
    nested: NestedTensors, qkv: Tensor, qkv_bias: Tensor, num_heads: int
) -> tuple[Tensor, ...]:
    """transform_bias_rescale_qkv_cuda: padded to a length that suits tensor cores."""
    lengths = [row[0] for row in tensors.nested_sizes(qkv).tolist()]
    steps, batch = max(lengths), len(lengths)
    steps += -steps % _TENSOR_CORES
    head = qkv_bias.size(0) // 3 // num_heads
    projected = qkv_bias.new_empty((3, batch, num_heads, steps, head))
    metadata = sizes_on_gpu(projected, 2 * batch + 1)

    def kernel(made: Tensor, rows: Tensor, bias: Tensor) -> None:
        padded = rows.new_zeros(batch, steps, bias.size(0))
        for part, piece in zip(padded, rows.view(-1, bias.size(0)).split(lengths), strict=True):
            part[: len(piece)] = piece
        made.copy_(torch.stack(_projection_of_dense(padded, bias, num_heads)))

    nested.launch("_transform_bias_rescale_qkv", kernel, projected, qkv.values(), qkv_bias)
    del metadata
    return tuple(projected.view(3 * batch, num_heads, steps, head).split(batch))


# One function for every device and layout.
_layer = operator("aten::_transformer_encoder_layer_fwd")
_layer.decomposition("cpu")(by_kernel)
_layer.path("cuda")(by_kernel)
