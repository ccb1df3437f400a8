"""Attention layers and encoder layers in inference: functions in C++ that call operators."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchmem.operators.cpu_bodies import body
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_cpu_kernel

_aten: Any = torch.ops.aten


@body("aten::_native_multi_head_attention")
def native_multi_head_attention(machine: Host, *arguments: Any, **options: Any) -> Any:
    """native/transformers/attention.cpp, native_multi_head_attention_cpu."""
    return run_cpu_kernel(_aten._native_multi_head_attention.default, *arguments, **options)


@body("aten::_transformer_encoder_layer_fwd")
def transformer_encoder_layer_fwd(machine: Host, *arguments: Any, **options: Any) -> Any:
    """native/transformers/transformer.cpp, transformer_encoder_layer_forward."""
    return run_cpu_kernel(_aten._transformer_encoder_layer_fwd.default, *arguments, **options)
