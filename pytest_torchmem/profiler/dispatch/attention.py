"""Scaled dot-product attention: which of CUDA's implementations takes it.

The order and the constraints are those of native/transformers/cuda/sdp_utils.cpp
(``_fused_sdp_choice_cuda``, ``use_flash_attention``, ``use_mem_efficient_attention``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.profiler.devices.catalogue import Gpu
from pytest_torchmem.profiler.dispatch.registry import Composite, cuda_kernel

_HALF = (torch.float16, torch.bfloat16)
_aten: Any = torch.ops.aten


@cuda_kernel("aten::scaled_dot_product_attention")
def scaled_dot_product_attention(
    gpu: Gpu,
    composite: Composite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run flash, memory-efficient or math attention; native/transformers/attention.cpp."""
    if query.dim() != 4 or not query.dtype.is_floating_point:
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    trains = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    if _flash_takes(gpu, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, trains):
        size = query.size(-1)
        padded = [_padded(tensor, 8) for tensor in (query, key, value)]
        output = _aten._scaled_dot_product_flash_attention.default(
            *padded, dropout_p, is_causal, False, scale=scale or size**-0.5
        )[0]
        return output[..., :size] if size % 8 else output
    if _efficient_takes(gpu, query, key, value, attn_mask, enable_gqa, trains):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, trains, dropout_p, is_causal, scale=scale
        )[0]
    return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(mask, query.dtype)
    return _aten._scaled_dot_product_attention_math.default(
        query,
        key,
        value,
        mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def _shapes_fit(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    if key.dim() != 4 or value.dim() != 4:
        return False
    if not query.size(0) == key.size(0) == value.size(0):
        return False
    if 0 in (query.size(2), key.size(2)) or 0 in (query.size(0), query.size(1)):
        return False
    heads = (query.size(1), key.size(1), value.size(1))
    if heads[0] == heads[1] == heads[2]:
        return True
    return grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0


def _last_dimension_dense(*tensors: Tensor) -> bool:
    return all(tensor.stride(-1) == 1 or tensor.size(-1) == 1 for tensor in tensors)


def _flash_takes(
    gpu: Gpu,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    trains: bool,
) -> bool:
    size = query.size(-1)
    if not torch.backends.cuda.flash_sdp_enabled() or gpu.capability < (8, 0):
        return False
    if mask is not None or query.dtype not in _HALF or size > 256:
        return False
    if not size == key.size(-1) == value.size(-1):
        return False
    if is_causal and query.size(2) != key.size(2):
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    small = gpu.capability in ((8, 6), (8, 9)) or gpu.capability[0] == 12
    if trains and small and (192 < size <= 224 or (size > 224 and dropout_p > 0)):
        return False
    return _shapes_fit(query, key, value, enable_gqa) and _last_dimension_dense(query, key, value)


def _efficient_takes(
    gpu: Gpu,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    enable_gqa: bool,
    trains: bool,
) -> bool:
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or gpu.capability < (5, 0):
        return False
    if query.dtype not in (*_HALF, torch.float32):
        return False
    if query.dtype == torch.bfloat16 and gpu.capability < (8, 0):
        return False
    alignment = _alignment(gpu, query.dtype)
    if query.size(-1) % alignment or value.size(-1) % alignment:
        return False
    if query.size(-1) != key.size(-1):
        return False
    if mask is not None and mask.requires_grad and trains and mask.dtype == torch.bool:
        return False
    return _shapes_fit(query, key, value, False) and _last_dimension_dense(query, key, value)


def _alignment(gpu: Gpu, dtype: torch.dtype) -> int:
    """Elements that a head's size has to be a multiple of; minimum_gemm_alignment."""
    if gpu.capability >= (8, 0):
        return 4 if dtype == torch.float32 else 8
    if gpu.capability >= (7, 0) and dtype in _HALF:
        return 8
    return 1


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """Return the last dimension padded to a multiple; attention.cpp, pad_last_dim."""
    missing = -tensor.size(-1) % multiple
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as what is added to the scores; convert_boolean_attn_mask."""
    bias = torch.zeros_like(mask, dtype=dtype)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as the kernel needs it; attention.cpp, preprocess_mask, pad_bias."""
    bias = _additive(mask, query.dtype) if mask.dtype == torch.bool else mask
    if bias.size(-1) % 16:
        missing = -bias.size(-1) % 16
        bias = functional.pad(bias, (0, missing))[..., : mask.size(-1)]
    return bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
