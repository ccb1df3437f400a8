"""The GPUs that a fake cuda device can stand for, and what was measured on them.

Nothing here needs torch.

Sources of the figures: the CUDA C++ Programming Guide's table of technical specifications per
compute capability (threads per multiprocessor), and NVIDIA's architecture white papers and data
sheets of each product (multiprocessors): Turing, Volta, Ampere (GA100, GA102), Ada (AD102, AD103,
L4 and L40S data sheets), Hopper (H100, H200, GH200), Blackwell (DGX B200, GeForce RTX 5080 and
5090). Those of A10G, B300 and GB200 are what programs on them printed
(``_CudaDeviceProperties(name='NVIDIA A10G', …, multi_processor_count=80)``).

The memory is what a program can see (``cudaMemGetInfo``), which is less than the data sheet says:
the "total capacity" of ``torch.OutOfMemoryError`` messages that people published for each GPU, or
the ``total_memory`` that ``torch.cuda.get_device_properties`` printed; it differs by up to 2 %
between drivers. The L40 and the A40 check their memory (ECC), as they are sold; the RTX A6000 and
the RTX 6000 Ada do not. What CUDA's context and libraries take of it is, in the same messages, what
the process has in use less what PyTorch has allocated and reserved; for the H100, what one showed
with driver 580.159.04 and torch 2.11 (527 MiB at first, 92 for the first kernel, 66 for cuBLAS, 8
for cuDNN); for the L40, the RTX 4080, the H100 PCIe, the B300 and the GB200, that of the nearest
GPU for which a message was found. So it is for the RTX 5070 Ti, whose memory llama.cpp printed on
Linux (15,842 MiB), and for the RTX PRO 6000 (``_CudaDeviceProperties(name='NVIDIA RTX PRO 6000
Blackwell Server Edition', …, total_memory=97250MB, multi_processor_count=188)``).

Slices are those that ``nvidia-smi mig -lgip`` lists, with their memory and multiprocessors.

The B100 is not here: nobody published what a program sees on one.

Where a library decides what a kernel takes (cuDNN, cuSOLVER, cuFFT), only a GPU can tell how much.
A trace asks a ``Calibration`` for exactly these, by operator, geometry and GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from pytest_torchmem.cudnn.driver import device_properties
from pytest_torchmem.errors import UsageError

_MIB = 1024**2


@dataclass(frozen=True, slots=True, repr=False)
class Gpu:
    """A GPU: its compute capability, memory in bytes, and multiprocessors.

    ``memory`` is what ``torch.cuda.get_device_properties(0).total_memory`` gives.
    """

    name: str
    product: str
    """The name ``torch.cuda.get_device_name`` gives."""
    capability: tuple[int, int]
    memory: int
    multiprocessors: int
    threads_per_multiprocessor: int
    context: int = 512 * _MIB
    """What CUDA's context and libraries take of the memory, and tensors cannot have; bytes."""


DEFAULT_GPU = "a100-80gb"
MOST_GPUS = 64


def _gib(number: float) -> int:
    """Return GiB, as messages round them, in bytes: whole MiB."""
    return round(number * 1024) * _MIB


