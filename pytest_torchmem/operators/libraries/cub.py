"""Temporary storage of CUB's device algorithms.

CUB 3.0 (cub/device/dispatch, CUDA 13.0). What grows with the number of elements goes by tiles,
whose size a table gives for each generation of GPUs (dispatch/tuning), and where blocks have
results of their own, by how many of them a multiprocessor holds. Offsets are 64-bit, as ATen's
calls have them. Published recordings of GPUs have 72,191 and 138,751 bytes for 4,096 and 8,192
pairs of 8 and 8 bytes sorted by 14 bits.
"""

from functools import partial

import torch
from torch import Tensor

from pytest_torchmem.operators.workspace import ceil_div, round_up
from pytest_torchmem.targets.gpus import Gpu

_DIGITS = 256
_ALIGNMENT = 256
_OFFSET = 8
_WORD = 4
_PAIR = 16
"""The state of a tile of keys and values, ``ReduceByKeyScanTileState``."""
_SHARED_MEMORY = 48 * 1024
_PORTION = 2**28 - 1
_SUBSCRIPTION = 5
_PADDING = 32
_SPINE = 512 * 11
_RUN_TILE = 128 * 6
_MERGE_TILE = 256 * 8
_THRUST_TILE = 64 * 5

# Elements of a tile, as tuned for sm100, sm90 and sm80, and for others; by the size of an element.
_DISTINCT_TILES = {
    1: (8448, 5632, 19840, 1280),
    2: (5632, 5632, 8064, 1280),
    4: (5760, 6528, 4608, 1280),
    8: (4224, 4224, 1920, 640),
}
_DISTINCT_KEYS_TILES = {4: (7168, 7168, 2816, 704), 8: (4928, 4928, 1344, 320)}
_SCAN_BY_KEY_TILES = {4: (4480, 4032, 3840, 2304), 8: (5888, 2464, 2240, 2304)}
_SHORT_KEYS = {(1, 8): (384, 18), (2, 8): (512, 23), (1, 0): (512, 19), (2, 0): (512, 19)}
"""Threads and items by sizes of key and value; ``sm90_small_key_tuning``."""


def scratch(nbytes: int) -> Tensor:
    """Return temporary storage, in a body that makes and gives back what its kernel does."""
    return torch.empty((nbytes,), dtype=torch.uint8)


def temporaries(*sizes: int) -> int:
    """What several arrays take in one buffer; util_temporary_storage.cuh, ``AliasTemporaries``."""
    return sum(round_up(size, _ALIGNMENT) for size in sizes) + _ALIGNMENT - 1


def radix_sort(
    gpu: Gpu,
    number: int,
    key_size: int,
    value_size: int = 0,
    bits: int | None = None,
    single: bool = False,
    in_place: bool = False,
) -> int:
    """Return what sorting by ``bits`` of the keys takes, by default all.

    Keys of type ``float`` are ``single``. What is sorted ``in_place`` has its second buffers
    elsewhere.
    dispatch_radix_sort.cuh, ``InvokeOnesweep``: bins of every digit and pass, a look-back word for
    every tile and digit, a second buffer of keys and values, and counters. Before sm90, keys of 1
    and 2 bytes are sorted by ``InvokePasses``: digits of every block that is resident.
    """
    if number <= _register_tile(256, 19, max(key_size, value_size)):
        return 1  # InvokeSingleTile sorts in shared memory, and must not ask for nothing
    buffers = (0, 0) if in_place else (number * key_size, number * value_size)
    if key_size < 4 and gpu.capability < (9, 0):
        # Blocks that a multiprocessor holds, as registers of DeviceRadixSortDownsweepKernel allow.
        most = 3 if (gpu.capability >= (8, 0)) == (value_size > 0) else 2
        resident = gpu.multiprocessors * (1 if key_size > 1 else most)
        spine = resident * _SUBSCRIPTION * (128 if key_size > 1 else 32) + _SPINE
        return temporaries(spine * _OFFSET, *buffers)
    tile = _sorting_tile(gpu, key_size, value_size, single)
    portion = _PORTION // tile * tile
    digits = ceil_div(bits or 8 * key_size, 8)
    passes = digits * ceil_div(number, portion)
    look_back = ceil_div(min(number, portion), tile) * _DIGITS * _WORD
    if digits == 1:
        buffers = (0, 0)
    return temporaries(passes * _DIGITS * _OFFSET, look_back, *buffers, passes * _WORD)


def _sorting_tile(gpu: Gpu, key_size: int, value_size: int, single: bool) -> int:
    """Return how many elements ``OnesweepPolicy`` has in a tile; tuning_radix_sort.cuh."""
    largest = max(key_size, value_size)
    if gpu.capability < (8, 0):
        return _register_tile(256, 46 if key_size == value_size == 4 else 23, largest)
    if gpu.capability < (9, 0):
        return _register_tile(384, 17 if key_size == 4 and value_size else 21, largest)
    if key_size < 4:
        threads, items = _SHORT_KEYS[key_size, value_size]
        if gpu.capability >= (10, 0) and (key_size, value_size) == (2, 0):
            threads, items = 384, 20
        return _register_tile(threads, items, largest)
    if key_size > 4:
        return _register_tile(384, 30 if value_size < 8 else 24, largest)
    if not value_size:
        return _register_tile(384, 18 if single else 19, largest)
    return _register_tile(384, 17 if value_size < 8 else 29, largest)


