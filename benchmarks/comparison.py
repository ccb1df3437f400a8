"""One step traced and measured: what differs, and the table that sums up many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from tabulate import tabulate

import pytest_torchmem as torchmem
from pytest_torchmem import MemoryProfile
from pytest_torchmem.figures import HOST

CLOSE = 64
"""Bytes by which a peak may differ and still count as close: one allocation of a few scalars."""

PHASES = ("forward", "backward", "optimizer")


def of_device(profile: MemoryProfile) -> dict[str, int]:
    """Return the figures that a measurement has, too: not that of the host's memory."""
    return {name: nbytes for name, nbytes in profile.figures().items() if name != HOST}


class Status(str, Enum):
    """How a trace compares with the measurement of the same step."""

    EXACT = "exact"
    CLOSE = "within 64 bytes"
    DIFFERENT = "different"
    NOT_JUDGED = "not judged"
    """Something that the stand-in for a GPU cannot tell decides what was measured."""
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"
    SKIPPED = "skipped"
    """The real step itself failed, so there is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step's figures by both ways; ``error`` says why there are none."""

    case: str
    status: Status
    traced: dict[str, int] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    detail: str = ""
    causes: tuple[str, ...] = ()
    """What is alive at the peak by one way only, as ``describe_causes`` has it."""

    def difference(self, phase: str) -> int | None:
        """Return traced minus measured bytes of a phase's peak, ``None`` where it did not run."""
        name = f"{phase}_peak"
        neither = name not in self.traced and name not in self.measured
        if neither or not self.traced or not self.measured:
            return None
        return self.traced.get(name, 0) - self.measured.get(name, 0)

    def relative(self, phase: str) -> float | None:
        """Return the difference as a share of the measured peak."""
        difference = self.difference(phase)
        if difference is None:
            return None
        return difference / max(1, self.measured.get(f"{phase}_peak", 0))

    def as_json(self) -> dict[str, Any]:
        """Return plain types for a JSON file."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Comparison:
        """Return the comparison that ``as_json`` wrote."""
        values = {"status": Status(record["status"]), "causes": tuple(record["causes"])}
        return cls(**{**record, **values})


def compare(
    case: str,
    target: Any,
    *args: Any,
    detail: str = "",
    announce: Callable[[], None] | None = None,
    **options: Any,
) -> Comparison:
    """Measure and trace one step, and compare the peaks of its phases.

    ``announce`` is called between the two, so that a crash can be told from one of torch's own.
    """
    try:
        measured = torchmem.measure(target, *args, **options)
    except Exception as error:
        return Comparison(case, Status.SKIPPED, error=describe(error), detail=detail)
    if announce is not None:
        announce()
    try:
        traced = torchmem.trace(target, *args, device="cpu", host="here", **options)
    except Exception as error:
        figures, reason = measured.figures(), describe(error)
        return Comparison(case, Status.UNSUPPORTED, {}, figures, error=reason, detail=detail)
    return judge(case, traced, measured, detail)


def judge(
    case: str, traced: MemoryProfile, measured: MemoryProfile, detail: str = ""
) -> Comparison:
    """Compare two profiles of one step."""
    found = Comparison(case, Status.EXACT, of_device(traced), measured.figures(), detail=detail)
    differences = {phase: abs(found.difference(phase) or 0) for phase in PHASES}
    worst = max(differences, key=lambda phase: differences[phase])
    if not differences[worst]:
        return found
    status = Status.CLOSE if differences[worst] <= CLOSE else Status.DIFFERENT
    causes = describe_causes(traced, measured, worst)
    return replace(found, status=status, causes=causes)


def describe_causes(
    traced: MemoryProfile, measured: MemoryProfile, phase: str, most: int = 6
) -> tuple[str, ...]:
    """Return what is alive at a phase's peak only for real (-) or only in the trace (+).

    Allocations are matched by their size alone, the rest is named by the operators it came from.
    """
    real, thought = measured.live_at_peak(phase), traced.live_at_peak(phase)
    missing = Counter(a.nbytes for a in real) - Counter(a.nbytes for a in thought)
    extra = Counter(a.nbytes for a in thought) - Counter(a.nbytes for a in real)
    found = []
    for sign, sizes, allocations in (("-", missing, real), ("+", extra, thought)):
        for allocation in reversed(allocations):
            if sizes[allocation.nbytes] > 0:
                sizes[allocation.nbytes] -= 1
                operators = allocation.origin.operator
                if sign == "-":
                    operators = allocation.label or operators
                found.append(f"{phase} {sign}{allocation.nbytes} {operators}")
    return tuple(found[:most])


def describe(error: BaseException) -> str:
    """Return an error's type and the first lines of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:400]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    rank = max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)
    return ordered[min(rank, len(ordered) - 1)]


def error_table(comparisons: Iterable[Comparison]) -> str:
    """Return one line per figure: how many are exact, and the distribution of relative errors."""
    found = [c for c in comparisons if c.status in (Status.EXACT, Status.CLOSE, Status.DIFFERENT)]
    rows = []
    for figure in (*(f"{phase}_peak" for phase in PHASES), "baseline", "retained", "end"):
        errors = [
            abs(c.traced.get(figure, 0) - c.measured.get(figure, 0)) / max(1, c.measured[figure])
            for c in found
            if figure in c.measured
        ]
        if not errors:
            continue
        exact = sum(1 for error in errors if error == 0)
        rows.append(
            (
                figure.replace("_", " "),
                len(errors),
                f"{exact} ({exact / len(errors):.1%})",
                f"{percentile(errors, 0.50):.4%}",
                f"{percentile(errors, 0.95):.4%}",
                f"{max(errors):.4%}",
            )
        )
    headers = ("figure", "steps", "to the byte", "p50 error", "p95 error", "max error")
    return tabulate(rows, headers=headers)
