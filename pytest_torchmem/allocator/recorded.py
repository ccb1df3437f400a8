"""The replay of a recorded sequence of requests."""

from collections.abc import Iterable
from typing import NamedTuple

from pytest_torchmem.allocator.blocks import Block
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.options import parse_options
from pytest_torchmem.errors import UsageError


class Peaks(NamedTuple):
    """What the allocator counted at its most, each for itself, and at the end; in bytes.

    ``requested`` is the sum of what was asked for, ``allocated`` that of the blocks handed out
    (``torch.cuda.max_memory_allocated``), ``reserved`` that of the segments
    (``torch.cuda.max_memory_reserved``). ``unallocated`` is what was reserved and not allocated
    when ``reserved`` was at its peak first.
    """

    requested: int = 0
    allocated: int = 0
    reserved: int = 0
    unallocated: int = 0


class RunningPeaks:
    """The peaks of a sequence of requests so far."""

    __slots__ = ("allocated", "requested", "reserved", "unallocated")

    def __init__(self) -> None:
        self.requested = self.allocated = self.reserved = self.unallocated = -1

    def note(self, allocator: CachingAllocator) -> None:
        """Raise the peaks to what is in use now."""
        statistics = allocator.statistics.all
        allocated = statistics.allocated_bytes.current
        if statistics.requested_bytes.current > self.requested:
            self.requested = statistics.requested_bytes.current
        if allocated > self.allocated:
            self.allocated = allocated
        if allocator.reserved > self.reserved:
            self.reserved = allocator.reserved
            self.unallocated = allocator.reserved - allocated

    def found(self) -> Peaks:
        """Return the peaks as they are now."""
        return Peaks(self.requested, self.allocated, self.reserved, self.unallocated)


def replay(
    events: Iterable[int | tuple[int, int]],
    allocator: str = "",
    capacity: int | None = None,
    total: int | None = None,
) -> Peaks:
    """Return the peaks of a recorded sequence of requests.

    An event is ``nbytes > 0`` for a request, counted from 1 on, ``-index`` where the request of
    that number is freed, and ``0`` for ``empty_cache()``; or such a number with the number of its
    stream: ``(nbytes, stream)``. ``allocator`` is written as for ``PYTORCH_ALLOC_CONF``;
    ``capacity`` and ``total`` are those of ``CachingAllocator``.

    Raises ``OutOfMemory`` where ``capacity`` is not enough, and ``UsageError`` for an event that
    frees what is not there.
    """
    replayed = CachingAllocator(parse_options(allocator), capacity, total)
    blocks: list[Block | None] = [None]
    peaks = RunningPeaks()
    peaks.note(replayed)
    for event in events:
        number, stream = event if isinstance(event, tuple) else (event, 0)
        if number > 0:
            blocks.append(replayed.allocate(number, stream))
            peaks.note(replayed)
        elif number == 0:
            replayed.empty_cache()
        else:
            block = blocks[-number] if -number < len(blocks) else None
            if block is None:
                raise UsageError(f"event {number}: request {-number} is not there to be freed")
            blocks[-number] = None
            replayed.free(block)
    return peaks.found()
