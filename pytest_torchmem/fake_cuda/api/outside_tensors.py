"""Fake cuda beyond tensors' own methods: files and storages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.serialization

from pytest_torchmem.fake_cuda.api.storages import cuda_storages
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced

_CUDA = torch.device("cuda", 0)


@contextmanager
def cuda_outside_tensors(trace: TraceContext) -> Iterator[None]:
    """Let ``torch.load`` and storages know of fake cuda on the trace's thread."""
    with ExitStack() as stack:
        stack.enter_context(
            replaced(
                torch.serialization,
                default_restore_location=_restore(
                    trace, torch.serialization.default_restore_location
                ),
            )
        )
        stack.enter_context(cuda_storages(trace))
        yield


def _restore(trace: TraceContext, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def default_restore_location(storage: Any, location: str) -> Any:
        """Book a storage that a file holds, or ``map_location`` asks to have, on the GPU."""
        if trace.off() or not str(location).startswith("cuda"):
            return original(storage, location)
        trace.meet_storage(storage, _CUDA)
        return storage

    return default_restore_location
