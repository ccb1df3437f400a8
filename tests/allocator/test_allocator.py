"""The replay of the caching allocator against what is known of torch's own.

The facts are those that torch's tests assert on a GPU (test/test_cuda.py, and test/test_xpu.py for
the small pool, whose allocator is the same), the constants of c10/core/AllocatorConfig.h, and the
rules of c10/cuda/CUDACachingAllocator.cpp. Then what holds whatever is asked of it; its options are
read as torch reads them.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem.allocator.caching import CachingAllocator, OutOfMemory, Peaks, RunningPeaks
from pytest_torchmem.allocator.device_memory import NAMES, Block, parse_options
from pytest_torchmem.errors import UsageError

MIB, GIB = 1024**2, 1024**3


def allocator(options: str = "", **limits: int) -> CachingAllocator:
    return CachingAllocator(parse_options(options), **limits)


def replay(events: list[Any], options: str = "") -> Peaks:
    """Return the peaks of requests, numbered from 1 on, negative numbers of what is freed, and 0
    for an emptied cache; a request may come with its stream.
    """
    here, blocks, peaks = allocator(options), [None], RunningPeaks()
    for event in events:
        if event == 0:
            here.empty_cache()
        elif isinstance(event, int) and event < 0:
            here.free(blocks[-event])
        else:
            blocks.append(here.allocate(*event if isinstance(event, tuple) else (event,)))
        peaks.note(here)
    return peaks.found()


def freed(here: CachingAllocator, *sizes: int) -> list[Block]:
    """Return blocks of so many MiB, which lived at once and are free."""
    blocks = [here.allocate(size * MIB) for size in sizes]
    for block in blocks:
        here.free(block)
    return blocks


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # kSmallSize belongs to the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded, it is kMinLargeAlloc
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        # 1 MiB is left, which is not more than kSmallSize: the block is the whole segment.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_one_request(nbytes: int, allocated: int, reserved: int) -> None:
    assert replay([nbytes]) == Peaks(nbytes, allocated, reserved, reserved - allocated)


def test_a_request_for_nothing_takes_nothing() -> None:
    assert allocator().allocate(0) is None


def test_two_tensors_of_1_mib_share_a_segment() -> None:
    """test_xpu.py, test_1mb_allocation_uses_small_block: two stay alive, four MiB are reserved."""
    here = allocator()
    a, b = here.allocate(MIB), here.allocate(MIB)
    for _ in range(5):  # b = b.clone() + 1
        copied = here.allocate(MIB)
        added = here.allocate(MIB)
        here.free(copied)
        here.free(b)
        b = added
    assert a is not None
    assert here.statistics.all.allocated_bytes.current == 2 * MIB
    assert here.reserved == 4 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    here = allocator()
    _, thirty, _ = freed(here, 40, 30, 50)
    # 1 MiB more than was asked for is not split off, and counts as allocated.
    assert here.allocate(29 * MIB) is thirty
    assert here.statistics.all.allocated_bytes.current == 30 * MIB
    assert here.statistics.all.requested_bytes.current == 29 * MIB


def test_of_blocks_of_one_size_the_lowest_address_is_taken() -> None:
    here = allocator()
    blocks = [here.allocate(30 * MIB) for _ in range(3)]
    for block in reversed(blocks):
        here.free(block)
    assert here.allocate(30 * MIB) is blocks[0]


def test_free_neighbours_become_one_block() -> None:
    here = allocator()
    freed(here, 5, 5, 5, 5)  # one segment of 20 MiB
    assert here.reserved == 20 * MIB
    assert [block.size for block in here.blocks()] == [20 * MIB]
    here.allocate(20 * MIB)
    assert here.reserved == 20 * MIB


def test_the_last_512_bytes_of_a_small_segment_are_a_block() -> None:
    assert replay([MIB, MIB - 512, 512]) == Peaks(2 * MIB, 2 * MIB, 2 * MIB, MIB)


def test_a_stream_has_blocks_of_its_own() -> None:
    assert replay([30 * MIB, -1, (30 * MIB, 7)]).reserved == 60 * MIB


def test_what_another_stream_uses_is_free_when_the_next_request_comes() -> None:
    """test_caching_allocator_record_stream_oom: it does not stay for ever."""
    here = allocator()
    for _ in range(100):
        block = here.allocate(160 * MIB)
        here.record_stream(block, 7)
        here.free(block)
        assert here.statistics.all.active_bytes.current == 160 * MIB
        assert here.statistics.all.allocated_bytes.current == 0
    assert here.reserved == 160 * MIB


def test_empty_cache_gives_back_segments_that_are_free_as_a_whole() -> None:
    here = allocator()
    small, large, whole = here.allocate(4), here.allocate(5 * MIB), here.allocate(40 * MIB)
    here.free(whole)
    here.empty_cache()
    assert here.reserved == 22 * MIB
    here.free(large)
    here.free(small)
    here.empty_cache()
    assert here.reserved == 0
    assert replay([40 * MIB, -1, 0, 30 * MIB]).reserved == 40 * MIB
    assert replay([40 * MIB, -1, 0, 50 * MIB]).reserved == 50 * MIB


def test_out_of_memory_gives_the_cache_back_first() -> None:
    """test_cuda.py, test_out_of_memory_retry."""
    total = 1 * GIB
    here = allocator(capacity=total - 100 * MIB)
    a = here.allocate(total // 2)
    with pytest.raises(OutOfMemory) as raised:
        here.allocate(total // 2)
    assert raised.value.segment == total // 2
    assert (raised.value.allocated, raised.value.reserved) == (total // 2, total // 2)
    assert here.statistics.num_ooms == here.statistics.num_alloc_retries == 1
    here.free(a)
    # Larger than what is cached: that goes back to the device, and the request is served.
    assert here.allocate(total // 2 + 2 * MIB) is not None
    assert (here.statistics.num_alloc_retries, here.statistics.num_ooms) == (2, 1)
    assert here.reserved == total // 2 + 2 * MIB


def test_garbage_collection_and_expandable_segments() -> None:
    """test_cuda.py, test_garbage_collect_expandable."""
    threshold = "garbage_collection_threshold:0.5"
    here = allocator(threshold, total=16 * GIB)
    here.set_memory_fraction(120 * MIB / (16 * GIB))
    a = here.allocate(40 * MIB)
    here.options = parse_options(f"expandable_segments:True,{threshold}")
    b = here.allocate(40 * MIB)
    here.free(a)
    here.free(b)
    # The collection leaves the expandable segment alone, which then grows in place.
    assert here.allocate(80 * MIB) is not None
    assert here.reserved == 80 * MIB


def test_garbage_is_collected_above_the_threshold() -> None:
    here = allocator("garbage_collection_threshold:0.6", total=200 * MIB)
    here.set_memory_fraction(0.99)
    blocks = [here.allocate(size * MIB) for size in (30, 40, 60)]
    for block in blocks[:2]:
        here.free(block)
    # 130 MiB are reserved, which is more than 0.6 of the 198 that are allowed.
    here.allocate(50 * MIB)
    # Both were freed at once, so both are as old as the average, and both went.
    assert here.reserved == 110 * MIB
    plain = allocator(total=200 * MIB)
    plain.set_memory_fraction(0.99)
    freed(plain, 30)
    freed(plain, 40)
    plain.allocate(60 * MIB)
    plain.allocate(50 * MIB)
    assert plain.reserved == 180 * MIB


def test_blocks_above_the_limit_are_not_split() -> None:
    here = allocator("max_split_size_mb:100")
    block = here.allocate(200 * MIB)
    assert here.statistics.oversize_allocations.current == 1
    assert here.statistics.oversize_segments.current == 1
    here.free(block)
    here.allocate(50 * MIB)  # may not have a block that is not to be split
    assert here.reserved == 250 * MIB
    fits = here.allocate(185 * MIB)  # within max_non_split_rounding_mb of the block
    assert fits.size == 200 * MIB
    here.free(fits)
    too_small = here.allocate(180 * MIB)
    assert too_small.size == 180 * MIB


def test_just_enough_oversize_blocks_are_given_back() -> None:
    here = allocator("max_split_size_mb:100", capacity=400 * MIB)
    freed(here, 100, 110, 120)
    here.allocate(150 * MIB)
    # The largest, 120, and then the next, 110, were given back; a retry was not needed.
    assert here.reserved == 250 * MIB
    assert here.statistics.num_alloc_retries == 0


def test_sizes_are_rounded_to_divisions_of_powers_of_two() -> None:
    """test_cuda.py, test_allocator_settings, and the example of roundup_power2_next_division."""
    assert [allocator("").rounded(nbytes) for nbytes in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    assert allocator("roundup_power2_divisions:4").rounded(1200) == 1536  # not below 4 blocks
    assert allocator("roundup_power2_divisions:4").rounded(84 * MIB) == 96 * MIB
    here = allocator("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:1,>:1]")
    assert here.rounded(65 * MIB) == 72 * MIB  # eight steps from 64 to 128 MiB
    assert here.rounded(140 * MIB) == 192 * MIB
    assert here.rounded(400 * MIB) == 448 * MIB
    assert here.rounded(3000) == 3072  # below the first boundary as well: 8 divisions
    assert here.rounded(2000 * MIB + 1) == 2000 * MIB + 512


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    """It can grow, so that it counts as larger than any other block (``get_free_block``)."""
    here = allocator("expandable_segments:True", total=16 * GIB)
    first, _ = here.allocate(30 * MIB), here.allocate(25 * MIB)
    start = first.address
    here.free(first)
    assert here.allocate(5 * MIB).address == start  # 5 MiB are free at the end as well


def test_an_expandable_segment_gives_whole_pages_back() -> None:
    here = allocator("expandable_segments:True", total=16 * GIB)
    blocks = [here.allocate(30 * MIB) for _ in range(3)]
    assert here.reserved == 100 * MIB  # 90 MiB in pages of 20
    middle = blocks[1]
    here.free(middle)
    here.empty_cache()
    # Of 30 to 60 MiB only the page from 40 to 60 was free as a whole.
    assert here.reserved == 80 * MIB
    again = here.allocate(30 * MIB)
    assert again.address == middle.address
    assert here.reserved == 100 * MIB


def test_another_size_of_large_segments() -> None:
    assert replay([2 * MIB], "large_segment_size_mb:12").reserved == 12 * MIB
    assert replay([30 * MIB], "large_segment_size_mb:12").reserved == 30 * MIB


SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 64).map(lambda n: n * 512),
    st.integers(1, 2 * MIB),
    st.sampled_from([MIB - 1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 20 * MIB + 1]),
    st.integers(1, 60).map(lambda n: n * MIB),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.sampled_from([0, 0, 0, 5])),
        st.tuples(st.just("free"), st.integers(0, 99), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(False)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)
OPTIONS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "max_split_size_mb:32,max_non_split_rounding_mb:24",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[1:8,16:2,>:1]",
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
        "expandable_segments:True,garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
        "large_segment_size_mb:12",
    ]
)


def check(here: CachingAllocator, live: list[Block]) -> None:
    blocks = here.blocks()
    assert {id(block) for block in blocks if block.allocated} == {id(block) for block in live}
    assert sum(block.size for block in blocks) == here.reserved
    for block, following in pairwise(blocks):
        assert block.address + block.size <= following.address
    for block in blocks:
        after = block.after
        if after is None:
            continue
        # Blocks of a segment tile it, and two free ones beside each other are one.
        assert after.before is block
        assert after.address == block.address + block.size
        if after.mapped:
            assert block.allocated or after.allocated or block.waiting or after.waiting
    for small, pool in ((True, here.small), (False, here.large)):
        mine = [block for block in blocks if block.pool.is_small is small]
        held = [block for block in mine if block.allocated]
        active = [block for block in mine if block.allocated or block.waiting is not None]
        inside = [b for b in mine if b not in active and b.is_split and b.expandable is None]
        statistics = here.statistics.small if small else here.statistics.large
        assert statistics.allocation.current == len(held)
        assert statistics.allocated_bytes.current == sum(block.size for block in held)
        assert statistics.active.current == len(active)
        assert statistics.active_bytes.current == sum(block.size for block in active)
        assert statistics.requested_bytes.current == sum(block.requested for block in active)
        assert statistics.reserved_bytes.current == sum(block.size for block in mine)
        assert statistics.inactive_split.current == len(inside)
        assert statistics.inactive_split_bytes.current == sum(block.size for block in inside)
        heads = [block for block in mine if block.before is None and block.expandable is None]
        assert statistics.segment.current == len(heads)
        assert sorted(map(id, pool.blocks())) == sorted(id(b) for b in mine if b not in active)
    for name in NAMES:
        every, small_pool, large_pool = (
            getattr(statistics, name)
            for statistics in (here.statistics.all, here.statistics.small, here.statistics.large)
        )
        assert every.current == small_pool.current + large_pool.current
        assert every.current == every.allocated - every.freed
        assert max(small_pool.peak, large_pool.peak) <= every.peak
        assert every.current <= every.peak <= small_pool.peak + large_pool.peak
    whole = here.statistics.all
    assert whole.requested_bytes.current <= whole.active_bytes.current
    assert whole.active_bytes.current <= whole.reserved_bytes.current


def allocated_or_out_of_memory(here: CachingAllocator, nbytes: int, stream: int) -> Block | None:
    """Return a block that is large enough, or ``None`` where there really is no room for it."""
    reserved = here.reserved
    try:
        block = here.allocate(nbytes, stream)
    except OutOfMemory:
        limits = [limit for limit in (here.capacity, here.allowed) if limit is not None]
        free = min(limits) - here.reserved
        # A page of an expandable segment may have been mapped for a part of the request already.
        assert free < here.segment_size(here.rounded(nbytes)) + here.options.large_segment_size
        assert here.options.expandable_segments or here.reserved <= reserved
        return None
    assert nbytes <= block.size
    return block


def run(here: CachingAllocator, steps: list[Any]) -> None:
    live: list[Block] = []
    for kind, number, more in steps:
        if kind == "allocate":
            block = allocated_or_out_of_memory(here, number, more)
            if block is not None:
                live.append(block)
        elif kind == "free" and live:
            block = live.pop(number % len(live))
            if more:
                here.record_stream(block, 9)
            here.free(block)
        elif kind == "empty":
            here.empty_cache()
        check(here, live)
        if here.capacity is not None:
            assert here.reserved <= here.capacity
    for block in live:
        here.free(block)
    here.empty_cache()
    assert here.reserved == 0
    assert here.blocks() == []
    check(here, [])


@settings(max_examples=60)
@given(steps=STEPS, options=OPTIONS)
def test_without_an_end(steps: list[Any], options: str) -> None:
    run(CachingAllocator(parse_options(options), total=10**12), steps)


@settings(max_examples=60)
@given(steps=STEPS, options=OPTIONS, capacity=st.integers(10, 200))
def test_on_a_device_that_runs_out(steps: list[Any], options: str, capacity: int) -> None:
    run(CachingAllocator(parse_options(options), capacity * MIB, (capacity + 8) * MIB), steps)


TEXTS = [
    "",
    "expandable_segments:True",
    "expandable_segments:False,",
    "expandable_segments:true",
    "expandable_segments: True , max_split_size_mb : 64",
    "max_split_size_mb:19",
    "max_split_size_mb:20",
    "max_split_size_mb:x",
    "max_split_size_mb",
    "max_split_size_mb:",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "large_segment_size_mb:12,max_split_size_mb:15",
    "large_segment_size_mb:12,max_non_split_rounding_mb:11",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:.5",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:1,512:3]",
    "roundup_power2_divisions:[256:1,300:2]",
    "roundup_power2_divisions:[256:1",
    "expandable_segments:True max_split_size_mb:30",
]


@pytest.mark.parametrize("text", TEXTS)
def test_options_are_taken_where_torch_takes_them(text: str) -> None:
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None or torch.backends.cuda.is_built():
        pytest.skip("torch's own parser is asked where there is no allocator that it would change")
    try:
        # What is not said stays, so everything is said first.
        set_settings("large_segment_size_mb:20,max_non_split_rounding_mb:20")
        set_settings(text)
    except (ValueError, RuntimeError):
        with pytest.raises(UsageError, match="allocator="):
            parse_options(text)
    else:
        parse_options(text)
    finally:
        set_settings("large_segment_size_mb:20,expandable_segments:False")


def test_keys_that_torch_does_not_know() -> None:
    unrecognized = r"Unrecognized key 'max_split_size' in CUDA allocator.*mean 'max_split_size_mb'"
    with pytest.raises(UsageError, match=unrecognized):
        parse_options("max_split_size:20")
    with pytest.raises(UsageError, match="cudaMallocAsync is CUDA's own allocator"):
        parse_options("backend:cudaMallocAsync")
    with pytest.raises(UsageError, match="options are native and cudaMallocAsync"):
        parse_options("backend:mine")
    assert parse_options("pinned_num_register_threads:4,backend:native") == parse_options("")


def test_options_that_follow_others() -> None:
    first = parse_options("expandable_segments:True,max_split_size_mb:64")
    then = parse_options("garbage_collection_threshold:0.5", first)
    assert then == parse_options("expandable_segments:True,garbage_collection_threshold:0.5")
