"""The device index of the one GPU that a trace models."""

from __future__ import annotations

from typing import Any

import torch


def invalid_device_index(device: torch.device | str) -> RuntimeError:
    """Return the error for a GPU that is not there (c10/cuda/CUDAException.cpp)."""
    return torch.AcceleratorError(
        f"CUDA error: invalid device ordinal: {device} (a trace models one GPU, cuda:0)"
    )


def as_device(device: Any) -> torch.device:
    """Return the device that a program names; a number is one of ``cuda``."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def check_device_index(device: Any) -> None:
    """Raise what torch raises for a device that is none, or not the GPU; None and -1 are it.

    As ``torch.cuda._utils._get_device_index`` reads it.
    """
    if device is None:
        return
    if isinstance(device, int):
        index: int | None = device
    else:
        named = torch.device(device)
        if named.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {named}")
        index = named.index
    if index not in (None, 0, -1):
        raise invalid_device_index(f"cuda:{index}")
