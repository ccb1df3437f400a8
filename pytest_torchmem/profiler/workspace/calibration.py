"""Measured workspaces: what was recorded on a GPU for an operator and a geometry.

Where a library decides what a kernel takes (cuDNN, cuSOLVER, cuFFT), no source says how much. A
calibration is a function that answers from recorded figures::

    def lookup(operator: str, geometry: str, gpu: str) -> int | None: ...

    remove = register_calibration(lookup)

``operator`` is the overload's name (``"aten::convolution"``, ``"aten::sum.dim_IntList"``),
``geometry`` what :func:`geometry_key` makes of its arguments, on the GPU that recorded as in a
trace, and ``gpu`` a name of the catalogue (``"a100-80gb"``). It returns the bytes that the kernel
had live at its own peak beyond what was live before it and its outputs, without buffers that stay
(cuBLAS's), or ``None`` where nothing was recorded. A recorded figure replaces every formula but one
that is exact. It is asked once for each operator and geometry of a process, not at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.profiler.shapes import remembered_plans

Lookup = Callable[[str, str, str], "int | None"]

_LOOKUPS: list[Lookup] = []


def register_calibration(lookup: Lookup) -> Callable[[], None]:
    """Ask ``lookup`` before those registered earlier; return the function that takes it back."""
    _LOOKUPS.append(lookup)
    remembered_plans.cache_clear()

    def remove() -> None:
        if lookup in _LOOKUPS:
            _LOOKUPS.remove(lookup)
            remembered_plans.cache_clear()

    return remove


@contextmanager
def registered_calibration(lookup: Lookup) -> Iterator[None]:
    """Have a calibration for a while."""
    remove = register_calibration(lookup)
    try:
        yield
    finally:
        remove()


def calibrated_bytes(
    operator: str, args: Sequence[Any], kwargs: Mapping[str, Any], gpu: str
) -> int | None:
    """Return what was recorded for an operator and its arguments on a GPU, in bytes."""
    if not _LOOKUPS:
        return None
    geometry = geometry_key(args, kwargs)
    for lookup in reversed(_LOOKUPS):
        nbytes = lookup(operator, geometry, gpu)
        if nbytes is not None:
            return nbytes
    return None


def geometry_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what of an operator's arguments its workspace depends on, as text.

    A tensor is its type and shape, with its strides where it is not contiguous:
    ``"float32[8,3,224,224], bfloat16[4,6]@1:4, None, [2,2], False, dim=1"``. Devices and generators
    are left out.
    """
    parts = [_text(value) for value in args if not _is_left_out(value)]
    parts += [
        f"{name}={_text(value)}"
        for name, value in sorted(kwargs.items())
        if not _is_left_out(value) and name not in ("device", "pin_memory", "generator")
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