def _register_tile(threads: int, items: int, size: int) -> int:
    """Return the elements of a tile, by words of each thread; util_arch.cuh, RegBoundScaling."""
    return _tile(threads, max(1, items * 4 // max(4, size)), size)


def _tile(threads: int, items: int, size: int) -> int:
    return items * min(threads, round_up(ceil_div(_SHARED_MEMORY, size * items), 32))


def sort_in_place(gpu: Gpu, number: int, key_size: int, value_size: int) -> int:
    """What Thrust takes to sort pairs: second buffers too; detail/sort.h, ``radix_sort``."""
    buffers = round_up(number * key_size, 128) + round_up(number * value_size, 128)
    return buffers + radix_sort(gpu, number, key_size, value_size, in_place=True)


def segmented_sort_pairs(number: int, key_size: int, value_size: int) -> int:
    """Return what sorting pairs in segments takes: a second buffer of both;
    dispatch_radix_sort.cuh, ``DispatchSegmentedRadixSort::InvokePasses``.
    """
    return temporaries(number * key_size, number * value_size) if number else 1


def scan(number: int, size: int, primitive: bool = True) -> int:
    """Return what a prefix sum of elements of ``size`` bytes takes, by a function of torch's own.

    dispatch_scan.cuh, and tuning_scan.cuh, ``DefaultPolicy``. Numbers that CUB does not know, which
    c10's of 16 bits and complex ones are to it, have two values beside the state of each tile.
    """
    items = max(1, min(15 * 4 // size, 30))  # util_arch.cuh, MemBoundScaling
    state = (2 * max(size, 2),) if primitive else (_WORD, size, size)
    return temporaries(_states(ceil_div(number, _tile(128, items, size)), *state))


def _states(tiles: int, *sizes: int) -> int:
    """single_pass_scan_operators.cuh, ``tile_state_allocation_size``."""
    return temporaries(*((tiles + _PADDING) * size for size in sizes))


def _look_back(tiles: tuple[int, ...], state: int, gpu: Gpu, number: int) -> int:
    """Return what takes a state of so many bytes for each tile."""
    return temporaries(_states(_tiles(gpu, number, tiles), state))


running_count = partial(_look_back, (3072, 3072, 3840, 1920), 8)
"""Return what the prefix sum of ``int`` into ``int64_t`` takes; tuning_scan.cuh."""
running_sum = partial(_look_back, (4576, 2688, 3168, 896), 16)
"""Return what Thrust's prefix sum of ``int64_t`` takes; tuning_scan.cuh."""
flagged = partial(_look_back, (3520, 4224, 2304, 640), 8)
"""Return what picking positions by flags takes; dispatch_select_if.cuh."""


def distinct(gpu: Gpu, number: int, size: int, primitive: bool = True) -> int:
    """Return what picking elements that differ from the last takes; dispatch_select_if.cuh."""
    tiles = _DISTINCT_TILES[size] if primitive else _DISTINCT_TILES[size][-1:] * 4
    return _look_back(tiles, 8, gpu, number)


def distinct_keys(gpu: Gpu, number: int, size: int) -> int:
    """Return what picking the positions of such keys takes; dispatch_unique_by_key.cuh."""
    return _look_back(_DISTINCT_KEYS_TILES[size], 16, gpu, number)


def run_lengths(number: int) -> int:
    """Return what counting equal neighbours takes; dispatch_reduce_by_key.cuh."""
    return temporaries((ceil_div(number, _RUN_TILE) + _PADDING) * _PAIR)


def merge_sort(number: int, pairs: bool = False) -> int:
    """Return what sorting 64-bit keys by a function takes; dispatch_merge_sort.cuh."""
    keys, starts = number * _OFFSET, (ceil_div(number, _MERGE_TILE) + 1) * _WORD
    return temporaries(keys, keys if pairs else 0, starts)


def distinct_rows(gpu: Gpu, number: int, counted: bool) -> int:
    """What picking positions of rows that differ takes; Thrust's unique.h and unique_by_key.h."""
    sizes = _DISTINCT_KEYS_TILES[8] if counted else (_THRUST_TILE,) * 4
    return temporaries(_look_back(sizes, 8, gpu, number), _OFFSET)


def scan_by_key(gpu: Gpu, number: int, size: int) -> int:
    """Return what sums or maxima of neighbours with one key take; dispatch_scan_by_key.cuh."""
    tiles = _tiles(gpu, number, _SCAN_BY_KEY_TILES[size])
    return temporaries((tiles + _PADDING) * _PAIR, size * (tiles + 1))


def reduce(gpu: Gpu, number: int, size: int) -> int:
    """Return what a reduction takes: a partial result of every block.

    dispatch_reduce.cuh, ``InvokePasses``: five times the blocks that are resident, as many as there
    are threads for. Sums in 8 bytes have larger ones since sm100; tuning_reduce.cuh.
    """
    threads, items = (512, 15) if size == 8 and gpu.capability >= (10, 0) else (256, 16)
    if number <= _register_tile(threads, items, size):
        return 1
    resident = gpu.multiprocessors * (gpu.threads_per_multiprocessor // threads)
    return temporaries(resident * _SUBSCRIPTION * size)


def _tiles(gpu: Gpu, number: int, sizes: tuple[int, ...]) -> int:
    """Return how many tiles there are of the ``sizes`` of four generations; util_device.cuh,
    ``ChainedPolicy``: sm86 has a policy of its own, which is not tuned, as those before sm80.
    """
    major, minor = gpu.capability
    tuned = major > 8 or (major == 8 and minor < 6)
    return ceil_div(number, sizes[max(0, 10 - major) if tuned else -1])
