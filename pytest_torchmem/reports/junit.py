"""A check's figures as properties of the test, which JUnit files show and xdist carries along."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_torchmem.checks.result import Record

PREFIX = "torchmem."


def properties(record: Record) -> list[tuple[str, object]]:
    """Return the properties of one check: ``torchmem.<name>.<device>.<figure>``, in bytes."""
    parts = [part for part in (record.key.name, record.key.device) if part]
    stem = PREFIX + "".join(f"{part}." for part in parts)
    found: list[tuple[str, object]] = [(f"{stem}outcome", record.outcome.value)]
    if record.key.gpu:
        found.append((f"{stem}gpu", record.key.gpu))
    found += [(f"{stem}{figure}", nbytes) for figure, nbytes in record.figures.items()]
    found += [
        (f"{stem}{change.figure}.snapshot", change.before)
        for change in record.changes
        if change.before is not None
    ]
    if record.measurement is not None:
        figures = record.measurement.figures.items()
        found += [(f"{stem}{figure}.measured", nbytes) for figure, nbytes in figures]
    found += [(f"{stem}{figure}.limit", nbytes) for figure, nbytes in record.limits.items()]
    operators = {
        "calibrated_workspaces": record.calibrated_workspaces,
        "unknown_workspaces": record.unknown_workspaces,
    }
    found += [(f"{stem}{name}", ", ".join(named)) for name, named in operators.items() if named]
    return found


def without_ours(properties: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return a test's properties without those of an earlier attempt's checks."""
    return [(name, value) for name, value in properties if not name.startswith(PREFIX)]
