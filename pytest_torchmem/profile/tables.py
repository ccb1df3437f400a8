"""A profile as text."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tabulate import tabulate

from pytest_torchmem.printable import printable
from pytest_torchmem.profile.timeline import Allocation, Confidence
from pytest_torchmem.units import format_size


def describe(allocation: Allocation) -> str:
    """Return what an allocation is in a few words: its label or module, and its geometry."""
    name = allocation.label or allocation.origin.module
    geometry = f"{allocation.dtype}{list(allocation.shape)}" if allocation.dtype else ""
    return " ".join(part for part in (name, geometry) if part)


_ALIVE = "alive at the peak"
_HOW_SURE = {
    Confidence.EXACT: "computed",
    Confidence.CALIBRATED: "measured",
    Confidence.LIBRARY: "told by cuDNN",
    Confidence.BOUNDED: "at most",
    Confidence.UNKNOWN: "at least",
}


def describe_kind(allocation: Allocation) -> str:
    """Return what an allocation is to the step, and how sure its bytes are if they are not."""
    kind, confidence = allocation.kind.value, allocation.confidence
    return kind if confidence is Confidence.EXACT else f"{kind}, {_HOW_SURE[confidence]}"


def figures_table(device: str, figures: Mapping[str, int]) -> str:
    """Return the figures by name, for people and exactly."""
    rows = [
        (name.replace("_", " "), format_size(size), f"{size:,}") for name, size in figures.items()
    ]
    return tabulate(rows, headers=(device, "", "bytes"), colalign=("left", "right", "right"))


def allocation_rows(allocations: Iterable[Allocation]) -> list[tuple[str, ...]]:
    """Return size, kind, description, operator and source line of each allocation."""
    return [
        (
            format_size(a.nbytes),
            describe_kind(a),
            *map(printable, (describe(a), a.origin.operator, a.origin.line)),
        )
        for a in allocations
    ]


def allocations_table(allocations: Iterable[Allocation]) -> str:
    """Return what was alive at a peak, a row for each allocation.

    Where that is wider than the terminal, who made it stands in a line below what it is.
    """
    rows = allocation_rows(allocations)
    text = tabulate(
        rows,
        headers=(_ALIVE, "kind", "what", "operator", "line"),
        colalign=("right", "left", "left", "left", "left"),
    )
    columns = shutil.get_terminal_size((80, 24)).columns
    if all(len(line) <= columns for line in text.splitlines()):
        return text
    lines = []
    for size, kind, what, operator, line in rows:
        lines.append((size, ", ".join(filter(None, (kind, what)))))
        lines.append(("", ", ".join(filter(None, (operator, line)))))
    return tabulate(
        [line for line in lines if line[1]], headers=(_ALIVE, ""), colalign=("right", "left")
    )


def workspace_lines(by_confidence: Mapping[str, int], unknown: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on how sure the workspace of kernels is, where there is any."""
    parts = [
        f"{format_size(size)} {_HOW_SURE[Confidence(name)]}" for name, size in by_confidence.items()
    ]
    texts = [", ".join(parts)] if parts else []
    if unknown:
        texts.append(f"unknown for {', '.join(unknown)}")
    if texts:
        yield f"kernel workspace at the peak: {'; '.join(texts)}"
