"""A profile as text."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tabulate import tabulate

from pytest_torchmem.printable import printable
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.timeline import Allocation, Confidence
from pytest_torchmem.units import format_size

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
    named = ((name.replace("_", " "), size) for name, size in figures.items())
    rows = [(name, format_size(size), f"{size:,}") for name, size in named]
    return tabulate(rows, headers=(device, "", "bytes"), colalign=("left", "right", "right"))


class AllocationGroup(NamedTuple):
    """Allocations of one size and kind that the same line makes in modules of one pattern."""

    number: int
    nbytes: int
    """Of all of them."""
    first: Allocation


def alike(allocations: Iterable[Allocation]) -> list[AllocationGroup]:
    """Return allocations in groups, the largest first: the layers of a model are one."""
    groups: dict[tuple[object, ...], list[Allocation]] = {}
    for one in allocations:
        where, what = one.origin, (one.nbytes, one.kind, one.confidence, one.dtype, one.shape)
        paths = fold(one.label)[0], fold(where.module)[0]
        groups.setdefault((*what, *paths, where.operator, where.line), []).append(one)
    found = [
        AllocationGroup(len(of), sum(one.nbytes for one in of), of[0]) for of in groups.values()
    ]
    return sorted(found, key=lambda group: -group.nbytes)


def allocation_rows(groups: Iterable[AllocationGroup]) -> list[tuple[str, ...]]:
    """Return size, kind, description, operator and source line of each group."""
    return [
        (
            format_size(group.nbytes),
            describe_kind(group.first),
            *map(printable, (describe_group(group), origin.operator, origin.line)),
        )
        for group in groups
        for origin in (group.first.origin,)
    ]


def describe_group(group: AllocationGroup) -> str:
    """Return what the allocations of a group are in a few words, and how many if several: their
    label or module, and their geometry.
    """
    one = group.first
    name, many = one.label or one.origin.module, ""
    if group.number > 1:
        name, many = fold(name)[0], f"{group.number} × "
    return many + " ".join(part for part in (name, one.tensor) if part)


def allocations_table(groups: Iterable[AllocationGroup], heading: str = "alive at the peak") -> str:
    """Return what was alive, at a peak or as ``heading`` says, a row for each group.

    Where that is wider than the terminal, who made it stands in a line below what it is.
    """
    rows = allocation_rows(groups)
    text = tabulate(
        rows,
        headers=(heading, "kind", "what", "operator", "line"),
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
        [line for line in lines if line[1]], headers=(heading, ""), colalign=("right", "left")
    )


def workspace_lines(by_confidence: Mapping[str, int], unknown: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on how sure the workspace of kernels is, where there is any."""
    sizes = by_confidence.items()
    parts = [f"{format_size(size)} {_HOW_SURE[Confidence(name)]}" for name, size in sizes]
    texts = [", ".join(parts)] if parts else []
    if unknown:
        texts.append(f"unknown for {', '.join(unknown)}")
    if texts:
        yield f"kernel workspace at the peak: {'; '.join(texts)}"
