"""Softmax of half precision with a float result: one kernel on CUDA, a copy and a kernel on CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import operator


@operator("aten::softmax.int").path("cuda")
def softmax(call: CompositeCall, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """``_softmax`` with ``half_to_float``; native/SoftMax.cpp, softmax."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return torch.ops.aten._softmax.default(input, dim, True)
    return call()


@operator("aten::log_softmax.int").path("cuda")
def log_softmax(
    call: CompositeCall, input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Any:
    """``_log_softmax`` with ``half_to_float``; native/SoftMax.cpp, log_softmax."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return torch.ops.aten._log_softmax.default(input, dim, True)
    return call()
