"""What was measured on GPUs of kernels whose workspace no source computes.

Where a library decides what a kernel takes (cuDNN, cuSOLVER, cuFFT), only a GPU can tell how much.
A trace asks a ``Calibration`` for exactly these, by operator, geometry and GPU. Nothing here needs
torch: figures are read, merged and written without it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple


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
"""The source of what cuDNN told."""


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
