"""The GPUs that a fake cuda device can stand for. Nothing here needs torch.

Sources of the figures: the CUDA C++ Programming Guide's table of technical specifications per
compute capability (threads per multiprocessor) and NVIDIA's data sheets and architecture white
papers of each product (multiprocessors, memory). ``memory`` is what ``torch.cuda`` reports as
``total_memory`` in practice differs by driver and ECC; the data sheet's size is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from pytest_torchmem.errors import UsageError

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its compute capability, memory in bytes, and multiprocessors."""

    name: str
    product: str
    """The name ``torch.cuda.get_device_name`` gives."""
    capability: tuple[int, int]
    memory: int
    multiprocessors: int
    threads_per_multiprocessor: int


DEFAULT_GPU = "a100-80gb"

_GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", "Tesla T4", (7, 5), 16 * _GIB, 40, 1024),
        Gpu("v100", "Tesla V100-SXM2-16GB", (7, 0), 16 * _GIB, 80, 2048),
        Gpu("a10", "NVIDIA A10", (8, 6), 24 * _GIB, 72, 1536),
        Gpu("l4", "NVIDIA L4", (8, 9), 24 * _GIB, 58, 1536),
        Gpu("l40s", "NVIDIA L40S", (8, 9), 48 * _GIB, 142, 1536),
        Gpu("rtx-3090", "NVIDIA GeForce RTX 3090", (8, 6), 24 * _GIB, 82, 1536),
        Gpu("rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), 24 * _GIB, 128, 1536),
        Gpu("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 32 * _GIB, 170, 1536),
        Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 40 * _GIB, 108, 2048),
        Gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 80 * _GIB, 108, 2048),
        Gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0), 80 * _GIB, 132, 2048),
        Gpu("h200", "NVIDIA H200", (9, 0), 141 * 10**9, 132, 2048),
        Gpu("b200", "NVIDIA B200", (10, 0), 180 * 10**9, 148, 2048),
    )
}
_ALIASES = {"a100": "a100-80gb"}


def _key(name: str) -> str:
    return "".join(name.lower().replace("-", "").split())


_BY_KEY = {_key(name): gpu for name, gpu in _GPUS.items()}
_BY_KEY.update({_key(alias): _GPUS[name] for alias, name in _ALIASES.items()})


def gpu_names() -> tuple[str, ...]:
    """Return the names of all known GPUs."""
    return tuple(_GPUS)


def find_gpu(name: str) -> Gpu:
    """Return the GPU called ``name``, matched without case, spaces or hyphens.

    Raises ``UsageError`` with the known names for any other.
    """
    gpu = _BY_KEY.get(_key(name)) if isinstance(name, str) else None
    if gpu is None:
        near = get_close_matches(_key(str(name)), _BY_KEY, n=1)
        guess = f" Did you mean {_BY_KEY[near[0]].name!r}?" if near else ""
        raise UsageError(f"{name!r} is not a known GPU.{guess} Known: {', '.join(_GPUS)}")
    return gpu