_GPUS = {
    name: Gpu(
        *(name, product, capability, _gib(memory), multiprocessors),
        *(device_properties(capability, multiprocessors)["maxThreadsPerSM"], context * _MIB),
    )
    for name, product, capability, memory, multiprocessors, context in (
        ("t4", "Tesla T4", (7, 5), 14.74, 40, 112),
        ("v100", "Tesla V100-SXM2-16GB", (7, 0), 15.77, 80, 380),
        ("v100-32gb", "Tesla V100-SXM2-32GB", (7, 0), 31.73, 80, 389),
        ("a10", "NVIDIA A10", (8, 6), 22.06, 72, 256),
        ("a10g", "NVIDIA A10G", (8, 6), 22.06, 80, 256),
        ("a40", "NVIDIA A40", (8, 6), 44.35, 84, 433),
        ("l4", "NVIDIA L4", (8, 9), 22.03, 58, 256),
        ("l40", "NVIDIA L40", (8, 9), 44.40, 142, 416),
        ("l40s", "NVIDIA L40S", (8, 9), 44.52, 142, 416),
        ("rtx-a6000", "NVIDIA RTX A6000", (8, 6), 47.54, 84, 309),
        ("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", (8, 9), 47.48, 142, 429),
        ("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 10.76, 68, 188),
        ("rtx-3080", "NVIDIA GeForce RTX 3080", (8, 6), 9.64, 68, 266),
        ("rtx-3090", "NVIDIA GeForce RTX 3090", (8, 6), 23.68, 82, 256),
        ("rtx-4080", "NVIDIA GeForce RTX 4080", (8, 9), 15.67, 76, 440),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), 23.64, 128, 440),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 94.971, 188, 496),
        ("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", (12, 0), 15.471, 70, 348),
        ("rtx-5080", "NVIDIA GeForce RTX 5080", (12, 0), 15.47, 84, 348),
        ("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 31.36, 170, 496),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 39.49, 108, 490),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 79.25, 108, 490),
        ("h100", "NVIDIA H100 80GB HBM3", (9, 0), 79.18, 132, 693),
        ("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 79.11, 114, 522),
        ("h100-nvl", "NVIDIA H100 NVL", (9, 0), 93.10, 132, 601),
        ("gh200", "NVIDIA GH200 480GB", (9, 0), 94.88, 132, 758),
        ("h200", "NVIDIA H200", (9, 0), 139.80, 132, 664),
        ("b200", "NVIDIA B200", (10, 0), 178.35, 148, 712),
        ("gb200", "NVIDIA GB200", (10, 0), 184.31, 152, 712),
        ("b300", "NVIDIA B300 SXM6 AC", (10, 3), 267.69, 148, 712),
    )
}
"""The memory in GiB, as messages round it, what CUDA's context takes in MiB."""

_SLICES = {
    "a100-80gb": {
        "1g.10gb": (9.50, 14),
        "1g.20gb": (19.50, 14),
        "2g.20gb": (19.50, 28),
        "3g.40gb": (39.25, 42),
        "4g.40gb": (39.25, 56),
        "7g.80gb": (79.00, 98),
    },
    "h100": {
        "1g.10gb": (9.75, 16),
        "1g.20gb": (19.62, 26),
        "2g.20gb": (19.62, 32),
        "3g.40gb": (39.50, 60),
        "4g.40gb": (39.50, 64),
        # of 7g.80gb, which is the whole GPU, it lists more memory than a program sees
    },
}
"""GiB and multiprocessors of MIG's profiles."""

for _whole, _profiles in _SLICES.items():
    for _profile, (_memory, _count) in _profiles.items():
        _GPUS[f"{_whole}:{_profile}"] = replace(
            _GPUS[_whole],
            name=f"{_whole}:{_profile}",
            product=f"{_GPUS[_whole].product} MIG {_profile}",
            memory=_gib(_memory),
            multiprocessors=_count,
        )


def _key(name: str) -> str:
    return "".join(name.lower().replace("-", "").split())


