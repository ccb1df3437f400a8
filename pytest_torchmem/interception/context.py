"""The running trace, as the functions that replace torch's own see it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.operators.sparse.parts import COMPRESSED
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.storages import storage_address
from pytest_torchmem.torch_private.tensors import unwrapped

_CPU = torch.device("cpu")


class TraceContext:
    """What replaced functions ask of the trace that is running, and do in it.

    It belongs to the thread on which it was made.
    """

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._thread = threading.get_ident()
        self.working = interceptor.working
        self.placing_on = interceptor.placing_on
        self.meet = interceptor.meet
        self.keep = interceptor.keep
        self.streams = interceptor.parts.streams
        self.values = interceptor.parts.values

    def off(self) -> bool:
        """Return whether the caller is the profiler itself or another thread."""
        return self._interceptor.inside or not self.on_thread()

    def on_thread(self) -> bool:
        """Return whether the caller is on the trace's thread."""
        return threading.get_ident() == self._thread

    def record(self, tensor: Tensor) -> StorageRecord | None:
        """Return the ledger's record of a tensor's storage, or None where it has none."""
        if self.off():
            return None
        try:
            return self._interceptor.parts.ledger.records.get(storage_address(tensor))
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            inner = tensor.values() if tensor.layout in COMPRESSED else unwrapped(tensor)
            return None if inner is None else self.record(inner)

    def record_of(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        """Return the ledger's record of a storage, or None where it has none."""
        return None if self.off() else self._interceptor.parts.ledger.records.get(storage._cdata)

    def without_memory(self, tensor: Tensor) -> StorageRecord | None:
        """Return the record of a tensor whose storage has no memory, or None."""
        record = self.record(tensor)
        return record if record is not None and record.hollow else None

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the fake GPU."""
        record = self.record(tensor)
        return record is not None and record.ledger.device.type == "cuda"

    def made_before_step(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage was there before the step."""
        record = self.record(tensor)
        return record is not None and record.ledger.origin(record.index).phase is Phase.BASELINE

    def meet_storage(self, storage: torch.UntypedStorage, device: torch.device = _CPU) -> None:
        """Book a real storage that C++ made just now."""
        with self.working():
            self.meet(torch.empty(0, dtype=torch.uint8).set_(storage), device)

    def pin(self, tensor: Tensor) -> None:
        """Take note that a tensor of the host is in pinned memory."""
        record = self.record(tensor)
        if record is not None:
            record.ledger.pinned.add(record.index)

    def device(self, named: torch.device) -> torch.device:
        """Return a device as the trace writes it; raise for a GPU that is not there."""
        return self._interceptor.parts.target.normalise(named)

    def user_line(self) -> str:
        """Return the line of the traced program that is running, as errors begin."""
        return self._interceptor.parts.attribution.user_line() or "the traced program"

    @property
    def inside(self) -> bool:
        """Whether the profiler itself is at work."""
        return self._interceptor.inside

    @property
    def is_placing(self) -> bool:
        """Whether ``placing_on`` is in force."""
        return self._interceptor.placed_on is not None

    @property
    def gpu(self) -> Gpu:
        """The GPU that fake cuda models."""
        gpu = self._interceptor.parts.target.gpu
        assert gpu is not None
        return gpu
