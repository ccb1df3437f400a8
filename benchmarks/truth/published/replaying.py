"""A recorded history through the replay of the caching allocator, event by event."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.truth.published.beginning import beginning, seed
from benchmarks.truth.published.snapshots import Event, History
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.device_memory import Addresses, Block, parse_options

_NEW = ("segment_alloc", "segment_map")
_GIVEN_BACK = ("segment_free", "segment_unmap")


@dataclass(slots=True)
class Outcome:
    """What was compared, and how often it was not the same; bytes where nothing else is said."""

    requests: int = 0
    segments: int = 0
    moved: int = 0
    """Requests that the replay placed at another address."""
    other_segments: int = 0
    """Requests for which the replay asked the device for other segments, or for none."""
    other_releases: int = 0
    """Times that the cache was emptied and other segments were given back."""
    other_blocks: int = 0
    """Blocks at the end, in use or free, that are not the same in the snapshot and the replay."""
    reserved_peak: tuple[int, int] = (0, 0)
    """Replayed and recorded."""
    reserved_end: tuple[int, int] = (0, 0)
    allocated_end: tuple[int, int] = (0, 0)
    allocated_peak: int = 0
    """Replayed: a snapshot does not have it, but what was allocated where decides it."""
    first: str = ""
    """The first thing that was not the same."""

    @property
    def is_exact(self) -> bool:
        """Whether everything was the same."""
        counts = self.moved, self.other_segments, self.other_releases, self.other_blocks
        figures = self.reserved_peak, self.reserved_end, self.allocated_end
        return not any(counts) and all(replayed == recorded for replayed, recorded in figures)

    def note(self, what: str) -> None:
        """Keep the first difference."""
        self.first = self.first or what


@dataclass(slots=True)
class _Device:
    """What the driver gave in the recording: addresses, which decide between equal blocks."""

    given: list[Event] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)


class _RecordedAddresses(Addresses):
    """Segments lie where they were recorded, and others beyond them."""

    def __init__(self, device: _Device) -> None:
        super().__init__()
        self._device = device

    def take(self, size: int) -> int:
        """Return the address of the recorded segment, if there was one."""
        given, position = self._device.given, len(self._device.made)
        if position < len(given):
            return given[position].address
        return super().reserve(size) + (1 << 60)

    reserve = take

    def give_back(self, address: int, size: int) -> None:
        """Do nothing."""


class RecordedAllocator(CachingAllocator):
    """A caching allocator whose device gives the recorded addresses, or its own."""

    def __init__(self, options: str, recorded_addresses: bool) -> None:
        super().__init__(parse_options(options))
        self.device = _Device()
        self.recorded_addresses = recorded_addresses
        if recorded_addresses:
            self.addresses = _RecordedAddresses(self.device)

    def change_reserved(self, size: int, small: bool, segments: int = 0) -> None:
        """Count memory that the device gave, or that went back to it."""
        super().change_reserved(size, small, segments)
        if size > 0:
            self.device.made.append(size)
        else:
            self.device.released.append(-size)


def replay(history: History, recorded_addresses: bool = True) -> Outcome:
    """Return how the replay of a history differs from it.

    Where the cache was emptied, the recording says so by what was given back. Without
    ``recorded_addresses`` segments lie where a trace takes them to lie.
    Raises ``SnapshotError`` for a history that cannot be followed.
    """
    allocator = RecordedAllocator(history.options, recorded_addresses)
    blocks: dict[int, Block | None] = {**seed(allocator, history)}
    device, outcome = allocator.device, Outcome()
    device.made.clear()
    reserved = peak = sum(segment.size for segment in beginning(history).segments)
    given_back: list[int] = []
    for position, event in enumerate(history.events):
        if given_back and event.action not in _GIVEN_BACK:
            _empty(allocator, outcome, given_back, position)
        if event.action in _NEW:
            device.given.append(event)
            reserved += event.size
            peak = max(peak, reserved)
        elif event.action in _GIVEN_BACK:
            given_back.append(event.size)
            reserved -= event.size
        elif event.action == "alloc":
            blocks[event.address] = _request(allocator, outcome, event, position)
        elif event.action == "free_completed":
            block = blocks.pop(event.address, None)
            if block is not None:
                allocator.free(block)
    if given_back:
        _empty(allocator, outcome, given_back, len(history.events))
    recorded = {(one.address, one.size, one.in_use) for one in history.pieces}
    replayed = {(one.address, one.size, one.allocated) for one in allocator.blocks()}
    if recorded_addresses and recorded != replayed:
        outcome.other_blocks = len(recorded ^ replayed)
        outcome.note("other blocks at the end")
    outcome.allocated_end = (_in_use(replayed), _in_use(recorded))
    outcome.reserved_end = (allocator.reserved, sum(one.size for one in history.segments))
    statistics = allocator.statistics.all
    outcome.reserved_peak = (statistics.reserved_bytes.peak, peak)
    outcome.allocated_peak = statistics.allocated_bytes.peak
    return outcome


def _request(
    allocator: RecordedAllocator, outcome: Outcome, event: Event, position: int
) -> Block | None:
    device = allocator.device
    block = allocator.allocate(event.size, event.stream)
    outcome.requests += 1
    outcome.segments += len(device.given)
    recorded = [given.size for given in device.given]
    if device.made != recorded:
        outcome.other_segments += 1
        outcome.note(f"event {position}: segments {recorded}, replayed {device.made}")
    if block is not None and block.address != event.address and allocator.recorded_addresses:
        outcome.moved += 1
        outcome.note(f"event {position}: at {event.address:#x}, replayed {block.address:#x}")
    device.given.clear()
    device.made.clear()
    return block


def _empty(
    allocator: RecordedAllocator, outcome: Outcome, given_back: list[int], position: int
) -> None:
    allocator.device.released.clear()
    allocator.empty_cache()
    if sorted(allocator.device.released) != sorted(given_back):
        outcome.other_releases += 1
        outcome.note(f"event {position}: other segments were given back")
    given_back.clear()


def _in_use(blocks: Iterable[tuple[int, int, bool]]) -> int:
    return sum(size for _, size, in_use in blocks if in_use)