_BY_KEY = {_key(name): gpu for name, gpu in _GPUS.items()}
for _short, _name in (("a100", "a100-80gb"), ("a6000", "rtx-a6000"), ("6000ada", "rtx-6000-ada")):
    _BY_KEY[_short] = _GPUS[_name]


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
    if not 0 <= gpu.context < gpu.memory:
        raise UsageError(
            f"the GPU {gpu.name!r} cannot be added: context={gpu.context!r} has to be less than "
            f"its memory={gpu.memory!r}"
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
    with ExitStack() as stack:
        for gpu in gpus:
            stack.callback(register_gpu(gpu))
        yield


def known_gpu(gpu: Gpu) -> AbstractContextManager[None]:
    """Have a GPU that was found on this machine in the catalogue for a while, if it is unknown."""
    return registered_gpus(*() if gpu.name in _GPUS else (gpu,))


def gpu_names() -> tuple[str, ...]:
    return tuple(_GPUS)


def find_gpu(name: str) -> Gpu:
    """Return the GPU called ``name``, matched without case, spaces or hyphens.

    Raises ``UsageError`` with the known names for any other.
    """
    gpu = _BY_KEY.get(_key(name)) if isinstance(name, str) else None
    if gpu is None:
        near = get_close_matches(_key(str(name)), _BY_KEY, n=1, cutoff=0.7)
        guess = f" Did you mean {_BY_KEY[near[0]].name!r}?" if near else ""
        raise UsageError(f"{name!r} is not a known GPU of NVIDIA.{guess} Known: {', '.join(_GPUS)}")
    return gpu


class WorkspaceKey(NamedTuple):
    """A workspace that no exact formula gives: an operator and what it is called with.

    ``operator`` is the overload's name (``"aten::convolution"``, ``"aten::sum.dim_IntList"``),
    ``geometry`` its arguments as ``operators/workspace_of.py`` writes them, on the GPU that
    measures as in a trace.
    """

    operator: str
    geometry: str


class WorkspaceSize(NamedTuple):
    """What a kernel took, in bytes.

    ``workspace`` is what it had alive at its own peak beyond what was alive before and what stays
    when it returns: its outputs, and buffers that a library keeps. ``reserve`` is the size of the
    output whose size the library alone decides (what cuDNN keeps for the backward), ``None`` for
    an operator without one.
    """

    workspace: int
    reserve: int | None = None

    def largest(self, other: "WorkspaceSize") -> "WorkspaceSize":
        """Return the larger of both, number by number."""
        reserves = [found for found in (self.reserve, other.reserve) if found is not None]
        return WorkspaceSize(max(self.workspace, other.workspace), max(reserves, default=None))


class Setup(NamedTuple):
    """Where figures were measured: everything that decides which kernels a library takes."""

    gpu: str
    """A name of the catalogue, such as ``"a100-80gb"``."""
    torch: str
    """The minor series, such as ``"2.13"``."""
    cudnn: str = ""
    """cuDNN's version, such as ``"9.19.0"``; empty for a torch without cuDNN."""
    source: str = ""
    """``"cudnn"`` for what cuDNN told without that GPU; empty for what was measured on it."""

    def __str__(self) -> str:
        cudnn = f", cuDNN {self.cudnn}" if self.cudnn else ""
        told = ", told by cuDNN" if self.source else ""
        return f"{self.gpu}, torch {self.torch}{cudnn}{told}"


CUDNN = "cudnn"


class LibraryAnswer(NamedTuple):
    """What a library was asked in a trace, and the bytes it told; ``None`` where it told nothing.

    ``version`` is the library's, empty where there was nobody to ask; ``why`` says why there is no
    answer.
    """

    question: WorkspaceKey
    nbytes: int | None
    version: str = ""
    stored: bool = False
    """It comes from a file of answers, and not from the library itself."""
    why: str = ""
    engine: int = -1
    """The number of cuDNN's engine, where cuDNN itself was asked."""
    modules: tuple[str, ...] = ()
    """The modules that asked, in the order in which they did."""


Figures = Mapping[Setup, Mapping[WorkspaceKey, WorkspaceSize]]
FigureTable = dict[Setup, dict[WorkspaceKey, WorkspaceSize]]
_Stored = tuple[WorkspaceSize, Setup]
"""A size, and the setup that it was stored for."""


class Calibration:
    """Workspaces that were measured on GPUs, for ``trace(calibration=...)``.

    Two calibrations are equal only if they are the same object: traces remember what they learnt
    from one of them.
    """

    def __init__(self, figures: Figures) -> None:
        self.figures: Figures = MappingProxyType(
            {setup: MappingProxyType(dict(found)) for setup, found in figures.items()}
        )
        self._by_gpu: dict[tuple[str, str], dict[WorkspaceKey, _Stored]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.figures.values()))

    def __repr__(self) -> str:
        setups = "; ".join(map(str, sorted(self.figures)))
        return f"<Calibration: {len(self)} figures ({setups or 'none'})>"

    def covers(self, gpu: str) -> bool:
        return any(setup.gpu == gpu and found for setup, found in self.figures.items())

    def told_by(self, source: str, gpu: str) -> str:
        """Return the latest version of a library whose answers for ``gpu`` there are, or ``""``."""
        versions = [
            setup.cudnn
            for setup, found in self.figures.items()
            if setup.gpu == gpu and setup.source == source and found
        ]
        return max(versions, key=_numbers, default="")

    def find(self, question: WorkspaceKey, gpu: str, series: str) -> _Stored | None:
        """Return what was measured on ``gpu``, and where; ``None`` where nothing was.

        Figures of torch's minor ``series`` come first, of cuDNN's versions the latest; where that
        series has none, those of the latest series. Another GPU's are never taken.
        """
        known = self._by_gpu.get((gpu, series))
        if known is None:
            known = self._by_gpu[gpu, series] = dict(self._on(gpu, series))
        return known.get(question)

    def _on(self, gpu: str, series: str) -> Iterator[tuple[WorkspaceKey, _Stored]]:
        """Yield every figure of a GPU, the better of two for one question later."""

        def rank(setup: Setup) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
            return (setup.torch == series, _numbers(setup.torch), _numbers(setup.cudnn))

        for setup in sorted((s for s in self.figures if s.gpu == gpu), key=rank):
            for question, figure in self.figures[setup].items():
                yield question, (figure, setup)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
