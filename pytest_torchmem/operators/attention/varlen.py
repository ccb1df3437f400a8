"""The operators of ``torch.nn.attention.varlen``: their values are those of flash attention.

torch/nn/attention/varlen.py; native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_varlen_fwd``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.attention import values_by_sequence as by_sequence
from pytest_torchmem.operators.registry import operator


def describe() -> None:
    """Make the records; they are known once torch/nn/attention/varlen.py is imported."""
    operator("torch_attn::_varlen_attn").values("cuda")(_forward)
    operator("torch_attn::_varlen_attn_backward").values("cuda")(_backward)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_size: Sequence[int] | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums and an empty random state; torch/nn/attention/varlen.py, ``_varlen_attn``."""
    left, right = window_size or (None, None)
    output, sums, *_ = by_sequence.flash(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        0.0,
        is_causal,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=seqused_k,
        alibi_slopes=None,
        block_table=block_table,
    )
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None,
    window_size: Sequence[int] | None,
) -> list[Tensor | None]:
    """Gradients of query, key and value; ``_varlen_attn_backward``."""
    left, right = window_size or (None, None)
    return by_sequence.flash_backward(
        grad_out,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        0.0,
        is_causal,
        rng_state,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
