"""The description of a GPU that cuDNN takes in the place of a device.

``CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`` wants 24 values. Answers depend on the compute
capability, the number of multiprocessors and the largest grid alone (docs/accuracy.md says how that
was tried), and the grid is the same for all; the others are those of the GPU or of its generation,
so that what is asked is never impossible.
"""

from __future__ import annotations

from typing import Any

_KIB = 1024

#: By compute capability: shared memory that a block can opt in to, threads and blocks of a
#: multiprocessor (CUDA C++ Programming Guide, technical specifications per compute capability), and
#: a second-level cache of that generation, in MiB.
_GENERATIONS: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (7, 0): (96 * _KIB, 2048, 32, 6),
    (7, 5): (64 * _KIB, 1024, 16, 4),
    (8, 0): (163 * _KIB, 2048, 32, 40),
    (8, 6): (99 * _KIB, 1536, 16, 6),
    (8, 9): (99 * _KIB, 1536, 24, 72),
    (9, 0): (227 * _KIB, 2048, 32, 50),
    (10, 0): (227 * _KIB, 2048, 32, 126),
    (12, 0): (99 * _KIB, 1536, 24, 96),
}


def device_properties(capability: tuple[int, int], multiprocessors: int) -> dict[str, Any]:
    """Return what cuDNN is told of a GPU; a capability that is not listed is like the one below."""
    known = [listed for listed in _GENERATIONS if listed <= capability] or [min(_GENERATIONS)]
    shared, threads, blocks, cache = _GENERATIONS[max(known)]
    return {
        "deviceName": "NVIDIA GPU",
        "cudaDeviceId": 0,
        "deviceVer": capability[0] * 100 + capability[1] * 10,
        "driverVer": 13000,
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "multiProcessorCount": multiprocessors,
        "smClockRateKHz": 1410000,
        "memClockRateKHz": 1593000,
        "memoryBusWidth": 5120,
        "l2CacheSize": cache * _KIB**2,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": 48 * _KIB,
        "maxSharedMemoryPerBlockOptin": shared,
        "reservedSharedMemoryPerBlock": _KIB,
        "maxRegistersPerSM": 65536,
        "pciDeviceId": 0,
        "maxCtasPerSM": blocks,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": 80 * _KIB**3,
    }
