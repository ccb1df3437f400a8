"""Memory of a device as the allocator has it: segments, their blocks, pools, statistics, options.

Segments: of free blocks of one size torch takes that of the oldest segment, before torch 2.12 that
of the lowest address; and what is left of it decides where later requests go.

Blocks and pools: c10/cuda/CUDACachingAllocator.cpp, ``Block``, ``BlockPool``, ``PrivatePool``,
``ExpandableSegment``, ``create_or_incref_pool``, ``releasePool``. What a graph has captured uses
the addresses of its pool at every replay. So a pool keeps its segments until no graph, and no
``MemPool``, uses it; then they go back to the device as others do, once they are free as a whole.

Options are what ``PYTORCH_ALLOC_CONF`` says: keys, their bounds and the words of their errors are
those of c10/core/AllocatorConfig.cpp (``AcceleratorAllocatorConfig``) and
c10/cuda/CUDAAllocatorConfig.cpp.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pytest_torchmem.errors import UsageError, meant

MIB = 1024**2
#: Powers of two from 1 MiB to 64 GiB have divisions of their own (``kRoundUpPowerOfTwoIntervals``).
_INTERVALS = 16

_WITHOUT_EFFECT = frozenset(
    {
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
"""Keys about host memory, locks, graphs and when an error is raised; none moves a byte here."""


class AllocatorOptions(NamedTuple):
    """The caching allocator's options; sizes in bytes. The defaults are torch's."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks of this size or more are never split; ``None`` is no such size."""
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0


DEFAULTS = AllocatorOptions()
_Parser: TypeAlias = Callable[[AllocatorOptions, list[str]], AllocatorOptions]


def parse_options(text: str, before: AllocatorOptions = DEFAULTS) -> AllocatorOptions:
    """Return the options that ``text`` says, written as for ``PYTORCH_ALLOC_CONF``.

    ``"expandable_segments:True,max_split_size_mb:512"``. Keys that say nothing about device memory
    are accepted and do nothing. What the text does not say is as ``before``, but for the three keys
    that torch sets back each time it is given options (``parseArgs``).

    Raises ``UsageError``, with what torch would say, for anything that torch would not take, and
    for ``backend:cudaMallocAsync``, which is another allocator.
    """
    if not isinstance(text, str):
        raise UsageError(
            f"allocator={text!r}: write the options as for PYTORCH_ALLOC_CONF, such as "
            "'expandable_segments:True' or 'max_split_size_mb:512'"
        )
    options = before._replace(
        max_split_size=DEFAULTS.max_split_size,
        roundup_power2_divisions=DEFAULTS.roundup_power2_divisions,
        garbage_collection_threshold=DEFAULTS.garbage_collection_threshold,
    )
    try:
        for key, value in _pairs(text):
            options = _with(options, key, value)
    except ValueError as error:
        raise UsageError(f"allocator={text!r}: {error}") from None
    return options


def _pairs(text: str) -> Iterator[tuple[str, list[str]]]:
    tokens = [token for token in re.split(r"([,:\[\]])", re.sub(r"\s", "", text)) if token]
    position = 0
    while position < len(tokens):
        key = tokens[position]
        if tokens[position + 1 : position + 2] != [":"] or position + 2 >= len(tokens):
            raise ValueError(f"expected '{key}:<value>'")
        if tokens[position + 2] == "[":
            if "]" not in tokens[position:]:
                raise ValueError(
                    "Expected closing bracket ']' in ConfigTokenizer but reached end of config"
                )
            end = tokens.index("]", position)
            yield key, tokens[position + 3 : end]
        else:
            end = position + 2
            yield key, [tokens[end]]
        position = end + 1
        if position < len(tokens):
            if tokens[position] != ",":
                raise ValueError(f"expected ',' before {tokens[position]!r}")
            position += 1


def _with(options: AllocatorOptions, key: str, value: list[str]) -> AllocatorOptions:
    parse = _PARSERS.get(key)
    if parse is not None:
        return parse(options, value)
    if key in _WITHOUT_EFFECT:
        return options
    guess = meant(key, (*_PARSERS, *_WITHOUT_EFFECT), cutoff=0.6)
    raise ValueError(f"Unrecognized key '{key}' in CUDA allocator config.{guess}")


