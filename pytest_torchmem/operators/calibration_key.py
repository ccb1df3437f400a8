"""What a calibration is asked: an operator and its geometry, the same text in a trace as on a GPU.

A tensor is its type and shape, with its strides where it is not contiguous::

    float32[8,3,224,224], bfloat16[4,6]@1:4, None, [2,2], False, dim=1

Devices and generators are left out, and so are buffers whose size a library alone decides: it
follows from the other arguments, and a trace may not know it. Settings by which cuDNN chooses
between kernels stand behind, where they are not the default: ``; deterministic``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.torch_private.state.settings import library_settings

if TYPE_CHECKING:
    from pytest_torchmem.targets.calibration import WorkspaceKey

_NO_GEOMETRY = ("device", "pin_memory", "generator")


def key_of(spec: OperatorSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WorkspaceKey:
    """Return what is to be asked of an operator that is called with these arguments now."""
    left_out = spec.record.not_in_key
    if left_out:
        named = zip(spec.argument_names, args, strict=False)
        args = [value for name, value in named if name not in left_out]
        kwargs = {name: value for name, value in kwargs.items() if name not in left_out}
    geometry = geometry_text(args, kwargs)
    settings = library_settings()
    from pytest_torchmem.targets.calibration import WorkspaceKey

    return WorkspaceKey(spec.name, f"{geometry}; {', '.join(settings)}" if settings else geometry)


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
