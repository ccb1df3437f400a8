"""Layer normalization of nested tensors; native/nested/NestedTensorMath.cpp."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_torchmem.operators.nested.context import NestedTensors
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.tensors import nested_sizes


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
