"""The indices of the GPUs that a trace models."""

from __future__ import annotations

from typing import Any

import torch

NOT_LINKED = "PyTorch is not linked with support for"
"""How torch says that it lacks the device that is asked for; c10/core/impl/VirtualGuardImpl.h."""

MODELLED = """(a trace models the CPU, and NVIDIA's GPUs with device="cuda")"""


def invalid_device_index(device: torch.device | str, gpus: int = 1) -> RuntimeError:
    """Return the error for a GPU that is not there (c10/cuda/CUDAException.cpp)."""
    there = "one GPU, cuda:0" if gpus == 1 else f"{gpus} GPUs, cuda:0 to cuda:{gpus - 1}"
    return torch.AcceleratorError(
        f"CUDA error: invalid device ordinal: {device} (the trace models {there}; trace with "
        "gpus=... to have more)"
    )


def not_linked(device: torch.device) -> RuntimeError:
    """Return the error for a kind of device that a trace does not model."""
    return RuntimeError(f"{NOT_LINKED} {device.type} devices {MODELLED}")


def as_device(device: Any) -> torch.device:
    """Return the device that a program names; a number is one of ``cuda``."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def index_of(device: Any, gpus: int, current: int) -> int:
    """Return the index of the GPU that a program names; None and -1 are the current one.

    As ``torch.cuda._utils._get_device_index`` reads it. Raises what torch raises for a device that
    is none, or no GPU of the trace.
    """
    if device is None:
        return current
    if isinstance(device, int):
        index: int | None = device
    else:
        named = torch.device(device)
        if named.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {named}")
        index = named.index
    if index is None or index == -1:
        return current
    if not 0 <= index < gpus:
        raise invalid_device_index(f"cuda:{index}", gpus)
    return index
