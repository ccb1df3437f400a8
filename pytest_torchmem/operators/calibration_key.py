"""What a calibration is asked: an operator and its geometry, the same text in a trace as on a GPU.

A tensor is its type and shape, with its strides where it is not contiguous::

    float32[8,3,224,224], bfloat16[4,6]@1:4, None, [2,2], False, dim=1

Devices and generators are left out, and so are buffers whose size a library alone decides: it
follows from the other arguments, and a trace may not know it. Settings by which cuDNN chooses
between kernels stand behind, where they are not the default: ``; deterministic``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.operator import Operator
from pytest_torchmem.targets.calibration import Question
from pytest_torchmem.torch_private.settings import library_settings

RESERVES = {
    "aten::_batch_norm_with_update": 3,
    "aten::_batch_norm_with_update_functional": 3,
    "aten::_cudnn_rnn": 3,
    "aten::cudnn_batch_norm": 3,
}
"""The output whose size cuDNN alone decides, by operator: its position. What the backward needs of
the forward; native/cudnn/RNN.cpp and native/cudnn/BatchNorm.cpp."""

STATES = frozenset({"aten::_cudnn_init_dropout_state"})
"""Operators that make what a library keeps, as their one output, and whose size it alone decides;
native/cudnn/RNN.cpp, ``get_dropout_state``."""

_LEFT_OUT = {
    "aten::_cudnn_init_dropout_state": ("dropout", "train", "dropout_seed", "dtype", "layout"),
    "aten::_cudnn_rnn": ("dropout_state",),
    "aten::_cudnn_rnn_backward": ("dropout_state", "reserve"),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("philox_seed", "philox_offset"),
    "aten::_scaled_dot_product_efficient_attention_backward": ("philox_seed", "philox_offset"),
    "aten::batch_norm_backward": ("reserve",),
    "aten::cudnn_batch_norm_backward": ("reserveSpace",),
}
"""The arguments that are such buffers, by operator; and random states, which decide nothing."""
_NO_GEOMETRY = ("device", "pin_memory", "generator")


def question_of(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Question:
    """Return what is to be asked of an operator that is called with these arguments now."""
    left_out = _LEFT_OUT.get(operator.name, ())
    if left_out:
        named = zip(operator.argument_names, args, strict=False)
        args = [value for name, value in named if name not in left_out]
        kwargs = {name: value for name, value in kwargs.items() if name not in left_out}
    geometry = geometry_text(args, kwargs)
    settings = library_settings()
    return Question(operator.name, f"{geometry}; {', '.join(settings)}" if settings else geometry)


def geometry_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return arguments as text."""
    parts = [_text(value) for value in args if not _is_left_out(value)]
    parts += [
        f"{name}={_text(value)}"
        for name, value in sorted(kwargs.items())
        if not _is_left_out(value) and name not in _NO_GEOMETRY
    ]
    return ", ".join(parts)


def _is_left_out(value: Any) -> bool:
    return isinstance(value, (torch.Generator, torch.device))


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = ",".join(map(str, value.shape))
        dense = value.layout is not torch.strided or value.is_contiguous()
        strides = "" if dense else "@" + ":".join(map(str, value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]{strides}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    return str(value).removeprefix("torch.")
