"""Temporary storage of CUB's device algorithms: limits, since tiles differ by GPU and type.

CUB (cub/device/dispatch): what grows with the number of elements is known, and stated as a limit
where it depends on the size of a tile, taken here as smaller than any that CUB uses.
"""

from __future__ import annotations

_TILE = 2048
_DIGITS = 256
_ALIGNMENT = 256
_STATE = 16
_FIXED = 32 * 1024
_SINGLE_TILE = 2048


def radix_sort_pairs(number: int, key_size: int, value_size: int) -> int:
    """Return at most what sorting ``number`` pairs takes.

    dispatch_radix_sort.cuh, ``InvokeOnesweep``: a second buffer of keys and values, bins of every
    digit, and a look-back word for every tile and digit.
    """
    if number <= 0:
        return 0
    if number <= _SINGLE_TILE:
        return 1  # InvokeSingleTile sorts in shared memory, and must not ask for nothing
    tiles = -(-number // _TILE)
    return number * (key_size + value_size) + tiles * _DIGITS * 4 + _FIXED


def segmented_sort_pairs(number: int, key_size: int, value_size: int) -> int:
    """Return at most what sorting pairs in segments takes: a second buffer of both.

    dispatch_radix_sort.cuh, ``DispatchSegmentedRadixSort::InvokePasses``.
    """
    return number * (key_size + value_size) + _FIXED if number else 0


def scan(number: int) -> int:
    """Return at most what a prefix sum takes: the state of every tile; dispatch_scan.cuh."""
    return (-(-number // 512) + 32) * _STATE + _ALIGNMENT if number else 0


def select(number: int) -> int:
    """Return at most what a compaction takes: the state of every tile; dispatch_select_if.cuh."""
    return scan(number)


def reduce(gpu_blocks: int, size: int) -> int:
    """Return at most what a reduction takes: a partial result of every block.

    dispatch_reduce.cuh, ``InvokePasses``: at most five times the blocks that are resident.
    """
    return gpu_blocks * 5 * size + _ALIGNMENT
