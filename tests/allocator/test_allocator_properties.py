"""What holds of the allocator whatever is asked of it; its options are read as torch reads them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem.allocator.caching import CachingAllocator, OutOfMemory
from pytest_torchmem.allocator.device_memory import NAMES, Block, parse_options
from pytest_torchmem.errors import UsageError

MIB = 1024**2
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
        inside = [
            block
            for block in mine
            if block not in active and block.is_split and block.expandable is None
        ]
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
        assert sorted(map(id, pool.blocks())) == sorted(
            id(block) for block in mine if block not in active
        )
    for name in NAMES:
        every, small_pool, large_pool = (
            getattr(statistics, name)
            for statistics in (here.statistics.all, here.statistics.small, here.statistics.large)
        )
        assert every.current == small_pool.current + large_pool.current
        assert every.current == every.allocated - every.freed
        assert max(small_pool.peak, large_pool.peak) <= every.peak
        assert every.current <= every.peak <= small_pool.peak + large_pool.peak
    all_of_it = here.statistics.all
    assert (
        all_of_it.requested_bytes.current
        <= all_of_it.active_bytes.current
        <= all_of_it.reserved_bytes.current
    )


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
    with pytest.raises(UsageError, match="Unrecognized key 'max_split_size' in CUDA allocator"):
        parse_options("max_split_size:20")
    with pytest.raises(UsageError, match="Did you mean 'max_split_size_mb'"):
        parse_options("max_split_size:20")
    with pytest.raises(UsageError, match="cudaMallocAsync is CUDA's own allocator"):
        parse_options("backend:cudaMallocAsync")
    with pytest.raises(UsageError, match="options are native and cudaMallocAsync"):
        parse_options("backend:mine")
    assert parse_options("pinned_num_register_threads:4,backend:native") == parse_options("")


def test_options_that_follow_others() -> None:
    first = parse_options("expandable_segments:True,max_split_size_mb:64")
    then = parse_options("garbage_collection_threshold:0.5", first)
    assert then.expandable_segments
    assert then.max_split_size is None
    assert then.garbage_collection_threshold == 0.5
