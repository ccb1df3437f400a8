"""Storages of fake cuda: where they are, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from pytest_torchmem.interception.tensor_methods import Guard
from pytest_torchmem.torch_private.patches import replaced

_CPU = torch.device("cpu")


@contextmanager
def cuda_storages(guard: Guard) -> Iterator[None]:
    """Let ``torch.UntypedStorage`` know of fake cuda; ``TypedStorage`` asks the one it wraps."""
    kind: Any = torch.UntypedStorage
    base: Any = kind.__mro__[1]
    interceptor = guard.interceptor

    def record(storage: torch.UntypedStorage) -> Any:
        if guard.off():
            return None
        return interceptor.ledger.records.get(storage._cdata)

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

    def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor on a storage, which one that C++ made is met with here."""
        with interceptor.working():
            tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        if record(storage) is None:
            interceptor.meet(tensor, _CPU)
        return tensor

    def moving(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what copies a storage to where ``original`` (``cuda``, ``cpu``, ``to``) does."""

        def move(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if guard.off() or storage.device.type == "meta":
                return original(storage, *args, **kwargs)
            tensor = as_bytes(storage)
            moved = getattr(tensor, original.__name__)(*args, **kwargs)
            return storage if moved is tensor else moved.untyped_storage()

        return move

    def clone(storage: torch.UntypedStorage) -> Any:
        if record(storage) is None:
            return original_clone(storage)
        return as_bytes(storage).clone().untyped_storage()

    original_clone = kind.clone
    with replaced(
        kind,
        device=property(device),
        is_cuda=property(is_cuda),
        get_device=get_device,
        clone=clone,
        **{name: moving(getattr(kind, name)) for name in ("cuda", "cpu", "to")},
    ):
        yield
