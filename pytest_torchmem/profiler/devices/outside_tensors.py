"""Fake cuda beyond tensors' own methods: generators, files, storages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch.serialization

from pytest_torchmem.profiler.devices.stand_ins import SESSION
from pytest_torchmem.profiler.devices.tensors import Guard
from pytest_torchmem.profiler.patches import replaced

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)


@contextmanager
def cuda_outside_tensors(guard: Guard) -> Iterator[None]:
    """Let generators, ``torch.load`` and storages know of fake cuda on the trace's thread."""
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, Generator=_generator(torch.Generator)))
        stack.enter_context(
            replaced(
                torch.serialization,
                default_restore_location=_restore(
                    guard, torch.serialization.default_restore_location
                ),
            )
        )
        stack.enter_context(replaced(torch.UntypedStorage, **_storage(guard)))
        yield


@cache
def _generator(original: Any) -> type:
    """Return a ``torch.Generator`` that can be made for cuda; its numbers are the CPU's."""
    session = SESSION

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=Kind):  # type: ignore[misc]
        _fake: torch.device | None = None

        def __new__(cls, device: Any = "cpu") -> Any:
            if session.off() or torch.device(device).type != "cuda":
                return original(device=device)
            made = original.__new__(cls, device="cpu")
            made._fake = _CUDA
            return made

        def __init__(self, device: Any = "cpu") -> None:
            pass

        @property
        def device(self) -> torch.device:
            return self._fake or _CPU

    return Generator


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


def _storage(guard: Guard) -> dict[str, Any]:
    base: Any = torch.UntypedStorage.__mro__[1]

    def record(storage: torch.UntypedStorage) -> Any:
        if guard.off():
            return None
        return guard.interceptor.ledger.records.get(storage._cdata)

    def device(storage: torch.UntypedStorage) -> torch.device:
        known = record(storage)
        return (
            cast(torch.device, base.device.__get__(storage))
            if known is None
            else known.ledger.device
        )

    def is_cuda(storage: torch.UntypedStorage) -> bool:
        return device(storage).type == "cuda"

    def get_device(storage: torch.UntypedStorage) -> int:
        return 0 if is_cuda(storage) else -1

    return {"device": property(device), "is_cuda": property(is_cuda), "get_device": get_device}
