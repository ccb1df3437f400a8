"""How oneDNN splits the gradient of a convolution's weight among threads."""

from __future__ import annotations


def _share(amount: int, parts: int) -> int:
    return -(-amount // parts)


def threads_on_batch(
    *,
    threads: int,
    batch: int,
    depth: int,
    channel_blocks: int,
    filter_blocks: int,
    input: int,
    output: int,
    weight: int,
) -> int:
    """Threads that work on parts of the batch and need a copy of the weight's gradient each:
    ``balance`` of jit_avx512_common_conv_kernel.cpp.

    It weighs what every thread has to read and write: ``input``, ``output`` and ``weight`` are the
    elements of one block of channels, of filters, and of both. Images that oneDNN reduces by rows
    (large ones of few channels) are not told apart.
    """

    def memory(images: int, filters: int, channels: int) -> int:
        return (
            _share(batch, images) * _share(channel_blocks, channels) * input
            + _share(batch, images) * _share(filter_blocks, filters) * output
            + 8 * _share(filter_blocks, filters) * _share(channel_blocks, channels) * weight
        )

    def computation(images: int, filters: int, channels: int) -> int:
        return (
            _share(batch, images)
            * _share(filter_blocks, filters)
            * _share(channel_blocks, channels)
        )

    most = min(threads, batch * depth)
    choices = [
        (images, filters, min(threads // images // filters, channel_blocks))
        for images in range(1, most + 1)
        for filters in range(1, min(threads // images, filter_blocks) + 1)
    ]
    best = (1, 1, 1)
    least = memory(*best)
    for choice in choices:
        if memory(*choice) <= least:
            best, least = choice, memory(*choice)
    fewest = computation(*best)
    for choice in choices:
        cheaper = computation(*choice) <= fewest and memory(*choice) < 1.1 * least
        if cheaper or 4 * computation(*choice) <= 3 * fewest:
            best, fewest = choice, computation(*choice)
    images = best[0]
    return min(batch * depth, threads) if threads / 2 < images < threads else images


def reduction_groups(threads: int, job_size: int, jobs: int, reduced: int) -> tuple[int, int, int]:
    """Groups of threads, threads in each and jobs of each: ``reduce_balancer_t`` of
    src/cpu/x64/cpu_reducer.cpp, which sums the bias's gradient over the batch.
    """
    smallest = max(1, jobs // threads)
    groups = min(jobs // smallest, threads)
    members = min(threads // groups, reduced)
    each = _share(jobs, groups)
    least = jobs * job_size * reduced
    for size in range(smallest, jobs):
        tried = min(jobs // size, threads)
        in_group = min(threads // tried, reduced)
        work = job_size * _share(jobs, tried) * (_share(reduced, in_group) + (in_group != 1))
        if work < least:
            groups, members, each, least = tried, in_group, _share(jobs, tried), work
    return groups, members, each
