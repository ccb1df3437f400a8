"""The state of the allocator in which a recording begins.

Most programs switch recording on in their midst. A snapshot has the allocator's state at its end,
and the events lead back from there: what the trace makes was not there, what it frees was. Of a
block that it frees, what was asked for is known and not always what it had: a few bytes more, up to
1 MiB, where they were not split off.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.truth.published.snapshots import History, Segment, SnapshotError
from pytest_torchmem.allocator.caching import SMALL, SMALL_SEGMENT, CachingAllocator
from pytest_torchmem.allocator.device_memory import Block, Expandable, Pool

_ADDRESSES = 1 << 40
"""Room behind a mapped range, more than any recording asks for."""


@dataclass(frozen=True, slots=True)
class Used:
    """A block that was in use; of one freed in the recording, only what was asked is known."""

    requested: int
    size: int | None


@dataclass(frozen=True, slots=True)
class Beginning:
    """Segments, and blocks in use by address."""

    segments: tuple[Segment, ...]
    used: Mapping[int, Used]


def beginning(history: History) -> Beginning:
    """Return how the allocator stood before the first event.

    Raises ``SnapshotError`` where end and events do not fit together, as when events are missing.
    """
    segments = {segment.address: segment for segment in history.segments}
    used = {
        piece.address: Used(piece.requested, piece.size) for piece in history.pieces if piece.in_use
    }
    for event in reversed(history.events):
        if event.action == "alloc" and event.size:
            if used.pop(event.address, None) is None:
                raise SnapshotError(f"what was made at {event.address:#x} is never seen again")
        elif event.action == "free_completed" and event.size:
            if event.address in used:
                raise SnapshotError(f"two blocks are at {event.address:#x} at once")
            used[event.address] = Used(event.size, None)
        elif event.action == "segment_alloc":
            if segments.pop(event.address, None) is None:
                raise SnapshotError(f"the segment at {event.address:#x} is never seen again")
        elif event.action == "segment_free":
            segments[event.address] = Segment(
                event.address, event.size, event.stream, event.size == SMALL_SEGMENT
            )
    if history.is_expandable:
        mapped = sum(segment.size for segment in history.segments) + sum(
            -event.size if event.action == "segment_map" else event.size
            for event in history.events
            if event.action in ("segment_map", "segment_unmap")
        )
        if mapped or used:
            raise SnapshotError("expandable segments are there before the recording begins")
        segments = {}
    return Beginning(tuple(sorted(segments.values(), key=lambda one: one.address)), used)


def seed(allocator: CachingAllocator, history: History) -> dict[int, Block]:
    """Bring an allocator into the state in which a history begins; return its blocks in use.

    They are by address.
    """
    start = beginning(history)
    extents = _extents(history, start.used)
    addresses = sorted(start.used)
    blocks: dict[int, Block] = {}
    for segment in start.segments:
        pool = allocator.small if segment.is_small else allocator.large
        allocator.change_reserved(segment.size, segment.is_small, segments=1)
        end = segment.address + segment.size
        inside = addresses[bisect_left(addresses, segment.address) : bisect_left(addresses, end)]
        _fill(allocator, pool, segment, [*inside, end], start.used, extents, blocks)
    allocator.statistics.reset_peaks()
    return blocks


def _fill(
    allocator: CachingAllocator,
    pool: Pool,
    segment: Segment,
    borders: Sequence[int],
    used: Mapping[int, Used],
    extents: Mapping[int, int],
    blocks: dict[int, Block],
) -> None:
    """Lay a segment's blocks, in use and free; ``borders`` are those in use, and its end."""
    position, last = segment.address, None
    for address, following in pairwise(borders):
        last = _free(pool, segment, position, address, last)
        size = _size(allocator, pool, used[address], following - address, extents.get(address))
        block = Block(address, size, segment.stream, pool)
        block.allocated, block.requested = True, used[address].requested
        block.splice(last, None)
        allocator.active.add(block)
        blocks[address] = last = block
        for statistics in allocator.statistics.of[pool.is_small]:
            statistics.allocation.change(1)
            statistics.active.change(1)
            statistics.allocated_bytes.change(size)
            statistics.active_bytes.change(size)
            statistics.requested_bytes.change(block.requested)
        position = address + size
    end = segment.address + segment.size
    last = _free(pool, segment, position, end, last)
    if allocator.options.expandable_segments and last is not None:
        # a mapped range is the beginning of an expandable segment, with addresses behind it
        page = SMALL_SEGMENT if segment.is_small else allocator.options.large_segment_size
        rest = Block(end, _ADDRESSES, segment.stream, pool)
        rest.mapped = False
        rest.splice(last, None)
        pool.insert_unmapped(rest)
        whole = Expandable(segment.address, page)
        before: Block | None = rest
        while before is not None:
            before.expandable = whole
            before = before.before


def _free(pool: Pool, segment: Segment, begin: int, end: int, last: Block | None) -> Block | None:
    if begin == end:
        return last
    block = Block(begin, end - begin, segment.stream, pool)
    block.splice(last, None)
    pool.insert(block)
    return block


def _size(
    allocator: CachingAllocator, pool: Pool, used: Used, room: int, extent: int | None
) -> int:
    """Return a block's size: known, or what its request needs, and what was not split off it.

    In the large pool up to 1 MiB is not (``should_split``), and no free block is as small as that;
    from ``max_split_size`` on, nothing is split; in expandable segments everything is.
    """
    if used.size is not None:
        return used.size
    size = allocator.rounded(used.requested)
    if not pool.is_small and not allocator.options.expandable_segments:
        limit = allocator.options.max_split_size
        if room - size <= SMALL or (limit is not None and size >= limit):
            return room
        if extent is not None and 0 < extent - size <= SMALL:
            return extent
    return size


def _extents(history: History, used: Mapping[int, Used]) -> dict[int, int]:
    """Return where the free block behind a block in use begins, for those of unknown size.

    It is where the first request that is placed between the two in use around it comes to lie.
    """
    addresses = sorted(used)
    unknown = {address for address in used if used[address].size is None}
    found: dict[int, int] = {}
    for event in history.events:
        if not unknown:
            break
        if event.action == "alloc":
            position = bisect_right(addresses, event.address) - 1
            if position >= 0 and addresses[position] in unknown:
                found.setdefault(addresses[position], event.address - addresses[position])
        elif event.action == "free_completed":
            unknown.discard(event.address)
    return found
