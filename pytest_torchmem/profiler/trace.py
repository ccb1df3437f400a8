"""One trace: the layers switched on, the step run, the layers switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_torchmem.profiler.profile import MemoryProfile


def trace(
    target: Any,
    *args: Any,
    device: str = "cpu",
    gpu: str | None = None,
    host: str = "reference",
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
    **kwargs: Any,
) -> MemoryProfile:
    """Run one training step of ``target`` on a fake device and return the bytes it would take."""
    raise NotImplementedError
