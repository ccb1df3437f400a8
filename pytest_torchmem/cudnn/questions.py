"""Questions to cuDNN, its answers, and which cuDNN is there to be asked.

Questions and answers are the same text in files and between processes. A question names no GPU and
no version; these stand beside it where answers are kept. Its tensors are those that ATen hands to
cuDNN, with the strides that cuDNN sees::

    cudnn::convolution_forward
    float16[32,64,56,56], float16[64,64,3,3], float16[32,64,56,56], [1,1], [1,1], [1,1]

Nothing is imported or loaded to find a cuDNN: the wheel of ``nvidia-cudnn-cu13`` is a folder of
``site-packages``, the same that a CUDA build of torch loads cuDNN from.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "cudnn::"
ALIGNED = 32
"""Bytes; what ``getAlignment`` of native/cudnn/Conv_v8.cpp looks for at most."""


class Operand(NamedTuple):
    """A tensor as cuDNN sees it."""

    dtype: str
    """A dtype of torch, such as ``"float16"``."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = ALIGNED
    """Of its address, in bytes."""

    def __str__(self) -> str:
        dense = self.strides == contiguous_strides(self.shape)
        strides = "" if dense else "@" + ":".join(map(str, self.strides))
        aligned = "" if self.alignment == ALIGNED else f" aligned to {self.alignment}"
        return f"{self.dtype}[{_list(self.shape)}]{strides}{aligned}"


class ConvolutionQuestion(NamedTuple):
    """A convolution's forward, or one of its gradients.

    ``x`` is the input or its gradient, ``w`` the weight or its gradient and ``y`` the output or its
    gradient, so that all three directions of one layer have the same operands.
    """

    direction: str
    """``"forward"``, ``"backward_input"`` or ``"backward_weight"``."""
    x: Operand
    w: Operand
    y: Operand
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    deterministic: bool = False
    allow_tf32: bool = True
    benchmark: bool = False
    """Every candidate is tried, as with ``torch.backends.cudnn.benchmark``."""
    mode_b: bool = False
    """``TORCH_CUDNN_USE_HEURISTIC_MODE_B``."""
    added: tuple[Operand, Operand] | None = None
    """What is added before a ReLU in the same kernel: a tensor like ``y``, and a bias."""
    alpha: float = 1.0
    """By what the first of them is multiplied."""

    @property
    def operator(self) -> str:
        """The name under which answers are kept."""
        return f"{PREFIX}convolution_{'add_relu' if self.added else self.direction}"

    @property
    def geometry(self) -> str:
        """Everything else that decides the answer, as text."""
        lists = (f"[{_list(numbers)}]" for numbers in (self.padding, self.stride, self.dilation))
        settings = {
            "benchmark": self.benchmark,
            "deterministic": self.deterministic,
            "float32 as ieee": self.x.dtype == "float32" and not self.allow_tf32,
            "heuristics of mode B": self.mode_b and not self.benchmark,
        }
        chosen = ", ".join(name for name, holds in settings.items() if holds)
        added = (*self.added, f"{self.alpha:g}") if self.added else ()
        text = ", ".join(map(str, (self.x, self.w, self.y, *added, *lists)))
        return f"{text}; {chosen}" if chosen else text

    def plain(self) -> dict[str, Any]:
        """Return the question as the process that asks reads it."""
        operands = [one[1:] for one in (self.x, self.w, self.y, *(self.added or ()))]
        own = {"kind": "convolution", "dtype": self.x.dtype, "operands": operands}
        return self._asdict() | own


class AttentionQuestion(NamedTuple):
    """Attention through cuDNN, its forward or its backward.

    Operands are there by name: ``query``, ``key``, ``value`` and ``output``; ``statistics`` where a
    backward follows; ``bias`` where there is a mask; ``gradient`` in a backward.
    """

    direction: str
    """``"forward"`` or ``"backward"``."""
    operands: tuple[tuple[str, Operand], ...]
    causal: bool = False
    dropout: float = 0.0

    @property
    def operator(self) -> str:
        """The name under which answers are kept."""
        return f"{PREFIX}attention_{self.direction}"

    @property
    def geometry(self) -> str:
        """Everything else that decides the answer, as text."""
        text = ", ".join(f"{name}={operand}" for name, operand in self.operands)
        settings = {"causal": self.causal, f"dropout {self.dropout:g}": self.dropout > 0}
        chosen = ", ".join(name for name, holds in settings.items() if holds)
        return f"{text}; {chosen}" if chosen else text

    def plain(self) -> dict[str, Any]:
        """Return the question as the process that asks reads it."""
        operands = {name: one[:3] for name, one in self.operands}
        return self._asdict() | {"kind": "attention", "operands": operands}


Question = ConvolutionQuestion | AttentionQuestion


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]


def without_free_strides(
    shape: Sequence[int], strides: Sequence[int], channels_last: bool
) -> tuple[int, ...]:
    """Return strides where those of dimensions of size 1 follow from the others;
    ``fixSizeOneDimStride`` of ATen/cudnn/Descriptors.h.
    """
    inner = range(len(shape) - 1, 1, -1)
    order = (1, *inner, 0) if channels_last else (*inner, 1, 0)
    fixed, expected = list(strides), 1
    for dim in order:
        if shape[dim] == 1:
            fixed[dim] = expected
        else:
            expected *= shape[dim]
    return tuple(fixed)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


