"""Calibration files: their format, and reading and updating them on disk.

One object for each setup (GPU, series of torch, version of cuDNN, source), in it one line for each
figure, sorted by operator and geometry, with sizes readable beside the exact bytes. The file is
written by machines alone: whatever is not known is an error.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.snapshots import files
from pytest_torchmem.snapshots.store import FilePlan, Stored, read_stored, refused
from pytest_torchmem.targets import gpus

SCHEMA = 1
KIND = "pytest-torchmem calibration"
_TABLES = ("workspaces", "reserves")
_TEXTS = ("gpu", "torch", "cudnn", "source")


def dump(figures: gpus.Figures) -> str:
    """Return the text of a file; equal figures give equal text."""
    blocks = [_plain(setup, figures[setup]) for setup in sorted(figures)]
    return files.dump_file({"kind": KIND, "schema": SCHEMA}, "setups", blocks)


def load(text: str) -> gpus.FigureTable:
    """Return what a file's ``text`` holds; raises ``SnapshotError`` that says what is wrong."""
    data = files.parse_file(text, "calibration", SCHEMA, "setups")
    if data.get("kind") != KIND:
        raise SnapshotError(f'is not a calibration: its "kind" is not {files.text_of(KIND)}')
    _refuse_others(data, ("kind", "schema", "setups"), "the file")
    figures: gpus.FigureTable = {}
    for number, plain in enumerate(data["setups"], start=1):
        setup, found = _setup(plain, f"setup {number}")
        if setup in figures:
            raise SnapshotError(f"has the setup {setup} twice. Remove one of them")
        figures[setup] = found
    return figures


def _plain(
    setup: gpus.Setup, figures: Mapping[gpus.WorkspaceKey, gpus.WorkspaceSize]
) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(setup, name) for name in _TEXTS if getattr(setup, name)}
    for name in _TABLES:
        by_operator: dict[str, dict[str, int]] = {}
        for question in sorted(figures):
            nbytes = getattr(figures[question], name.removesuffix("s"))
            if nbytes is not None:
                by_operator.setdefault(question.operator, {})[question.geometry] = nbytes
        if by_operator:
            plain[name] = {operator: files.sized(found) for operator, found in by_operator.items()}
    return plain


def _setup(
    plain: Any, where: str
) -> tuple[gpus.Setup, dict[gpus.WorkspaceKey, gpus.WorkspaceSize]]:
    setup = gpus.Setup(**files.texts_of(plain, _TEXTS, ("gpu", "torch"), where))
    if setup.source not in ("", gpus.CUDNN):
        raise SnapshotError(
            f"{where} has the source {files.text_of(setup.source)}, which is not known"
        )
    where = f"the setup {setup}"
    _refuse_others(plain, (*_TEXTS, *_TABLES), where)
    workspaces, reserves = (_table(plain.get(name, {}), f"{where}, {name}") for name in _TABLES)
    for question in reserves:
        if question not in workspaces:
            raise SnapshotError(
                f"{where} has a reserve of {question.operator} without its workspace: "
                f"{files.text_of(question.geometry)}"
            )
    return setup, {
        question: gpus.WorkspaceSize(nbytes, reserves.get(question))
        for question, nbytes in workspaces.items()
    }


def _table(plain: Any, where: str) -> dict[gpus.WorkspaceKey, int]:
    def sizes(by_geometry: Any, where: str) -> dict[str, int]:
        return files.table_of(by_geometry, where, files.size)

    return {
        gpus.WorkspaceKey(operator, geometry): nbytes
        for operator, by_geometry in files.table_of(plain, where, sizes).items()
        for geometry, nbytes in by_geometry.items()
    }


def _refuse_others(plain: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    others = [name for name in plain if name not in known]
    if others:
        what = files.text_of(others[0])
        raise SnapshotError(f"{where} has {what}, which is not part of a calibration")


WorkspacePlace = tuple[gpus.Setup, gpus.WorkspaceKey]
"""A figure by where it was measured and what it is of."""
StoredCalibration = Stored[WorkspacePlace, gpus.WorkspaceSize]
CalibrationPlan = FilePlan[WorkspacePlace, gpus.WorkspaceSize]


def read_calibration_file(path: Path) -> StoredCalibration:
    return read_stored(path, lambda text: files.FileContents(dict(flat(load(text)))))


def read_calibration(path: str | Path) -> gpus.Calibration:
    """Return the calibration in a file that an update or ``write_calibration`` wrote.

    Raises ``UsageError`` where there is none, or where it cannot be used.
    """
    stored = read_calibration_file(Path(path))
    if not stored.exists:
        raise UsageError(f"{path}: this calibration file does not exist")
    if stored.conflicted:
        raise UsageError(stored.conflict_message)
    return gpus.Calibration(nested(stored.entries))


def write_calibration(path: str | Path, calibration: gpus.Calibration) -> None:
    """Write a calibration into a file, over what the file has for the same setups and questions.

    Raises ``SnapshotError`` for a file that cannot be read, and leaves it as it is.
    """
    path = Path(path)
    with files.locked(path):
        stored = read_calibration_file(path)
        if stored.conflicted:
            raise UsageError(stored.conflict_message)
        files.write(path, dump(nested({**stored.entries, **dict(flat(calibration.figures))})))


def plan_calibration(
    stored: StoredCalibration,
    measured: gpus.Figures,
    modes: Container[str] = ("new", "changed"),
    *,
    by_series: bool = False,
    obsolete: Mapping[str, Collection[gpus.WorkspaceKey]] | None = None,
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

    for key, figure in sorted(flat(measured), key=lambda item: item[0]):
        setup, question = key
        before = [
            old
            for old in (*figures, *contested)
            if (old[1], old[0].gpu) == (question, setup.gpu)
            and not (by_series and old[0].torch != setup.torch)
        ]
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


def merged(parts: Iterable[gpus.Figures]) -> gpus.FigureTable:
    """Return figures that several processes measured as one: of two the larger."""
    found: dict[WorkspacePlace, gpus.WorkspaceSize] = {}
    for place, figure in (item for part in parts for item in flat(part)):
        found[place] = figure.largest(found.get(place, figure))
    return nested(found)


def place_name(place: WorkspacePlace) -> str:
    """Return what a figure is of, in one line."""
    setup, question = place
    return f"{setup}: {question.operator}({question.geometry})"


def flat(figures: gpus.Figures) -> Iterator[tuple[WorkspacePlace, gpus.WorkspaceSize]]:
    for setup, found in figures.items():
        for question, figure in found.items():
            yield (setup, question), figure


def nested(flat: Mapping[WorkspacePlace, gpus.WorkspaceSize]) -> gpus.FigureTable:
    figures: gpus.FigureTable = {}
    for (setup, question), figure in flat.items():
        figures.setdefault(setup, {})[question] = figure
    return figures
