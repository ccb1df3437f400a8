"""Functions of ``torch._C`` about GPUs that programs and tests call, past ``torch.cuda``.

Builds without CUDA lack them (torch/csrc/cuda/Module.cpp). ``_cuda_getDeviceCount`` is not among
them: torch takes a build that has it for one with CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.fake_cuda.api.streams import Stream, capture_of


def bindings() -> dict[str, Callable[..., Any]]:
    """Return them by name, for the GPUs of the trace that is running."""
    cuda = torch.cuda
    return {
        "_accelerator_getDefaultGenerator": _default_generator,
        "_cuda_exchangeDevice": _select,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getCurrentStream": lambda device: _triple(cuda.current_stream(device)),
        "_cuda_getDefaultStream": lambda device: _triple(cuda.default_stream(device)),
        "_cuda_getDevice": lambda: cuda.current_device(),
        "_cuda_isCurrentStreamCapturing": _is_capturing,
        "_cuda_maybeExchangeDevice": _select,
        "_cuda_setDevice": lambda device: cuda.set_device(device),
        "_cuda_setStream": _set_stream,
        "_cuda_synchronize": lambda: None,
    }


def _default_generator(device: int | None = None) -> torch.Generator:
    """What ``torch.accelerator.get_rng_state`` asks, and Inductor (torch/_inductor/ir.py)."""
    return torch.cuda.default_generators[torch.cuda.current_device() if device is None else device]


def _select(device: int) -> int:
    """Make a GPU the current one; return the one that was."""
    return SESSION.running.select(device)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    cast(Any, torch.cuda).set_stream(Stream(device_index, stream_id=stream_id))


def _triple(stream: Any) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _is_capturing() -> bool:
    stream = torch.cuda.current_stream()
    return capture_of(stream.device_index, stream.stream_id) is not None
