"""The marker ``memory_budget``: what it says, and whether a profile keeps to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_torchmem.checks.settings import parse_devices, parse_measure
from pytest_torchmem.errors import UsageError
from pytest_torchmem.snapshots.tolerance import PHASES, Level, parse_rules
from pytest_torchmem.units import format_size, parse_size

if TYPE_CHECKING:
    import pytest

MARKER = "memory_budget"
SIGNATURE = (
    "memory_budget(peak=None, *, forward=None, backward=None, optimizer=None, retained=None, "
    "device=None, gpu=None, tolerance=None, measure=None)"
)
_LIMITS = ("peak", "forward", "backward", "optimizer", "retained")


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure's limit in bytes, and how the user wrote it."""

    figure: str
    nbytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Budget:
    """What the ``memory_budget`` markers of one test say together."""

    limits: tuple[Limit, ...] = ()
    devices: tuple[str, ...] | None = None
    gpu: str | None = None
    tolerance: Level = ()
    measure: str | None = None

    @property
    def judges(self) -> bool:
        """Whether there is a limit to keep to; a GPU named alone means "fits on it"."""
        return bool(self.limits) or self.gpu is not None


@dataclass(frozen=True, slots=True)
class Overrun:
    """A limit that was not kept; ``value`` is ``None`` where the phase did not run."""

    limit: Limit
    value: int | None


def memory_budget(
    peak: Any = None,
    *,
    forward: Any = None,
    backward: Any = None,
    optimizer: Any = None,
    retained: Any = None,
    device: Any = None,
    gpu: Any = None,
    tolerance: Any = None,
    measure: Any = None,
) -> dict[str, Any]:
    """Return a marker's arguments by name; Python itself checks that they are the marker's."""
    return {**locals()}


def read_budget(marks: Iterable[pytest.Mark]) -> Budget:
    """Return what ``marks``, the closest first, say together: for each argument the closest wins.

    Raises ``UsageError`` where an argument is unknown or cannot be read, and where nothing in any
    of them can be judged.
    """
    written = [_arguments(mark) for mark in marks]
    if not written:
        return Budget()

    def closest(name: str) -> Any:
        values = (arguments[name] for arguments in written)
        return next((value for value in values if value is not None), None)

    limits = [
        Limit(PHASES[name], _size(name, closest(name)), str(closest(name)))
        for name in _LIMITS
        if closest(name) is not None
    ]
    gpu, device, tolerance = closest("gpu"), closest("device"), closest("tolerance")
    measure = closest("measure")
    if not limits and gpu is None and tolerance is None:
        raise UsageError(
            f"the marker {MARKER} has no limit, so there is nothing to check. Give it one, such as "
            f'{MARKER}("2 GiB") or {MARKER}(backward="1.5 GiB"), or a GPU that the test must fit '
            f'on: {MARKER}(gpu="t4")'
        )
    return Budget(
        limits=tuple(limits),
        devices=parse_devices(device, f"{MARKER}(device=)") if device is not None else None,
        gpu=_gpu(gpu),
        tolerance=parse_rules(tolerance, f"the marker {MARKER}(tolerance=)"),
        measure=parse_measure(measure, f"{MARKER}(measure=)") if measure is not None else None,
    )


def overruns(budget: Budget, figures: Mapping[str, int], gpu: str | None) -> list[Overrun]:
    """Return the limits of ``budget`` that ``figures`` do not keep.

    A limit on a phase that did not run is not kept: nothing was checked.
    """
    found = []
    for limit in _limits(budget, gpu):
        value = figures.get(limit.figure)
        if value is None and limit.figure == "reserved_peak":
            value = figures.get("peak")
        if value is None or value > limit.nbytes:
            found.append(Overrun(limit, value))
    return found


def limits_of(budget: Budget, gpu: str | None) -> dict[str, int]:
    """Return the limits by figure, that of the GPU's memory among them."""
    return {limit.figure: limit.nbytes for limit in _limits(budget, gpu)}


def _limits(budget: Budget, gpu: str | None) -> tuple[Limit, ...]:
    if budget.limits or budget.gpu is None or gpu is None:
        return budget.limits
    from pytest_torchmem.targets.gpus import find_gpu

    found = find_gpu(gpu)
    room = found.memory - found.context
    return (Limit("reserved_peak", room, f"what {gpu} has for tensors, {format_size(room)}"),)


def headroom(gpu: str, figures: Mapping[str, int]) -> int:
    """Return the bytes that ``gpu`` has left when most is reserved."""
    from pytest_torchmem.targets.gpus import find_gpu

    found = find_gpu(gpu)
    most = figures.get("reserved_peak", figures.get("peak", 0))
    return found.memory - found.context - most


def _arguments(mark: pytest.Mark) -> dict[str, Any]:
    try:
        return memory_budget(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise UsageError(f"the marker cannot be read: {error}. It is {SIGNATURE}") from None


def _size(name: str, value: Any) -> int:
    try:
        return parse_size(value)
    except UsageError as error:
        raise UsageError(f"{MARKER}({name}=): {error}") from None


def _gpu(name: Any) -> str | None:
    if name is None:
        return None
    from pytest_torchmem.targets.gpus import find_gpu

    return find_gpu(name).name
