"""Fake cuda beyond tensors' own methods: files and storages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.serialization

from pytest_torchmem.fake_cuda.api.storages import cuda_storages
from pytest_torchmem.interception.tensor_methods import Guard
from pytest_torchmem.torch_private.patches import replaced

_CUDA = torch.device("cuda", 0)


@contextmanager
def cuda_outside_tensors(guard: Guard) -> Iterator[None]:
    """Let ``torch.load`` and storages know of fake cuda on the trace's thread."""
    with ExitStack() as stack:
        stack.enter_context(
            replaced(
                torch.serialization,
                default_restore_location=_restore(
                    guard, torch.serialization.default_restore_location
                ),
            )
        )
        stack.enter_context(cuda_storages(guard))
        yield


def _restore(guard: Guard, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def default_restore_location(storage: Any, location: str) -> Any:
        """Book a storage that a file holds, or ``map_location`` asks to have, on the GPU."""
        if guard.off() or not str(location).startswith("cuda"):
            return original(storage, location)
        interceptor = guard.interceptor
        with interceptor.working():
            tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
            interceptor.meet(tensor, _CUDA)
        return storage

    return default_restore_location
