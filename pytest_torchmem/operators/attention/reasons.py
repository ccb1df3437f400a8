"""Why a call of scaled dot-product attention is computed by matrix products.

The constraints are those of native/transformers/sdp_utils_cpp.cpp (``use_flash_attention_cpp``) and
native/transformers/cuda/sdp_utils.cpp, in the order in which both ask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.arguments import Attention
from pytest_torchmem.operators.attention.choice import mask_fits

_LARGEST_HEAD = 256
_HALF = (torch.float16, torch.bfloat16)


def why_not_fused(call: Attention, device: str) -> str:
    """Return the first constraint of a fused kernel that a call does not keep, "" for none."""
    query, key, value = call.query, call.key, call.value
    for holds, reason in (
        (_disabled(device), "fused kernels are switched off"),
        (device == "cpu" and call.dropout_p > 0, f"dropout_p is {call.dropout_p}"),
        (
            not query.dim() == key.dim() == value.dim() == 4,
            f"query has {query.dim()} dimensions, and 4 are needed",
        ),
        (query.dtype is torch.float64 and device == "cuda", "the dtype is float64"),
        (_heads_differ(call), "query and key have different heads without enable_gqa"),
        (0 in (*query.shape, *key.shape), "a sequence is empty"),
        (
            not query.size(-1) == key.size(-1) == value.size(-1),
            f"heads of query and value have sizes {query.size(-1)} and {value.size(-1)}",
        ),
        (device == "cuda" and query.size(-1) > _LARGEST_HEAD, f"heads have size {query.size(-1)}"),
        *((tensor.stride(-1) != 1, f"{name} is not contiguous in its last dimension, of stride "
           f"{tensor.stride(-1)}") for name, tensor in _named(call)),
        (_has_gradient(call.attn_mask), "attn_mask requires grad"),
        (device == "cpu" and not mask_fits(call), f"attn_mask has shape {_shape(call.attn_mask)}"),
        (device == "cuda" and call.attn_mask is not None, "attn_mask is given"),
        (device == "cuda" and query.dtype not in _HALF, f"the dtype is {_name(query.dtype)}"),
    ):  # fmt: skip
        if holds:
            return reason
    return ""


def _named(call: Attention) -> list[tuple[str, Tensor]]:
    named = [("query", call.query), ("key", call.key), ("value", call.value)]
    return named + ([("attn_mask", call.attn_mask)] if call.attn_mask is not None else [])


def _shape(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else list(tensor.shape)


def _heads_differ(call: Attention) -> bool:
    if call.enable_gqa or call.query.dim() != 4 or call.key.dim() != 4:
        return False
    return call.query.size(1) != call.key.size(1)


def _has_gradient(mask: Tensor | None) -> bool:
    return mask is not None and mask.requires_grad


def _disabled(device: str) -> bool:
    backends = torch.backends.cuda  # the same switches hold on the CPU
    fused = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
    return not fused[0] if device == "cpu" else not any(fused)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
