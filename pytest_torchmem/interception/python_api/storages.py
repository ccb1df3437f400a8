"""Storages that get memory without an operator: read from files, mapped, resized, random states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.serialization
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import Functions, TraceContext, instead_of
from pytest_torchmem.interception.python_api.files import unknown_regions
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private.modes import made_by, make
from pytest_torchmem.torch_private.patches import RECEIVING, Replacements, next_batch, set_from_file
from pytest_torchmem.torch_private.tensors import bytes_of

_SIZES = ("size", "nbytes", "__len__")
"""What says how many bytes a storage holds."""


@contextmanager
def storages_booked(trace: TraceContext) -> Iterator[None]:
    """Book storages that a program makes by themselves; on fake cuda ``Storages`` does."""

    def made(*args: Any, **kwargs: Any) -> Any:
        storage = make(torch.UntypedStorage, *args, **kwargs)
        if not trace.off() and storage.device.type == "cpu":
            trace.expect_made(storage)
        return storage

    with made_by(torch.UntypedStorage, made):
        yield


class RealStorages(Functions):
    """Books what functions of torch make beside operators."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._waiting = 0
        self._sizes: dict[str, Any] = {name: getattr(torch.UntypedStorage, name) for name in _SIZES}

    def replacements(self) -> Replacements:
        """Return the methods, and what says sizes."""
        sizes = {name: self._size(name) for name in _SIZES}
        return [*super().replacements(), (torch.UntypedStorage, sizes)]

    @instead_of(torch.serialization, "default_restore_location")
    def restore(self, original: Any, storage: Any, location: str) -> Any:
        """Book the storages that ``torch.load`` reads; a mapped file is booked as a whole."""
        restored = original(storage, location)
        if self._trace.off() or location != "cpu":
            return restored
        if not self._trace.mapped.holds(storage):
            self._trace.meet_storage(storage)
        elif not self._trace.mapped.is_known(storage):
            self._trace.borrow_storage(storage)
        return restored

    @instead_of(torch.jit, "load")
    def load_script(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Book the tensors that C++ reads from a module's file, but not the texts of its code
        (torch/csrc/jit/serialization/import.cpp).
        """
        module = original(*args, **kwargs)
        if not self._trace.off():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.layout is torch.strided and not tensor.is_meta:
                    self._trace.meet_storage(tensor.untyped_storage())
        return module

    @instead_of(torch.UntypedStorage)
    def from_file(self, original: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        """Book a file that is mapped, as torch's profiler does (aten/src/ATen/MapAllocator.cpp).

        ``torch.load(mmap=True)`` and safetensors cut their tensors out of it.
        """
        storage = original(filename, *args, **kwargs)
        if not self._trace.off():
            self._trace.mapped.add(storage, unknown_regions(filename))
            self._trace.meet_storage(storage)
        return storage

    @instead_of(torch.UntypedStorage)
    def from_buffer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Book a copy of a program's bytes: an object that is sent, say
        (torch/distributed/distributed_c10d.py, ``_object_to_tensor``).
        """
        storage = original(*args, **kwargs)
        if not self._trace.off():
            self._trace.expect_made(storage)
        return storage

    @instead_of(RECEIVING[0])
    @instead_of(RECEIVING[1])
    def received(self, original: Any, *args: Any) -> Any:
        """Book memory that processes share where it is mapped, as torch's profiler does
        (aten/src/ATen/MapAllocator.cpp).
        """
        storage = original(*args)
        if not (self._waiting or self._trace.off()):
            self._trace.meet_storage(storage)
        return storage

    @instead_of(next_batch)
    def next_batch(self, original: Any, iterator: Any) -> Any:
        """Book what a ``DataLoader``'s workers have loaded where the program gets it.

        Which batches arrive before it, and wait for their turn, is a matter of time.
        """
        if self._trace.off():
            return original(iterator)
        self._waiting += 1
        try:
            batch = original(iterator)
        finally:
            self._waiting -= 1
        for tensor in tensors_in(batch):
            if tensor.layout is torch.strided and tensor.is_shared():
                self._trace.meet_storage(tensor.untyped_storage())
        return batch

    @instead_of(set_from_file)
    def set_from_file(self, original: Any, storage: torch.UntypedStorage, *args: Any) -> Any:
        """Read a storage that is there already, as ``torch.load`` does files of the older format
        (torch/serialization.py, ``_legacy_load``): what was known of it before is not its content.
        """
        record = self._trace.record_of(storage)
        if record is None:
            return original(storage, *args)
        contents = self._trace.values.contents
        with self._trace.working():
            read = torch.UntypedStorage(storage.nbytes()) if record.hollow else storage
            original(read, *args)
            if record.hollow or contents.known(record) is not None:
                contents.remember(record, bytes_of(read))
        return storage

    @instead_of(torch.UntypedStorage, "__getitem__")
    def get(self, original: Any, storage: torch.UntypedStorage, index: Any) -> Any:
        """Return a part of a storage, or one byte; that of a mapped file stands in the file.

        ``torch.asarray(storage)`` takes the first, to see that it is no sequence of sequences
        (torch/csrc/utils/tensor_new.cpp, ``compute_sizes``).
        """
        if isinstance(index, slice) or self._trace.off() or not self._trace.mapped.holds(storage):
            return original(storage, index)
        with self._trace.working():
            return original(storage, index)

    @instead_of(torch.UntypedStorage, "resize_")
    def resize(self, original: Any, storage: torch.UntypedStorage, size: int) -> Any:
        """Book that a storage without memory gets or gives back memory, as ``fully_shard`` does.

        Its tensors keep their geometry, and it has room for as much as it was made for. What the
        trace has computed values of is real memory that cannot be resized, and is booked alike.
        """
        record = self._trace.record_of(storage)
        if record is None or (not record.hollow and storage.resizable()):
            return original(storage, size)
        if size > self._sizes["nbytes"](storage):
            raise UnsupportedOperatorError(
                f"{self._trace.user_line()}: UntypedStorage.resize_ to more bytes than the storage "
                "was made with is not supported in a trace. Use tensor.resize_(size), or make a "
                "new tensor"
            )
        self._trace.resize(record, size)
        return storage

    def _size(self, name: str) -> Callable[[torch.UntypedStorage], int]:
        original, trace = self._sizes[name], self._trace

        def size(storage: torch.UntypedStorage) -> int:
            resized = trace.resized
            if resized and not trace.off():
                found = resized.get(storage._cdata)
                if found is not None:
                    return found
            # Of a fake tensor it may be a symbol, of which a number would fix its sizes.
            return original(storage)  # type: ignore[no-any-return]

        return size

    @instead_of(torch.random)
    @instead_of(torch)
    def get_rng_state(self, original: Any) -> Tensor:
        """Book the tensor that the CPU's generator writes its state to."""
        state: Tensor = original()
        if not self._trace.off():
            self._trace.meet(state)
        return state
