"""Scaled dot-product attention on CUDA: what is done around the kernel that takes it, and cuDNN's.

native/transformers/attention.cpp, ``scaled_dot_product_attention``; native/cudnn/MHA.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.operators.arguments import Attention
from pytest_torchmem.operators.attention.choice import (
    CUDNN,
    EFFICIENT,
    FLASH,
    choose,
)
from pytest_torchmem.operators.geometry import dense_bytes
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, unknown
from pytest_torchmem.targets.gpus import Gpu

_aten: Any = torch.ops.aten


@operator("aten::scaled_dot_product_attention").path("cuda")
def scaled_dot_product_attention(
    machine: Gpu, attention: Attention, *, scale: float | None = None
) -> Any:
    """Run the implementation that the GPU would; attention.cpp."""
    query, key, value, given, dropout, is_causal, grouped = attention
    _validate(query, key, value, given)
    backend = choose(machine, attention)
    mask = _additive(given, query.dtype)
    if backend == CUDNN:
        return _aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, mask, attention.trains, dropout, is_causal, False, scale=scale
        )[0]
    if backend == FLASH:
        size = query.size(-1)
        padded = [_padded(tensor, 8) for tensor in (query, key, value)]
        output = _aten._scaled_dot_product_flash_attention.default(
            *padded, dropout, is_causal, False, scale=size**-0.5 if scale is None else scale
        )[0]
        return output[..., :size] if size % 8 else output
    if backend == EFFICIENT:
        bias = None if mask is None else _bias(mask, query, key)
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, attention.trains, dropout, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout, is_causal, None, scale=scale, enable_gqa=grouped
    )[0]


def _validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise for what no implementation takes; ``validate_sdpa_input``."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {mask.dtype} and  query.dtype: {query.dtype} instead."
        )


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """Return the last dimension padded to a multiple; ``pad_last_dim``."""
    missing = -tensor.size(-1) % multiple
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as what is added to the scores; ``convert_boolean_attn_mask``."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    other = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, other)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as the kernel needs it; ``preprocess_mask``, ``pad_bias``."""
    aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    if not aligned:
        size = mask.size(-1)
        mask = functional.pad(mask, (0, 8 - size % 8))[..., :size]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


@operator("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention_forward").workspace(
    "cuda"
)
def cudnn_forward() -> Workspace:
    """``mha_graph->get_workspace_size()``, which cuDNN alone knows; native/cudnn/MHA.cpp."""
    return unknown()


@operator(
    "aten::_scaled_dot_product_cudnn_attention_backward",
    not_in_key=("philox_seed", "philox_offset"),
).workspace("cuda")
def cudnn_backward(grad_out: Tensor, out: Tensor) -> Workspace:
    """A copy of a gradient that lies otherwise than the output, and cuDNN's; MHA.cpp,
    ``run_cudnn_SDP_bprop``.
    """
    alike = grad_out.stride() == out.stride()
    return unknown(0 if alike else dense_bytes(grad_out))
