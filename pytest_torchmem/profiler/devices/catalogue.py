"""The GPUs that a fake cuda device can stand for. Nothing here needs torch.

Sources of the figures: the CUDA C++ Programming Guide's table of technical specifications per
compute capability (threads per multiprocessor), and NVIDIA's architecture white papers and data
sheets of each product (multiprocessors, memory): Turing, Volta, Ampere (GA100, GA102), Ada (AD102,
L4 and L40S data sheets), Hopper (H100, H200), Blackwell (DGX B200, GeForce RTX 5090). What a driver
reports as a GPU's memory is a few hundred MiB less than the data sheet's size, which stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


def register_gpu(gpu: Gpu) -> Callable[[], None]:
    """Add a GPU to the catalogue and return the function that takes it out again.

    Raises ``UsageError`` for a name that is taken and for figures that no GPU has.
    """
    key = _key(gpu.name)
    if not key or key in _BY_KEY:
        raise UsageError(f"the GPU {gpu.name!r} cannot be added: the name is taken or empty")
    if min(gpu.memory, gpu.multiprocessors, gpu.threads_per_multiprocessor) <= 0:
        raise UsageError(
            f"the GPU {gpu.name!r} cannot be added: memory, multiprocessors and "
            "threads_per_multiprocessor have to be positive"
        )
    if len(gpu.capability) != 2 or gpu.capability < (5, 0):
        raise UsageError(
            f"the GPU {gpu.name!r} cannot be added: capability={gpu.capability!r} is not a compute "
            "capability such as (8, 0), from (5, 0) on"
        )
    _GPUS[gpu.name] = _BY_KEY[key] = gpu

    def remove() -> None:
        _GPUS.pop(gpu.name, None)
        _BY_KEY.pop(key, None)

    return remove


@contextmanager
def registered_gpus(*gpus: Gpu) -> Iterator[None]:
    """Have GPUs in the catalogue for a while."""
    with ExitStack() as stack:
        for gpu in gpus:
            stack.callback(register_gpu(gpu))
        yield


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