def _expandable_segments(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    if value not in (["True"], ["False"]):
        raise ValueError(
            f"Expected 'True' or 'False' for expandable_segments but got '{''.join(value)}'"
        )
    return options._replace(expandable_segments=value == ["True"])


def _size(key: str) -> _Parser:
    """Return what sets a size in MiB, which is not below that of the large pool's segments."""

    def parse(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
        least = options.large_segment_size // MIB
        mib = _whole(value)
        if mib < least:
            raise ValueError(f"CachingAllocator option {key}_mb too small, must be >= {least}")
        changed: dict[str, Any] = {key: mib * MIB}
        return options._replace(**changed)

    return parse


def _large_segment_size(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    mib = _whole(value)
    if mib <= 10:
        raise ValueError("CachingAllocator option large_segment_size_mb must be > 10 MB")
    return options._replace(large_segment_size=mib * MIB)


def _garbage_collection_threshold(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    threshold = float(value[0])
    if not 0 < threshold < 1:
        raise ValueError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    return options._replace(garbage_collection_threshold=threshold)


def _memory_fraction(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    fraction = float(value[0])
    if not 0 <= fraction <= 1:
        raise ValueError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    return options._replace(memory_fraction=fraction)


def _backend(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    if value == ["cudaMallocAsync"]:
        raise ValueError(
            "backend:cudaMallocAsync is CUDA's own allocator, and how it keeps memory is not "
            "known; a trace replays backend:native"
        )
    if value != ["native"]:
        raise ValueError("Unknown allocator backend, options are native and cudaMallocAsync")
    return options


def _roundup_power2_divisions(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    """One number for all sizes, or ``[256:1,512:2,>:8]``: MiB from which on, and divisions."""
    if value and ":" not in value:
        divisions = _whole(value)
        _power_of_two(divisions, "divisions has to be power of 2")
        return options._replace(roundup_power2_divisions=(divisions,) * _INTERVALS)
    if not value:
        return options
    table = list(options.roundup_power2_divisions)
    last, first = 0, True
    for pair in "".join(value).split(","):
        boundary, _, written = pair.partition(":")
        divisions = _whole([written])
        if divisions:
            _power_of_two(divisions, "divisions has to be power of 2 or 0 to disable roundup")
        if boundary == ">":
            table[last + 1 :] = [divisions] * (_INTERVALS - last - 1)
            continue
        mib = _whole([boundary])
        _power_of_two(mib, "intervals have to be power of 2")
        index = min(mib.bit_length() - 1, _INTERVALS - 1)
        if first:
            table[:index] = [divisions] * index
            first = False
        table[index] = divisions
        last = index
    return options._replace(roundup_power2_divisions=tuple(table))


def _whole(value: list[str]) -> int:
    if len(value) != 1 or not value[0].isdigit():
        raise ValueError(f"expected a whole number, not {''.join(value)!r}")
    return int(value[0])


def _power_of_two(number: int, rule: str) -> None:
    if number <= 0 or number & (number - 1):
        raise ValueError(f"For roundups, the {rule}")


_PARSERS: dict[str, _Parser] = {
    "expandable_segments": _expandable_segments,
    "max_split_size_mb": _size("max_split_size"),
    "max_non_split_rounding_mb": _size("max_non_split_rounding"),
    "large_segment_size_mb": _large_segment_size,
    "roundup_power2_divisions": _roundup_power2_divisions,
    "garbage_collection_threshold": _garbage_collection_threshold,
    "per_process_memory_fraction": _memory_fraction,
    "backend": _backend,
}


class Expandable:
    """A range of addresses that memory is mapped into page by page; ``ExpandableSegment``."""

    __slots__ = ("address", "page")

    def __init__(self, address: int, page: int) -> None:
        self.address, self.page = address, page


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A piece of a segment, in use or free; ``before`` and ``after`` are its neighbours there."""

    address: int
    size: int
    stream: int
    pool: Pool
    expandable: Expandable | None = None
    mapped: bool = True
    requested: int = 0
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None
    waiting: set[int] | None = None
    """Other streams whose work on the block has to be over before it is free again."""
    age_base: int = 0

    @property
    def is_split(self) -> bool:
        """Whether the block is a part of its segment only."""
        return self.before is not None or self.after is not None

    @property
    def is_active(self) -> bool:
        """Whether the block is in use, or will be free when the work of other streams is over."""
        return self.allocated or self.waiting is not None

    def part(self, address: int, size: int) -> Block:
        """Return a new block of the same segment."""
        return Block(address, size, self.stream, self.pool, self.expandable)

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Put the block between two that are neighbours."""
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self
        self.before, self.after = before, after

    def split(self, size: int) -> Block:
        """Return the first ``size`` bytes as a block of their own; what is left stays this one."""
        block = self.part(self.address, size)
        block.splice(self.before, self)
        self.address += size
        self.size -= size
        return block

    def merge(self, other: Block | None) -> int:
        """Merge a free neighbour into this block; return its size, or 0 (``try_merge_blocks``)."""
        if (
            other is None
            or other.allocated
            or other.waiting is not None
            or self.mapped is not other.mapped
        ):
            return 0
        if other.mapped:
            other.pool.erase(other)
        else:
            other.pool.erase_unmapped(other)
        if self.before is other:
            self.address = other.address
            beyond = self.before = other.before
            if beyond is not None:
                beyond.after = self
        else:
            beyond = self.after = other.after
            if beyond is not None:
                beyond.before = self
        size = other.size
        self.size += size
        return size


class Pool:
    """The free blocks of a small or a large pool, by stream in order of size and address. ``owner``
    is the private pool that it is of, (0, 0) for the common ones.
    """

    __slots__ = ("_unmapped", "free", "is_small", "owner", "searches")

    def __init__(self, is_small: bool, owner: tuple[int, int] = (0, 0)) -> None:
        self.is_small = is_small
        self.owner = owner
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0
        """Requests so far, by which the age of a free block is counted."""

    def insert(self, block: Block) -> None:
        block.age_base = self.searches
        free = self.free.get(block.stream)
        if free is None:
            free = self.free[block.stream] = []
        insort(free, (block.size, block.address, block))

    def erase(self, block: Block) -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def blocks(self) -> list[Block]:
        """Return the free blocks in order of stream, size and address."""
        return [block for stream in sorted(self.free) for _, _, block in self.free[stream]]

    def insert_unmapped(self, block: Block) -> None:
        insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def erase_unmapped(self, block: Block) -> None:
        blocks = self._unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def unmapped(self, stream: int) -> list[Block]:
        """Return addresses without memory, the lowest first."""
        return [block for _, block in self._unmapped.get(stream, ())]


PoolId: TypeAlias = tuple[int, int]
"""``c10::MempoolId_t``: one of the two numbers is 0."""


class PrivatePools:
    """The private pools of one allocator."""

    def __init__(self) -> None:
        self._pools: dict[PoolId, tuple[Pool, Pool]] = {}
        self._uses: dict[PoolId, int] = {}
        self.capturing = 0
        """How many graphs are being captured: nothing waits for other streams meanwhile."""

    def retain(self, pool: PoolId) -> None:
        """Count one more user of a pool, and make it for the first (``create_or_incref_pool``)."""
        self._pools.setdefault(pool, (Pool(True, pool), Pool(False, pool)))
        self._uses[pool] = self.uses(pool) + 1

    def release(self, pool: PoolId) -> None:
        """Count one user less (``releasePool``)."""
        self._uses[pool] = max(0, self.uses(pool) - 1)

    def uses(self, pool: PoolId) -> int:
        """Return how many graphs and ``MemPool`` use a pool."""
        return self._uses.get(pool, 0)

    def pool(self, pool: PoolId, is_small: bool) -> Pool:
        """Return the part of a pool that serves small, or large, requests."""
        small, large = self._pools[pool]
        return small if is_small else large

    def pools(self) -> Iterator[Pool]:
        for both in self._pools.values():
            yield from both

    def unused(self, pool: PoolId | None) -> list[Pool]:
        """Return the parts of the pools that nothing uses any more, or of one if it is unused."""
        return [
            part
            for found, parts in self._pools.items()
            if not self._uses[found] and pool in (None, found)
            for part in parts
        ]


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


class _Chunk(NamedTuple):
    """Addresses that the driver takes at once, and the parts of them that are free, in order."""

    begin: int
    end: int
    free: list[tuple[int, int]]


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
        position = next(i for i, chunk in enumerate(self._chunks) if address < chunk.end)
        chunk = self._chunks[position]
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*chunk.free, (address, address + size)]):
            if merged and merged[-1][1] == begin:
                begin = merged.pop()[0]
            merged.append((begin, end))
        chunk.free[:] = merged
        if chunk.end < _TOP and merged == [(chunk.begin, chunk.end)]:
            del self._chunks[position]


def addresses_of_this_torch() -> Addresses:
    """Return those that the blocks of the torch that is imported are chosen by."""
    version = getattr(sys.modules.get("torch"), "__version__", "3").split(".")
    return DriverAddresses() if version[:2] == ["2", "11"] else Addresses()


_COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


class Stat:
    """One figure: its current value, its peak, and the sums of what was added and taken away since
    its value was ``before``.
    """

    __slots__ = ("allocated", "before", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.before = 0

    @property
    def freed(self) -> int:
        """The sum of what was taken away."""
        return self.before + self.allocated - self.current

    def change(self, amount: int) -> None:
        """Add ``amount``, or take it away where it is negative."""
        self.current = current = self.current + amount
        if amount > 0:
            self.allocated += amount
            if current > self.peak:
                self.peak = current


class PoolStatistics:
    """The statistics of one pool, or of both."""

    def __init__(self) -> None:
        self.allocation = Stat()
        self.segment = Stat()
        self.active = Stat()
        self.inactive_split = Stat()
        self.allocated_bytes = Stat()
        self.reserved_bytes = Stat()
        self.active_bytes = Stat()
        self.inactive_split_bytes = Stat()
        self.requested_bytes = Stat()

    def hand_out(self, size: int, nbytes: int) -> None:
        """Count a block of ``size`` for a request of ``nbytes``."""
        for stat, amount in (
            (self.allocation, 1),
            (self.allocated_bytes, size),
            (self.active, 1),
            (self.active_bytes, size),
            (self.requested_bytes, nbytes),
        ):  # ``Stat.change``, without five calls for each request of a replay
            stat.allocated += amount
            stat.current = current = stat.current + amount
            if current > stat.peak:
                stat.peak = current

    def free(self, size: int) -> None:
        """Take a block of ``size`` off what is allocated."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size

    def retire(self, size: int, nbytes: int) -> None:
        """Take a block of ``size`` off what is active, with the ``nbytes`` that were asked for."""
        self.active.current -= 1
        self.active_bytes.current -= size
        self.requested_bytes.current -= nbytes


_Counted: TypeAlias = tuple[PoolStatistics, ...]
_PARTS = ("allocated", "current", "freed", "peak")
NAMES = tuple(vars(PoolStatistics()))


class Statistics:
    """All statistics of one device's allocator."""

    def __init__(self) -> None:
        self.all, self.small, self.large = PoolStatistics(), PoolStatistics(), PoolStatistics()
        self.of: tuple[_Counted, _Counted] = ((self.all, self.large), (self.all, self.small))
        """What a block of the large pool counts in, and one of the small: for ``is_small``."""
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_device_alloc = self.num_device_free = self.num_sync_all_streams = 0

    def reset_peaks(self) -> None:
        """Begin every peak anew from what is there now (``resetPeakStats``)."""
        for _, stat in self._stats():
            stat.peak = stat.current

    def reset_totals(self) -> None:
        """Begin the running totals anew (``resetAccumulatedStats``)."""
        for _, stat in self._stats():
            stat.allocated, stat.before = 0, stat.current
        for name in _COUNTERS:
            setattr(self, name, 0)

    def as_dict(self, max_split_size: int | None) -> dict[str, int]:
        """Return what ``torch.cuda.memory_stats`` does, in order of name."""
        figures = {
            f"{name}.{part}": getattr(stat, part) for name, stat in self._stats() for part in _PARTS
        }
        figures |= {name: getattr(self, name) for name in _COUNTERS}
        figures["max_split_size"] = -1 if max_split_size is None else max_split_size
        return dict(sorted(figures.items()))

    def _stats(self) -> Iterator[tuple[str, Stat]]:
        """Yield every figure with its name."""
        pools = {"all": self.all, "small_pool": self.small, "large_pool": self.large}
        for name in NAMES:
            for pool, statistics in pools.items():
                yield f"{name}.{pool}", getattr(statistics, name)
        yield "oversize_allocations", self.oversize_allocations
        yield "oversize_segments", self.oversize_segments


class NoStatistics(Statistics):
    """For a replay of which nobody asks them: blocks count in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.of = ((), ())
