"""What is known, or assumed, of the values of storages: a table beside the ledger."""

import ctypes
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.interception.values.policy import zeros
from pytest_torchmem.torch_private.modes import NoDispatchModes
from pytest_torchmem.torch_private.settings import OneThread
from pytest_torchmem.torch_private.tensors import bytes_of, read_as, tensor_on

_UNWRITTEN = 0xA5
"""The first and the last bytes of memory that is shown and that nobody has written to."""
_AT_ENDS = 64


class Assumption(Enum):
    """A value that stands for all elements of a storage, and whether it is a guess."""

    __hash__ = object.__hash__  # that of ``Enum`` is a function of Python

    TRUE = (True, False)
    FALSE = (False, False)
    GUESSED_TRUE = (True, True)
    GUESSED_FALSE = (False, True)
    FIRST = (0, "position")
    """Of the positions that were found, one that exists wherever there is any."""

    @property
    def answer(self) -> Any:
        """The value."""
        return self.value[0]

    @property
    def guessed(self) -> bool:
        """Whether the value may well be another one in a real run."""
        return bool(self.value[1])


class Storage(Protocol):
    """What contents go by: a record of the ledger, or what outlives it."""

    @property
    def address(self) -> int:
        """A number that nothing else has meanwhile."""

    memory: Tensor | None
    """Bytes that are shown to whoever reads the storage."""


class Contents:
    """Values by storage, for as long as the ledger has the storage."""

    def __init__(self, ledger: Ledger) -> None:
        self.by_address: dict[int, Tensor] = {}
        """A storage's content as a flat uint8 tensor in real memory."""
        self._assumed: dict[int, Assumption] = {}
        """What the elements of an unknown storage count as, by its address."""
        self._sizes: dict[int, int] = {}
        self._of_others: dict[int, str] = {}
        """The storages whose content goes by what other processes are taken to have, by address:
        the line that gathered it."""
        self.unwritten: dict[int, tuple[tuple[int, int], ...]] = {}
        """The storages that nobody has written to since they were made empty, by address: where
        their memory begins and ends, in pointers and bytes."""
        self.live = 0
        """The bytes of all contents that are known."""
        self._noted = ledger.noted
        ledger.when_forgotten = self._forget

    def known(self, record: Storage) -> Tensor | None:
        """Return a storage's content as a flat uint8 tensor, ``None`` where it is not known."""
        if self.unwritten:
            self.settle((record,))
        return self.by_address.get(record.address)

    def leave_unwritten(self, record: Storage) -> None:
        """Know nothing of an empty storage until it is written to."""
        self._forget(record.address)
        self._noted.add(record.address)
        memory = record.memory
        assert memory is not None
        first, count = memory.data_ptr(), min(_AT_ENDS, memory.numel())
        self.unwritten[record.address] = ((first, count), (first + memory.numel() - count, count))
        self._mark(record, _UNWRITTEN)

    def begin_writing(self, record: Storage) -> None:
        """Know an empty storage that is written to from now on: what is not counts as zero."""
        if record.address in self.unwritten:
            self._mark(record, 0)
            self.show(record)

    def _mark(self, record: Storage, byte: int) -> None:
        """Fill the ends of unwritten memory; without torch, which may be intercepted here."""
        for pointer, count in self.unwritten[record.address]:
            ctypes.memset(pointer, byte, count)

    def settle(self, records: Iterable[Storage]) -> bool:
        """Know the storages that C++ has written to without an operator (``at::tensor``); return
        whether there are others that nobody has written to.
        """
        left = False
        for record in records:
            ends = self.unwritten.get(record.address)
            if ends is None:
                continue
            if any(ctypes.string_at(*end).strip(bytes([_UNWRITTEN])) for end in ends):
                self.show(record)
            else:
                left = True
        return left

    def are_known(self, records: Sequence[Storage]) -> bool:
        """Return whether the contents of all storages are known."""
        known = self.by_address
        if not known and not self.unwritten:
            return not records
        if self.unwritten:
            self.settle(records)
        return all(record.address in known for record in records)

    def have_values(self, records: Sequence[Storage], tensors: Sequence[Tensor]) -> bool:
        """Return whether the contents of all storages are known whose ``tensors`` have elements."""
        known = self.by_address
        if self.unwritten:
            self.settle(records)
        for position, record in enumerate(records):
            if record.address not in known and tensors[position].numel():
                return False
        return True

    def are_shown(self, records: Sequence[Storage]) -> bool:
        """Return whether whoever reads the storages reads what is known of them."""
        known = self.by_address
        for record in records:
            if (memory := record.memory) is None or known.get(record.address) is not memory:
                return False
        return True

    def assumed(self, record: Storage) -> Assumption | None:
        """Return what the elements of an unknown storage count as, if anything is assumed."""
        return self._assumed.get(record.address)

    def value(self, record: Storage, tensor: Tensor, content: Tensor | None = None) -> Tensor:
        """Return the real values of ``tensor``, a view of the known content of its storage.

        Or of a copy of that ``content``.
        """
        whole = self.by_address[record.address] if content is None else content
        storage = whole.untyped_storage()
        offset = int(tensor.storage_offset())
        real = tensor_on(storage, tensor.dtype, tensor.shape, tensor.stride(), offset)
        return read_as(tensor, real)

    def remember(self, record: Storage, tensor: Tensor) -> None:
        """Keep the content of the whole storage of the real ``tensor`` as that of ``record``."""
        # Not the modes of the program, which may be making a graph; and to copy takes no threads.
        with NoDispatchModes(), OneThread():
            content = bytes_of(tensor.untyped_storage())
            memory = record.memory
            self._set(record.address, content.clone() if memory is None else memory.copy_(content))

    def show(self, record: Storage, nbytes: int = 0) -> None:
        """Take a storage's bytes, or ``nbytes`` of new memory, as its known values."""
        self._set(record.address, zeros(nbytes) if record.memory is None else record.memory)

    @property
    def any_of_others(self) -> bool:
        """Whether any content goes by what other processes are taken to have."""
        return bool(self._of_others)

    def of_others(self, records: Iterable[Storage]) -> str:
        """Return the line that gathered values of other ranks, if a content depends on them."""
        found = self._of_others
        if not found:
            return ""
        return next((found[one.address] for one in records if one.address in found), "")

    def take_from_others(self, record: Storage, line: str) -> None:
        """Take note that a storage's content goes by what other processes are taken to have."""
        self._noted.add(record.address)
        self._of_others[record.address] = line

    def assume(self, record: Storage, assumption: Assumption | None) -> None:
        """Let an assumption, or nothing, stand for the elements of a storage."""
        self._forget(record.address)
        if assumption is not None:
            self._noted.add(record.address)
            self._assumed[record.address] = assumption

    def _set(self, address: int, content: Tensor) -> None:
        self._forget(address)
        self._noted.add(address)
        self.by_address[address] = content
        self._sizes[address] = size = content.nbytes
        self.live += size

    def _forget(self, address: int) -> None:
        # Storages die at any moment: nothing is asked of tensors here, whose answers are tensors
        # while ``torch.jit`` traces.
        if address not in self._noted:
            return
        self._noted.discard(address)
        if self.by_address.pop(address, None) is not None:
            self.live -= self._sizes.pop(address)
        if self._assumed:
            self._assumed.pop(address, None)
        if self.unwritten:
            self.unwritten.pop(address, None)
        if self._of_others:
            self._of_others.pop(address, None)