class ExecutionPlan(NamedTuple):
    """A plan of cuDNN: the bytes of its workspace, and its engine."""

    workspace: int
    engine: int
    notes: tuple[str, ...] = ()
    """cuDNN's numerical notes, such as ``"tensor core"``."""


class Answer(NamedTuple):
    """Plans in cuDNN's order, the one that runs first; all of them only of a benchmark.

    Without plans cuDNN has no engine for the question, or did not survive it; ``why`` says so.
    """

    plans: tuple[ExecutionPlan, ...] = ()
    why: str = ""
    is_failure: bool = False
    """Whether cuDNN could not be asked, or did not survive it, so that nothing is known."""

    @property
    def workspace(self) -> int | None:
        """The bytes that the allocator is asked for: of a benchmark, those of the largest."""
        return max((plan.workspace for plan in self.plans), default=None)


VARIABLE = "TORCHMEM_CUDNN"
"""A folder in place of the one in ``site-packages``: one that pip installed into (``--target``), or
one with cuDNN's libraries; ``off`` for none."""
OLDEST = (9, 8, 0)
"""The first version that answers without a device."""

Version = tuple[int, int, int]

#: What the CUDA build of each series of torch requires, by the wheel's metadata.
PINNED: dict[str, Version] = {
    "2.11": (9, 19, 0),
    "2.12": (9, 20, 0),
    "2.13": (9, 20, 0),
    "2.14": (9, 24, 0),
    "2.15": (9, 26, 0),
}
_LIBRARY = "libcudnn.so.9"
_BESIDE = ("cu13/lib", "cublas/lib", "cuda_nvrtc/lib", "cuda_runtime/lib")
_DEFINED = re.compile(r"^#define CUDNN_(MAJOR|MINOR|PATCHLEVEL)\s+(\d+)", re.MULTILINE)


class Installed(NamedTuple):
    """A cuDNN on this machine."""

    library: Path
    """``libcudnn.so.9``."""
    version: Version
    folders: tuple[Path, ...]
    """Where it and the libraries that it needs are."""
    frontend: Path | None = None
    """The folder that has cudnn-frontend, which attention is asked with."""

    def library_path(self, stand_in: Path) -> str:
        """Return ``LD_LIBRARY_PATH``; ``stand_in`` is the folder of the driver's stand-in."""
        return os.pathsep.join(map(str, (*self.folders, stand_in)))


def find_installed() -> Installed | str:
    """Return the cuDNN that would be asked, or why there is none to ask."""
    from pytest_torchmem.cudnn import driver

    named = os.environ.get(VARIABLE, "")
    if named.lower() == "off":
        return f"{VARIABLE} is off"
    if sys.platform != "linux" or not driver.is_supported():
        return "cuDNN can be asked on Linux alone, on x86-64 and aarch64"
    places = [Path(named)] if named else [Path(entry) for entry in sys.path if entry]
    for place in places:
        found = _in(place)
        if found is None:
            continue
        if found.version < OLDEST:
            return (
                f"cuDNN {version_text(found.version)} does not answer without a GPU: "
                f"{version_text(OLDEST)} and later do"
            )
        return found
    if named:
        return f"{VARIABLE}={named}: there is no {_LIBRARY} of a known version in it"
    return "cuDNN is not installed (pip install nvidia-cudnn-cu13; docs/cudnn.md)"


def version_text(version: Version) -> str:
    """Return ``"9.20.0"``."""
    return ".".join(map(str, version))


def parse_version(text: str) -> Version:
    """Return the version that ``version_text`` wrote, (0, 0, 0) for another text."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return 0, 0, 0
    return int(parts[0]), int(parts[1]), int(parts[2])


def _in(place: Path) -> Installed | None:
    for folder in (place / "nvidia" / "cudnn" / "lib", place / "lib", place):
        library = folder / _LIBRARY
        if os.path.isfile(library):  # of ``Path``, it raises for folders that cannot be read
            version = _version_of(folder)
            if version is not None:
                return Installed(library, version, tuple(_folders(folder)), _frontend(place))
    return None


def _frontend(place: Path) -> Path | None:
    """Return the folder with ``nvidia-cudnn-frontend``, beside cuDNN or on ``sys.path``."""
    for folder in (place, *(Path(entry) for entry in sys.path if entry)):
        if any((folder / "cudnn").glob("_compiled_module*.so")):
            return folder
    return None


def _version_of(folder: Path) -> Version | None:
    """Read the version from the header beside the library, or from the name of the file. The wheel
    has the header there, and packages of distributions have a link to a full name.
    """
    for header in (folder.parent / "include", folder):
        try:
            text = (header / "cudnn_version.h").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = {name: int(number) for name, number in _DEFINED.findall(text)}
        if len(found) == 3:
            return found["MAJOR"], found["MINOR"], found["PATCHLEVEL"]
    name = os.path.basename(os.path.realpath(folder / _LIBRARY))
    version = parse_version(name.removeprefix("libcudnn.so."))
    return version if any(version) else None


def _folders(folder: Path) -> Iterator[Path]:
    """Yield the library's folder, and those of other wheels, beside it and of ``sys.path``."""
    yield folder
    roots = [folder.parent.parent, *(Path(entry) / "nvidia" for entry in sys.path if entry)]
    for name in _BESIDE:
        yield from dict.fromkeys(root / name for root in roots if os.path.isdir(root / name))
