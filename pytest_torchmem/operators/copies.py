"""Operators whose kernels want dense arguments, and copy those that are not.

Mostly gradients: autograd hands kernels the expanded gradient of a sum, or one that was transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.formats import dense_copy
from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    suggested_format,
    transpose_scratch,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

_OWN = -1
"""In the layout that the argument's own strides suggest: channels last stays so."""

_PLAIN = -2
"""Contiguous."""

_COPIED: dict[str, dict[int, int]] = {
    # native/Activation.cpp
    "log_sigmoid_forward": {0: _PLAIN},
    "log_sigmoid_backward": {1: _PLAIN},
    # native/SegmentReduce.cpp
    "_segment_reduce_backward": {0: _PLAIN},
}


def _function(copied: Mapping[int, int]) -> Callable[..., int]:
    def copies(operands: list[Any]) -> int:
        total = 0
        for position, layout in copied.items():
            tensor = operands[position] if position < len(operands) else None
            if not isinstance(tensor, Tensor):
                continue
            memory_format = torch.contiguous_format
            like = tensor if layout == _OWN else operands[layout] if layout >= 0 else None
            if isinstance(like, Tensor) and like.dim() == tensor.dim():
                memory_format = suggested_format(like)
            total += dense_copy(tensor, memory_format)
        return total

    copies.__doc__ = "Dense copies of what is not; see the table."
    return copies


for _name, _positions in _COPIED.items():
    operator(f"aten::{_name}").workspace("cpu")(_function(_positions))


@operator("aten::gelu_backward").workspace("cpu")
def gelu_backward(
    machine: Host, grad_output: Tensor, input: Tensor, *, approximate: str = "none"
) -> int:
    """A gradient that does not lie as the input does is reordered by oneDNN; native/Activation.cpp,
    gelu_backward_out_cpu and use_mkldnn, ideep's eltwise_backward.
    """
    onednn = machine.onednn and approximate == "none" and input.is_contiguous()
    if not onednn or input.numel() <= 1 or input.dtype not in (torch.float32, torch.bfloat16):
        return 0
    return contiguous_copy(grad_output)


@operator("aten::clone").workspace("cpu")
def clone(outputs: Tensor, input: Tensor) -> int:
    """The block that a transposed matrix is copied through; native/Copy.cpp."""
    return transpose_scratch(input) if outputs.is_contiguous() else 0


@operator("aten::copy_").workspace("cpu")
def copy_in_place(input: Tensor, src: Tensor) -> int:
    """The block that a transposed matrix is copied through; native/Copy.cpp,
    copy_transpose_valid.
    """
    if input.dtype != src.dtype or input.shape != src.shape or not input.is_contiguous():
        return 0
    return transpose_scratch(src)
