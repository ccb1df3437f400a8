"""How oneDNN shares the gradient of a weight, and the sum of a bias's, among threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pytest_torchmem.operators.libraries.onednn.problem import BARRIER, PAGE, share


@dataclass(frozen=True)
class Work:
    """The gradient of a weight, for one group's threads.

    ``images`` is what can be shared with a copy of the weight each, ``filter_blocks`` and
    ``channel_blocks`` what can be shared without. The others are elements that a thread reads or
    writes for one of each.
    """

    threads: int
    images: int
    most_on_images: int
    filter_blocks: int
    channel_blocks: int
    input: int
    output: int
    weight: int
    weight_cost: int = 8

    def memory(self, images: int, filters: int, channels: int) -> int:
        """Elements that the busiest thread reads and writes."""
        per_image = share(self.images, images)
        per_filter = share(self.filter_blocks, filters)
        per_channel = share(self.channel_blocks, channels)
        return (
            per_image * per_channel * self.input
            + per_image * per_filter * self.output
            + self.weight_cost * per_filter * per_channel * self.weight
        )

    def computation(self, images: int, filters: int, channels: int) -> int:
        """Blocks that the busiest thread computes."""
        return (
            share(self.images, images)
            * share(self.filter_blocks, filters)
            * share(self.channel_blocks, channels)
        )

    def choices(self) -> Iterator[tuple[int, int, int]]:
        """Yield threads on images, on filters and on channels."""
        for images in range(1, min(self.threads, self.most_on_images) + 1):
            each = self.threads // images
            for filters in range(1, min(each, self.filter_blocks) + 1):
                yield images, filters, min(each // filters, self.channel_blocks)


Memory = Callable[[int, int, int], int]


def least_memory(work: Work, memory: Memory) -> tuple[int, int, int]:
    """The last of the choices with the least memory."""
    best = (1, 1, 1)
    for choice in work.choices():
        if memory(*choice) <= memory(*best):
            best = choice
    return best


def least_computation(
    work: Work, memory: Memory, start: tuple[int, int, int]
) -> tuple[int, int, int]:
    """From the choice of the least memory: less computation for 10 % more memory, or a quarter
    less for any.
    """
    best, least = start, memory(*start)
    fewest = work.computation(*best)
    for choice in work.choices():
        cost = work.computation(*choice)
        if (cost <= fewest and memory(*choice) < 1.1 * least) or 4 * cost <= 3 * fewest:
            best, fewest = choice, cost
    return best


_BIAS_BUFFER = 3 * 5 * 5 * 16 * 16


def bias_reduction(
    threads: int, job_size: int, jobs: int, images: int
) -> tuple[tuple[int, int], ...]:
    """Buffers in which threads sum a bias's gradient over the batch."""
    return reduction(threads, job_size, jobs, images, threads * _BIAS_BUFFER)


def reduction(
    threads: int, job_size: int, jobs: int, images: int, room: int
) -> tuple[tuple[int, int], ...]:
    """Buffers in which threads sum ``jobs`` of ``job_size`` floats over images, of at most
    ``room`` floats; src/cpu/x64/cpu_reducer.cpp, ``reduce_balancer_t::balance``.
    """
    smallest = max(1, jobs // threads)
    largest = max(1, room // (threads * job_size))
    groups = min(jobs // smallest, threads)
    members = min(threads // groups, images)
    each = share(jobs, groups)
    least = jobs * job_size * images
    for size in range(smallest, jobs):
        tried = min(jobs // size, threads)
        in_group = min(threads // tried, images)
        most = share(jobs, tried)
        if in_group > 1 and most > largest:
            continue
        work = job_size * most * (share(images, in_group) + (in_group != 1))
        if work < least:
            groups, members, each, least = tried, in_group, most, work
    if members == 1:
        return ()
    space = groups * (members - 1) * each * job_size * 4
    return (space, PAGE), (groups * BARRIER[0], BARRIER[1])
