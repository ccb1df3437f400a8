"""Files of TorchScript: C++ reads and writes them, and has no GPU that tensors could be on."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private.patching.patches import Replacements

_DEVICE = "pytest_torchmem_device"
"""The extra file that says where the tensors of a module were: the other says that of C++'s."""
_SAYS_DEVICE = re.compile(rb"/data\.pkl$|/extra/" + _DEVICE.encode())
_GPU = re.compile(rb"cuda:\d+")


def torchscript_files(trace: TraceContext) -> Replacements:
    """Let ``torch.jit.load`` put modules on a GPU, by ``map_location`` or from where they were."""
    original: Any = torch.jit.load

    @wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if trace.off():
            return original(f, map_location, *args, **kwargs)
        named = _gpu_in(f) if map_location is None else map_location
        device = None if named is None else trace.device(as_device(named))
        if device is None or device.type != "cuda":
            return original(f, map_location, *args, **kwargs)
        # All are first read to the host, and then moved (jit/serialization/import.cpp).
        return original(f, "cpu", *args, **kwargs).to(device)

    module: Any = vars(torch.jit)["RecursiveScriptModule"]
    names = ("save", "save_to_buffer")
    return [
        (torch.jit, {"load": load}),
        (module, {name: _saying_device(getattr(module, name), trace) for name in names}),
    ]


def _saying_device(original: Callable[..., Any], trace: TraceContext) -> Callable[..., Any]:
    @wraps(original)
    def save(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not trace.off():
            tensors = [*module.parameters(), *module.buffers()]
            gpu = next((str(one.device) for one in tensors if one.is_cuda), "")
            if gpu:
                kwargs["_extra_files"] = {**(kwargs.get("_extra_files") or {}), _DEVICE: gpu}
        return original(module, *args, **kwargs)

    return save


def _gpu_in(file: Any) -> str | None:
    """Return the GPU that an archive's tensors were on, of a trace or for real."""
    is_stream = hasattr(file, "seek")
    place = file.tell() if is_stream else 0
    try:
        with ZipFile(file) as archive:
            said = [
                _GPU.search(archive.read(name))
                for name in archive.namelist()
                if _SAYS_DEVICE.search(name.encode())
            ]
    except (OSError, BadZipFile):  # torch says so
        return None
    finally:
        if is_stream:
            file.seek(place)
    return next((one[0].decode() for one in said if one), None)
