"""bitsandbytes beside its operators: its library in C++, and memory that it pages itself."""

import sys
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.third_party.bitsandbytes import NativeLibrary
from pytest_torchmem.torch_private.patches import Replacements, replaced_all


def bitsandbytes_library(trace: TraceContext, module: Any) -> AbstractContextManager[None]:
    """Let what bitsandbytes launches from Python take nothing; bitsandbytes/functional.py. What it
    keeps for the process, maps of quantization among it, is not the trace's.
    """
    functional = sys.modules[f"{module.__name__}.functional"]
    get_paged: Any = functional.get_paged

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
        """Make a tensor in memory that host and GPU share: the allocator for the GPU has none."""
        if trace.off():
            given = {} if device is None else {"device": device}
            return get_paged(*shape, dtype=dtype, **given)
        tensor: Any = torch.empty(*shape, dtype=dtype, device="cpu")
        tensor.is_paged, tensor.page_deviceid = True, 0
        return tensor

    library = _Library(trace, functional.lib)
    optimizers = sys.modules[f"{module.__name__}.optim.optimizer"].GlobalOptimManager
    replacements: Replacements = [
        (functional, {"lib": library, "get_paged": paged, "name2qmap": {}}),
        (functional.GlobalPageManager, {"_instance": None}),
        (optimizers, {"_instance": _copy_of(optimizers._instance)}),
    ]
    return replaced_all(replacements)


def _copy_of(manager: Any) -> Any:
    """Return a manager that knows of the parameters of the trace too, and is left behind there."""
    if manager is None:
        return None
    copied = copy(manager)
    tables = {name: one for name, one in vars(manager).items() if isinstance(one, (dict, list))}
    vars(copied).update({name: one.copy() for name, one in tables.items()})
    return copied


class _Library(NativeLibrary):
    """The library of the process, which does nothing on the trace's thread."""

    def __init__(self, trace: TraceContext, original: Any) -> None:
        self._trace = trace
        self._original = original

    def __getattr__(self, name: str) -> Any:
        on_thread = self._trace.on_thread()
        return super().__getattr__(name) if on_thread else getattr(self._original, name)
