"""Attention layers and encoder layers in inference: functions in C++ that call operators."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.kernels import run_cpu_kernel

_aten: Any = torch.ops.aten


@operator("aten::_native_multi_head_attention").decomposition("cpu")
def native_multi_head_attention(call: GivenCall) -> Any:
    """native/transformers/attention.cpp, native_multi_head_attention_cpu."""
    return run_cpu_kernel(_aten._native_multi_head_attention.default, *call.args, **call.kwargs)


@operator("aten::_transformer_encoder_layer_fwd").decomposition("cpu")
def transformer_encoder_layer_fwd(call: GivenCall) -> Any:
    """native/transformers/transformer.cpp, transformer_encoder_layer_forward."""
    return run_cpu_kernel(_aten._transformer_encoder_layer_fwd.default, *call.args, **call.kwargs)
