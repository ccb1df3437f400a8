"""What the device gives in segments, how much of it, and at which addresses.

Of free blocks of one size torch takes that of the oldest segment, before torch 2.12 that of the
lowest address; and what is left of it decides where later requests go.
"""

import sys
from bisect import insort
from dataclasses import dataclass, field

from pytest_torchmem.allocator.options import MIB, AllocatorOptions
from pytest_torchmem.allocator.statistics import Statistics

_CHUNK = 32 * MIB
_OF_CONTEXT = 13 * _CHUNK
"""What the context of an H100 has of addresses before the first kernel, and gives back then."""
_TOP = 1 << 47
"""Where the addresses of a program end; those of expandable segments are taken to begin there."""


class Addresses:
    """Each segment behind the ones before it, so that the lowest address is that of the oldest."""

    def __init__(self) -> None:
        self._next = 2 * MIB
        self._reserved = _TOP

    def take(self, size: int) -> int:
        """Return where ``size`` bytes begin that nothing else has."""
        address = self._next
        self._next += size
        return address

    def give_back(self, address: int, size: int) -> None:
        """Let others have a segment's addresses."""

    def reserve(self, size: int) -> int:
        """Return where ``size`` bytes begin that have no memory yet (``cuMemAddressReserve``)."""
        address = self._reserved
        self._reserved += size
        return address


@dataclass(order=True, slots=True)
class _Chunk:
    """Addresses that the driver takes at once, and the parts of them that are free, in order."""

    begin: int
    end: int
    free: list[tuple[int, int]] = field(compare=False)


class DriverAddresses(Addresses):
    """Where the driver puts segments, as a GPU showed it (benchmarks/results/accuracy.md).

    It takes addresses in whole chunks, each as high as there is room below the one before. A
    segment lies in the lowest chunk that has room for it, a chunk that is free again is given
    back, and the first one stays: it is what the context used before the first kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        begin = _TOP - _OF_CONTEXT
        self._chunks = [_Chunk(begin, _TOP, [(begin, _TOP)])]

    def take(self, size: int) -> int:
        """Return where ``size`` bytes begin that nothing else has."""
        for chunk in self._chunks:
            for position, (begin, end) in enumerate(chunk.free):
                if end - begin >= size:
                    chunk.free[position : position + 1] = (
                        [(begin + size, end)] if end - begin > size else []
                    )
                    return begin
        nbytes = -(-size // _CHUNK) * _CHUNK
        end = _TOP
        for chunk in reversed(self._chunks):
            if end - chunk.end >= nbytes:
                break
            end = chunk.begin
        begin = end - nbytes
        insort(self._chunks, _Chunk(begin, end, [(begin + size, end)] if nbytes > size else []))
        return begin

    def give_back(self, address: int, size: int) -> None:
        """Let others have a segment's addresses."""
        position = next(i for i, chunk in enumerate(self._chunks) if address < chunk.end)
        chunk = self._chunks[position]
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*chunk.free, (address, address + size)]):
            if merged and merged[-1][1] == begin:
                begin = merged.pop()[0]
            merged.append((begin, end))
        chunk.free = merged
        if chunk.end < _TOP and merged == [(chunk.begin, chunk.end)]:
            del self._chunks[position]


def addresses_of_this_torch() -> Addresses:
    """Return those that the blocks of the torch that is imported are chosen by."""
    version = getattr(sys.modules.get("torch"), "__version__", "3").split(".")
    return DriverAddresses() if version[:2] == ["2", "11"] else Addresses()


class ReservedMemory:
    """What the device gave in segments; ``capacity`` and ``total`` are ``CachingAllocator``'s."""

    def __init__(self, options: AllocatorOptions, capacity: int | None, total: int | None) -> None:
        self.capacity, self.total = capacity, total if total is not None else capacity
        self.statistics = Statistics()
        self.reserved = 0
        self.addresses = addresses_of_this_torch()
        self.allowed: int | None = None
        """The most bytes of segments that this process may have, where it is limited."""
        self.options = options
        """May be replaced at any time; what is there stays as it is."""
        self.set_memory_fraction(options.memory_fraction)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit this process to a part of the device's memory (``setMemoryFraction``)."""
        if fraction >= 1:
            self.allowed = None
        elif self.total is not None:
            self.allowed = int(fraction * self.total)

    def has_room(self, size: int) -> bool:
        """Whether the device can give, and this process may have, ``size`` bytes more."""
        after = self.reserved + size
        return (self.capacity is None or after <= self.capacity) and self.may_have(size)

    def may_have(self, size: int) -> bool:
        """Whether ``size`` bytes more are within what this process is limited to."""
        return self.allowed is None or self.reserved + size <= self.allowed

    def add_reserved(self, size: int, small: bool) -> None:
        """Count memory that the device gave."""
        self.reserved += size
        self.statistics.num_device_alloc += 1
        for statistics in self.statistics.of[small]:
            statistics.reserved_bytes.increase(size)

    def remove_reserved(self, size: int, small: bool) -> None:
        """Count memory that went back to the device."""
        self.reserved -= size
        self.statistics.num_device_free += 1
        for statistics in self.statistics.of[small]:
            statistics.reserved_bytes.decrease(size)
