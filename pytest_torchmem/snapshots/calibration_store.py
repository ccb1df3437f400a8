"""Calibration files on disk: reading them, and what an update makes of one."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path

from pytest_torchmem.errors import UsageError
from pytest_torchmem.snapshots.calibration_format import dump, load
from pytest_torchmem.snapshots.files import locked, write
from pytest_torchmem.snapshots.plain import Contents
from pytest_torchmem.snapshots.plans import FilePlan, refused
from pytest_torchmem.snapshots.store import Stored, read_stored
from pytest_torchmem.targets.calibration import (
    Calibration,
    Figures,
    Setup,
    WorkspaceKey,
    WorkspaceSize,
)

WorkspacePlace = tuple[Setup, WorkspaceKey]
"""A figure by where it was measured and what it is of."""


StoredCalibration = Stored[WorkspacePlace, WorkspaceSize]
CalibrationPlan = FilePlan[WorkspacePlace, WorkspaceSize]


def read_calibration_file(path: Path) -> StoredCalibration:
    """Return what the calibration file at ``path`` holds; see ``read_stored``."""
    return read_stored(path, lambda text: Contents(dict(flat(load(text)))))


def read_calibration(path: str | Path) -> Calibration:
    """Return the calibration in a file that an update or ``write_calibration`` wrote.

    Raises ``UsageError`` where there is none, or where it cannot be used.
    """
    stored = read_calibration_file(Path(path))
    if not stored.exists:
        raise UsageError(f"{path}: this calibration file does not exist")
    if stored.conflicted:
        raise UsageError(stored.conflict_message)
    return Calibration(nested(stored.entries))


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write figures into a file, in the place of those it has for the same setup and question.

    Raises ``SnapshotError`` for a file that cannot be read, and leaves it as it is.
    """
    path = Path(path)
    with locked(path):
        stored = read_calibration_file(path)
        if stored.conflicted:
            raise UsageError(stored.conflict_message)
        write(path, dump(nested({**stored.entries, **dict(flat(calibration.figures))})))


def plan_calibration(
    stored: StoredCalibration,
    measured: Figures,
    modes: Container[str] = ("new", "changed"),
    *,
    by_series: bool = False,
    obsolete: Mapping[str, Collection[WorkspaceKey]] | None = None,
) -> CalibrationPlan:
    """Return what the figures that were ``measured`` make of a file.

    A figure takes the place of the one that the same GPU has for the same question, whatever the
    version of cuDNN, and without ``by_series`` also of torch; where both have the same bytes the
    old one stays. ``modes`` tells which of these may be written. What GPUs in ``obsolete`` have of
    questions that are not those named there is removed.
    """
    figures, contested = dict(stored.entries), set(stored.contested)
    added: list[WorkspacePlace] = []
    replaced: list[WorkspacePlace] = []

    def same_place(one: WorkspacePlace, other: WorkspacePlace) -> bool:
        series = not by_series or one[0].torch == other[0].torch
        return one[1] == other[1] and one[0].gpu == other[0].gpu and series

    for key, figure in sorted(flat(measured), key=lambda item: item[0]):
        before = [old for old in (*figures, *contested) if same_place(old, key)]
        # What cuDNN told is kept with the version that told it last.
        same = [key] if key[0].source else before
        known = any(figures.get(old) == figure for old in same)
        if known or ("changed" if before else "new") not in modes:
            continue
        for old in before:
            figures.pop(old, None)
            contested.discard(old)
        figures[key] = figure
        (replaced if before else added).append(key)
    asked = obsolete or {}
    removed = [key for key in figures if key[1] not in asked.get(key[0].gpu, (key[1],))]
    for key in removed:
        del figures[key]
    if contested:
        names = [f"{question.operator} on {setup}" for setup, question in sorted(contested)]
        return refused(
            stored,
            "the sides of its merge conflict differ, and nothing was measured, for",
            names,
            "Run pytest --torchmem-update on a machine with that GPU, or keep either side",
        )
    return FilePlan(
        stored,
        dump(nested(figures)) if figures else None,
        figures,
        tuple(added),
        tuple(replaced),
        tuple(sorted(removed)),
    )


def merged(parts: Iterable[Figures]) -> dict[Setup, dict[WorkspaceKey, WorkspaceSize]]:
    """Return figures that several processes measured as one: of two the larger."""
    found: dict[WorkspacePlace, WorkspaceSize] = {}
    for place, figure in (item for part in parts for item in flat(part)):
        found[place] = figure.largest(found.get(place, figure))
    return nested(found)


def place_name(place: WorkspacePlace) -> str:
    """Return what a figure is of, in one line."""
    setup, question = place
    return f"{setup}: {question.operator}({question.geometry})"


def flat(figures: Figures) -> Iterator[tuple[WorkspacePlace, WorkspaceSize]]:
    """Yield figures with their places."""
    for setup, found in figures.items():
        for question, figure in found.items():
            yield (setup, question), figure


def nested(
    flat: Mapping[WorkspacePlace, WorkspaceSize],
) -> dict[Setup, dict[WorkspaceKey, WorkspaceSize]]:
    """Return figures by setup and question."""
    figures: dict[Setup, dict[WorkspaceKey, WorkspaceSize]] = {}
    for (setup, question), figure in flat.items():
        figures.setdefault(setup, {})[question] = figure
    return figures
