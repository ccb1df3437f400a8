"""A GPU that is described to cuDNN, and a stand-in for the driver's library.

``CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`` wants 24 values. Answers depend on the compute
capability, the number of multiprocessors and the largest grid alone
(benchmarks/results/workspaces.md), and the grid is the same for all; the others are those of the
GPU or of its generation, so that what is asked is never impossible.

cuDNN leaves out what is compiled when it runs (attention, fused graphs, some convolutions) unless
it finds the driver and all of the functions below, and some builds are not loaded at all without
``libcuda.so.1``. To build execution plans the functions have to do nothing: those that load and
describe kernels succeed, and every other one answers ``CUDA_ERROR_NO_DEVICE``, as a driver without
a GPU does. The library is written by Python, so that no compiler is needed and no binary is
distributed, and only the process that asks cuDNN ever sees it.
"""

import platform
import struct
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
        "reservedSharedMemoryPerBlock": _KIB if capability >= (8, 0) else 0,
        "maxRegistersPerSM": 65536,
        "pciDeviceId": 0,
        "maxCtasPerSM": blocks,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": 80 * _KIB**3,
    }


SONAME = "libcuda.so.1"
LOADING = (
    *("cuLibraryGetKernel", "cuLibraryLoadData", "cuLibraryLoadFromFile"),
    *("cuModuleGetFunction", "cuModuleLoadData"),
)
"""What gives a handle: kernels are loaded while a plan is built, and none of them is launched."""
SETTING = ("cuKernelGetAttribute", "cuKernelSetAttribute", "cuLibraryUnload", "cuModuleUnload")
"""What is done with such handles, and succeeds."""
OTHERS = (
    *("cuCtxGetCurrent", "cuCtxGetLimit", "cuCtxPopCurrent", "cuCtxPushCurrent"),
    *("cuDeviceGet", "cuDeviceGetCount", "cuDriverGetVersion", "cuGetErrorName"),
    *("cuGetErrorString", "cuLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx"),
    *("cuLinkAddData", "cuLinkComplete", "cuLinkCreate", "cuLinkDestroy"),
    *("cuOccupancyMaxPotentialClusterSize", "cuStreamGetCtx", "cuTensorMapEncodeIm2col"),
    "cuTensorMapEncodeTiled",
)
"""What else ``libcudnn_engines_runtime_compiled.so.9`` wants defined, from 9.8 to 9.28."""
HANDLE = -1
"""For a function that writes a handle to where its first argument points, and succeeds."""
FUNCTIONS = {
    **dict.fromkeys(LOADING, HANDLE),
    **dict.fromkeys(SETTING, 0),
    **dict.fromkeys(OTHERS, 100),
}
"""The functions with what they return: success, or ``CUDA_ERROR_NO_DEVICE``."""

_CODE = 16
"""The bytes of a function."""


def _on_x86_64(answer: int) -> bytes:
    if answer == HANDLE:  # mov qword ptr [rdi], 16; xor eax, eax; ret
        return b"\x48\xc7\x07\x10\x00\x00\x00\x31\xc0\xc3"
    return b"\xb8" + struct.pack("<I", answer) + b"\xc3"  # mov eax, answer; ret


def _on_aarch64(answer: int) -> bytes:
    if answer == HANDLE:  # mov x1, #16; str x1, [x0]; mov w0, #0; ret
        return struct.pack("<IIII", 0xD2800201, 0xF9000001, 0x52800000, 0xD65F03C0)
    return struct.pack("<II", 0x52800000 | answer << 5, 0xD65F03C0)  # mov w0, #answer; ret


#: ELF's number of the machine, and a function's code there.
_MACHINES = {"x86_64": (62, _on_x86_64), "aarch64": (183, _on_aarch64)}
_HEADER, _SEGMENT, _SYMBOL, _DYNAMIC = 64, 56, 24, 16
_LOAD, _DYNAMIC_SEGMENT, _STACK = 1, 2, 0x6474E551
_STRINGS, _SYMBOLS, _HASH, _STRINGS_SIZE, _SYMBOL_SIZE, _NAME = 5, 6, 4, 10, 11, 14


def is_supported(machine: str = "") -> bool:
    """Return whether a stand-in can be written for this machine, or for ``machine``."""
    return (machine or platform.machine()) in _MACHINES


def shared_object(machine: str = "") -> bytes:
    """Return a shared object in ELF with ``FUNCTIONS``; raises ``KeyError`` for other machines."""
    number, coded = _MACHINES[machine or platform.machine()]
    code = b"".join(coded(answer).ljust(_CODE, b"\0") for answer in FUNCTIONS.values())
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (SONAME, *FUNCTIONS))
    symbols = _HEADER + 3 * _SEGMENT
    strings = symbols + _SYMBOL * (len(FUNCTIONS) + 1)
    # One bucket, whose chain goes through all symbols: no hash has to be computed.
    count = len(FUNCTIONS) + 1
    chain = [0, *range(2, count), 0]
    table = struct.pack(f"<III{count}I", 1, count, 1, *chain[:count])
    hashes = _aligned(strings + len(names), 8)
    dynamic = _aligned(hashes + len(table), 16)
    entries = (
        (_NAME, _position(names, SONAME)),
        (_HASH, hashes),
        (_STRINGS, strings),
        (_SYMBOLS, symbols),
        (_STRINGS_SIZE, len(names)),
        (_SYMBOL_SIZE, _SYMBOL),
        (0, 0),
    )
    start = _aligned(dynamic + _DYNAMIC * len(entries), 16)
    # A shared object (3) of little-endian 64-bit code, without sections.
    magic = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    sizes = (_HEADER, _SEGMENT, 3, 64, 0, 0)
    parts = {
        0: magic + struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, _HEADER, 0, 0, *sizes),
        _HEADER: _segment(_LOAD, 5, 0, start + len(code))
        + _segment(_DYNAMIC_SEGMENT, 4, dynamic, _DYNAMIC * len(entries))
        + _segment(_STACK, 6, 0, 0),
        symbols: bytes(_SYMBOL)
        + b"".join(
            struct.pack("<IBBHQQ", _position(names, name), 0x12, 0, 1, start + _CODE * at, _CODE)
            for at, name in enumerate(FUNCTIONS)
        ),
        strings: names,
        hashes: table,
        dynamic: b"".join(struct.pack("<QQ", *entry) for entry in entries),
        start: code,
    }
    written = bytearray(start + len(code))
    for offset, part in parts.items():
        written[offset : offset + len(part)] = part
    return bytes(written)


def _segment(kind: int, flags: int, offset: int, size: int) -> bytes:
    alignment = 0x10000 if kind == _LOAD else 16 if kind == _STACK else 8
    return struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, alignment)


def _position(names: bytes, name: str) -> int:
    return names.index(b"\0" + name.encode() + b"\0") + 1


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
