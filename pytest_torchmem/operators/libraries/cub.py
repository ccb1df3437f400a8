"""Temporary storage of CUB's device algorithms: limits, since tiles differ by GPU and type.

CUB (cub/device/dispatch, CUDA 13.0): what grows with the number of elements is known, and stated as
a limit where it depends on the size of a tile, taken here as the smallest that CUB uses. Offsets
are 64-bit, as ATen's calls have them. Published recordings of GPUs have 72,191 and 138,751 bytes
for 4,096 and 8,192 pairs of 8 and 8 bytes sorted by 14 bits: the same, in tiles of 3,840.
"""

from __future__ import annotations

from pytest_torchmem.operators.geometry import ceil_div, round_up
from pytest_torchmem.targets.gpus import Gpu

_TILE = 1792
"""tuning_radix_sort.cuh: keys of 8 and values of 2 bytes on sm100."""
_DIGITS = 256
_ALIGNMENT = 256
_STATE = 16
_OFFSET = 8
_SINGLE_TILE = 2048
_PORTION = 2**27
_SUBSCRIPTION = 5
_SCAN_TILE = 512 * 23


def temporaries(*sizes: int) -> int:
    """Return what several arrays take in one buffer; util_device.cuh, ``AliasTemporaries``."""
    return sum(round_up(size, _ALIGNMENT) for size in sizes) + _ALIGNMENT - 1


def radix_sort_pairs(
    gpu: Gpu, number: int, key_size: int, value_size: int, bits: int | None = None
) -> int:
    """Return at most what sorting ``number`` pairs by ``bits`` of their keys takes; by default all.

    dispatch_radix_sort.cuh, ``InvokeOnesweep``: bins of every digit and pass, a look-back word for
    every tile and digit, a second buffer of keys and values, and counters. Before sm90, keys of 1
    and 2 bytes are sorted by ``InvokePasses``: digits of every block that is resident.
    """
    if number <= 0:
        return 0
    if number <= _SINGLE_TILE:
        return 1  # InvokeSingleTile sorts in shared memory, and must not ask for nothing
    buffers = (number * key_size, number * value_size)
    if key_size < 4 and gpu.capability < (9, 0):
        threads, digits = (256, 128) if key_size > 1 else (128, 32)
        resident = gpu.multiprocessors * (gpu.threads_per_multiprocessor // threads)
        spine = resident * _SUBSCRIPTION * digits + _SCAN_TILE
        return temporaries(spine * _OFFSET, *buffers)
    passes = ceil_div(bits or 8 * key_size, 8) * ceil_div(number, _PORTION)
    tiles = ceil_div(number, _TILE)
    return temporaries(passes * _DIGITS * _OFFSET, tiles * _DIGITS * 4, *buffers, passes * 4)


def segmented_sort_pairs(number: int, key_size: int, value_size: int) -> int:
    """Return at most what sorting pairs in segments takes: a second buffer of both.

    dispatch_radix_sort.cuh, ``DispatchSegmentedRadixSort::InvokePasses``.
    """
    return temporaries(number * key_size, number * value_size) if number else 0


def scan(number: int) -> int:
    """Return at most what a prefix sum takes: the state of every tile; dispatch_scan.cuh."""
    return temporaries((ceil_div(number, 512) + 32) * _STATE) if number else 0


def select(number: int) -> int:
    """Return at most what a compaction takes: the state of every tile; dispatch_select_if.cuh."""
    return scan(number)


def reduce(gpu_blocks: int, size: int) -> int:
    """Return at most what a reduction takes: a partial result of every block.

    dispatch_reduce.cuh, ``InvokePasses``: at most five times the blocks that are resident.
    """
    return temporaries(gpu_blocks * _SUBSCRIPTION * size)
