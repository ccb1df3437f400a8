"""Files of TorchScript: C++ reads them, and has no GPU to put tensors on."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.targets.device_index import as_device
from pytest_torchmem.torch_private.patching.patches import Replacements


def torchscript_files(trace: TraceContext) -> Replacements:
    """Let ``torch.jit.load`` put modules on a GPU."""
    original: Any = torch.jit.load

    @wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if trace.off() or map_location is None:
            return original(f, map_location, *args, **kwargs)
        device = trace.device(as_device(map_location))
        if device.type != "cuda":
            return original(f, map_location, *args, **kwargs)
        # All are first read to the host, and then moved (jit/serialization/import.cpp).
        return original(f, "cpu", *args, **kwargs).to(device)

    return [(torch.jit, {"load": load})]
