"""How oneDNN shares the gradient of a weight, and the sum of a bias's, among threads;
src/cpu/x64/jit_avx512_common_conv_kernel.cpp (``balance``), cpu_reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pytest_torchmem.operators.geometry import ceil_div, round_up
from pytest_torchmem.operators.libraries.onednn.problem import BARRIER, FLOAT, PAGE, VECTOR, Entry

Division = tuple[int, int, int]
"""Threads on images, on blocks of filters and on blocks of channels."""


def efficiency(work: int, parts: int) -> float:
    """Work by that of so many parts, or threads, that all do as much as the busiest."""
    return work / round_up(work, parts)


def divisions(threads: int, images: int, filters: int, channels: int) -> Iterator[Division]:
    """Yield the divisions that are tried, for so many images and blocks."""
    for on_images in range(1, min(threads, images) + 1):
        each = threads // on_images
        for on_filters in range(1, min(each, filters) + 1):
            yield on_images, on_filters, min(each // on_filters, channels)


def cheapest(choices: Iterable[Division], cost: Callable[[int, int, int], float]) -> Division:
    """Return the last of the choices that cost the least."""
    best = (1, 1, 1)
    least = cost(*best)
    for choice in choices:
        found = cost(*choice)
        if found <= least:
            best, least = choice, found
    return best


_BIAS_ROOM = 3 * 5 * 5 * 16 * 16


def bias_reduction(threads: int, blocks: int, images: int) -> tuple[Entry, ...]:
    """Buffers in which threads sum a bias's gradient over the batch."""
    return reduction(threads, VECTOR, blocks, images, threads * _BIAS_ROOM)


def reduction(threads: int, job_size: int, jobs: int, images: int, room: int) -> tuple[Entry, ...]:
    """Buffers in which threads sum ``jobs`` of ``job_size`` floats over images, of at most
    ``room`` floats; ``reduce_balancer_t::balance``.
    """
    smallest = max(1, jobs // threads)
    largest = max(1, room // (threads * job_size))
    groups = min(jobs // smallest, threads)
    members = min(threads // groups, images)
    each = ceil_div(jobs, groups)
    least = jobs * job_size * images
    for size in range(smallest, jobs):
        tried = min(jobs // size, threads)
        in_group = min(threads // tried, images)
        most = ceil_div(jobs, tried)
        if in_group > 1 and most > largest:
            continue
        work = job_size * most * (ceil_div(images, in_group) + (in_group != 1))
        if work < least:
            groups, members, each, least = tried, in_group, most, work
    if members == 1:
        return ()
    return (groups * (members - 1) * each * job_size * FLOAT, PAGE), (groups * PAGE, BARRIER[1])
