"""Calibration files on disk: reading them, and what an update makes of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_torchmem.errors import UsageError
from pytest_torchmem.snapshots.calibration_format import dump, load
from pytest_torchmem.snapshots.store import (
    load_sides,
    locked,
    read_text,
    remove,
    would_change,
    write,
)
from pytest_torchmem.targets.calibration import Calibration, Figure, Figures, Question, Setup

WorkspacePlace = tuple[Setup, Question]
"""A figure by where it was measured and what it is of."""


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """What a file holds. In a merge conflict, ``contested`` is where its sides differ."""

    path: Path
    figures: Figures = field(default_factory=dict)
    exists: bool = False
    text: str = ""
    contested: frozenset[WorkspacePlace] = frozenset()
    conflicted: bool = False

    @property
    def conflict_message(self) -> str:
        """What to tell people about a merge conflict."""
        return (
            f"{self.path} has an unresolved merge conflict. Nothing has to be merged by hand: "
            "pytest --torchmem-update on a machine with the GPU measures what its sides differ in "
            "and writes the file anew; without one, take either side"
        )


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """A calibration file before and after; ``problem`` says why it cannot be written at all."""

    stored: StoredCalibration
    text: str | None
    """The new text; ``None`` where no figure is left."""
    figures: Figures = field(default_factory=dict)
    added: tuple[WorkspacePlace, ...] = ()
    changed: tuple[WorkspacePlace, ...] = ()
    removed: tuple[WorkspacePlace, ...] = ()
    problem: str = ""

    @property
    def changes_file(self) -> bool:
        """Whether there is anything to write."""
        return not self.problem and would_change(self.text, self.stored.exists, self.stored.text)


def read_calibration_file(path: Path) -> StoredCalibration:
    """Return what the file at ``path`` holds, nothing if there is none.

    Raises ``SnapshotError`` for a file that cannot be read or understood. A merge conflict is no
    error where both sides are whole: what they agree on are the figures.
    """
    text = read_text(path)
    if text is None:
        return StoredCalibration(path)
    loaded = load_sides(path, text, load)
    if len(loaded) == 1:
        return StoredCalibration(path, loaded[0], exists=True, text=text)
    ours, theirs = (dict(_flat(side)) for side in loaded)
    contested = frozenset(key for key in ours if theirs.get(key, ours[key]) != ours[key])
    agreed = {key: figure for key, figure in {**theirs, **ours}.items() if key not in contested}
    return StoredCalibration(path, _nested(agreed), True, text, contested, conflicted=True)


def read_calibration(path: str | Path) -> Calibration:
    """Return the calibration in a file that an update or ``write_calibration`` wrote.

    Raises ``UsageError`` where there is none, or where it cannot be used.
    """
    stored = read_calibration_file(Path(path))
    if not stored.exists:
        raise UsageError(f"{path}: there is no such calibration file")
    if stored.conflicted:
        raise UsageError(stored.conflict_message)
    return Calibration(stored.figures)


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write figures into a file, in the place of those it has for the same setup and question.

    Raises ``SnapshotError`` for a file that cannot be read, and leaves it as it is.
    """
    path = Path(path)
    with locked(path):
        stored = read_calibration_file(path)
        if stored.conflicted:
            raise UsageError(stored.conflict_message)
        merged = {**dict(_flat(stored.figures)), **dict(_flat(calibration.figures))}
        write(path, dump(_nested(merged)))


def plan_calibration(
    stored: StoredCalibration,
    measured: Figures,
    *,
    new: bool = True,
    changed: bool = True,
    by_series: bool = False,
    obsolete: Mapping[str, Collection[Question]] | None = None,
) -> CalibrationPlan:
    """Return what the figures that were ``measured`` make of a file.

    A figure takes the place of the one that the same GPU has for the same question, whatever the
    version of cuDNN, and without ``by_series`` also of torch; where both have the same bytes the
    old one stays. ``new`` and ``changed`` tell which of these may be written. What GPUs in
    ``obsolete`` have of questions that are not those named there is removed.
    """
    figures = dict(_flat(stored.figures))
    contested = set(stored.contested)
    added: list[WorkspacePlace] = []
    replaced: list[WorkspacePlace] = []
    removed: list[WorkspacePlace] = []

    def same_place(one: WorkspacePlace, other: WorkspacePlace) -> bool:
        series = not by_series or one[0].torch == other[0].torch
        return one[1] == other[1] and one[0].gpu == other[0].gpu and series

    for key, figure in sorted(_flat(measured), key=lambda item: item[0]):
        before = [old for old in (*figures, *contested) if same_place(old, key)]
        if any(figures.get(old) == figure for old in before):
            continue
        if not (changed if before else new):
            continue
        for old in before:
            figures.pop(old, None)
            contested.discard(old)
        figures[key] = figure
        (replaced if before else added).append(key)
    for setup, question in [*figures]:
        asked = None if obsolete is None else obsolete.get(setup.gpu)
        if asked is not None and question not in asked:
            del figures[setup, question]
            removed.append((setup, question))
    if contested:
        first = min(contested)
        problem = (
            f"{stored.path} was left as it is: the sides of its merge conflict differ in what "
            f"{first[1].operator} takes on {first[0]}, which was not measured. Run pytest "
            "--torchmem-update on a machine with that GPU, or take either side"
        )
        return CalibrationPlan(stored, None, _nested(figures), problem=problem)
    after = _nested(figures)
    return CalibrationPlan(
        stored,
        dump(after) if figures else None,
        after,
        tuple(added),
        tuple(replaced),
        tuple(sorted(removed)),
    )


def apply_plan(plan: CalibrationPlan) -> None:
    """Write a file as planned; raises ``OSError`` where it cannot be."""
    if plan.changes_file:
        if plan.text is None:
            remove(plan.stored.path)
        else:
            write(plan.stored.path, plan.text)


def merged(parts: Iterable[Figures]) -> dict[Setup, dict[Question, Figure]]:
    """Return figures that several processes measured as one: of two the larger."""
    found: dict[Setup, dict[Question, Figure]] = {}
    for part in parts:
        for (setup, question), figure in _flat(part):
            of_setup = found.setdefault(setup, {})
            before = of_setup.get(question)
            of_setup[question] = figure if before is None else figure.largest(before)
    return found


def place_name(place: WorkspacePlace) -> str:
    """Return what a figure is of, in one line."""
    setup, question = place
    return f"{setup}: {question.operator}({question.geometry})"


def _flat(figures: Figures) -> Iterator[tuple[WorkspacePlace, Figure]]:
    for setup, found in figures.items():
        for question, figure in found.items():
            yield (setup, question), figure


def _nested(flat: Mapping[WorkspacePlace, Figure]) -> dict[Setup, dict[Question, Figure]]:
    figures: dict[Setup, dict[Question, Figure]] = {}
    for (setup, question), figure in flat.items():
        figures.setdefault(setup, {})[question] = figure
    return figures
