"""Storages of fake cuda: where they are, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced

_CPU = torch.device("cpu")


@contextmanager
def cuda_storages(trace: TraceContext) -> Iterator[None]:
    """Let ``torch.UntypedStorage`` know of fake cuda; ``TypedStorage`` asks the one it wraps."""
    kind: Any = torch.UntypedStorage
    base: Any = kind.__mro__[1]

    def device(storage: torch.UntypedStorage) -> torch.device:
        known = trace.record_of(storage)
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
        with trace.working():
            tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        if trace.record_of(storage) is None:
            trace.meet(tensor, _CPU)
        return tensor

    def moving(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what copies a storage to where ``original`` (``cuda``, ``cpu``, ``to``) does."""

        def move(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if trace.off() or storage.device.type == "meta":
                return original(storage, *args, **kwargs)
            tensor = as_bytes(storage)
            moved = getattr(tensor, original.__name__)(*args, **kwargs)
            return storage if moved is tensor else moved.untyped_storage()

        return move

    def clone(storage: torch.UntypedStorage) -> Any:
        if trace.record_of(storage) is None:
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
