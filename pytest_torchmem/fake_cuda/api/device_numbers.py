"""Numbers that name a device, and the accelerator that they are numbers of.

C++ asks its build which accelerator that is (``at::getAccelerator``), and one for the CPU has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.torch_private.dispatch.type_calls import made_by, make
from pytest_torchmem.torch_private.patching import replaceable

_CUDA = torch.device("cuda")


@contextmanager
def device_numbers() -> Iterator[None]:
    """Let ``torch.device(0)`` be ``cuda:0``, and cuda the accelerator, on the trace's thread."""
    with LASTING.layer("device numbers", _functions) as device, made_by(torch.device, device):
        yield


def _functions(trace: TraceContext) -> Layer[Callable[..., Any]]:
    """Return the layer, whose owner makes devices."""
    accelerator: Any = replaceable.accelerator.original

    def device(*args: Any, **kwargs: Any) -> Any:
        number = args[0] if args else kwargs.get("device")
        if isinstance(number, Integral) and not isinstance(number, bool) and not trace.off():
            if number < 0:
                raise RuntimeError("Device index must not be negative")
            return make(torch.device, "cuda", int(number))
        return make(torch.device, *args, **kwargs)

    def get_accelerator(*args: Any) -> Any:
        return accelerator(*args) if trace.off() else _CUDA

    return Layer([replaceable.accelerator.by(get_accelerator)], device)
