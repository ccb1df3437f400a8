"""The memory that an allocator has of its device, and may have."""

from __future__ import annotations

from pytest_torchmem.allocator.options import MIB, AllocatorOptions
from pytest_torchmem.allocator.statistics import Statistics

ROUND_LARGE = 2 * MIB


class ReservedMemory:
    """What the device gave in segments; ``capacity`` and ``total`` are ``CachingAllocator``'s."""

    def __init__(self, options: AllocatorOptions, capacity: int | None, total: int | None) -> None:
        self.capacity, self.total = capacity, total if total is not None else capacity
        self.statistics = Statistics()
        self.reserved = 0
        self._next_address = ROUND_LARGE
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

    def new_addresses(self, size: int) -> int:
        """Return where ``size`` bytes of addresses begin that nothing else has."""
        address = self._next_address
        self._next_address += -(-size // ROUND_LARGE) * ROUND_LARGE
        return address

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
