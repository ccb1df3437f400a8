"""Real storages that C++ makes without an operator: read from files, mapped, random states."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.serialization
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import Replacements


class RealStorages:
    """Books what functions of torch make beside operators."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._restore: Any = torch.serialization.default_restore_location
        self._from_file: Any = torch.UntypedStorage.from_file
        self._get_rng_state = torch.random.get_rng_state
        self._mapped: list[weakref.ref[torch.UntypedStorage]] = []

    def replacements(self) -> Replacements:
        """Return what takes the place of torch's own."""
        return [
            (torch.serialization, {"default_restore_location": self.restore}),
            (torch.UntypedStorage, {"from_file": staticmethod(self.from_file)}),
            *[(module, {"get_rng_state": self.get_rng_state}) for module in (torch, torch.random)],
        ]

    def restore(self, storage: Any, location: str) -> Any:
        """Book what ``torch.load`` reads from a file; one that it maps is booked as a whole."""
        restored = self._restore(storage, location)
        if not self._trace.off() and location == "cpu" and not self._is_mapped(storage):
            self._trace.meet_storage(storage)
        return restored

    def from_file(self, *args: Any, **kwargs: Any) -> Any:
        """Book a file that is mapped, as torch's profiler does (aten/src/ATen/MapAllocator.cpp).

        ``torch.load(mmap=True)`` and safetensors cut their tensors out of it.
        """
        storage = self._from_file(*args, **kwargs)
        if not self._trace.off():
            self._mapped.append(weakref.ref(storage))
            self._trace.meet_storage(storage)
        return storage

    def get_rng_state(self) -> Tensor:
        """Book the tensor that the CPU's generator writes its state to."""
        state = self._get_rng_state()
        if not self._trace.off():
            self._trace.meet(state)
        return state

    def _is_mapped(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage lies in a mapped file, which lives as long as it does."""
        self._mapped = [file for file in self._mapped if file() is not None]
        return any(
            0 <= storage.data_ptr() - file.data_ptr() < file.nbytes()
            for file in (reference() for reference in self._mapped)
            if file is not None
        )
