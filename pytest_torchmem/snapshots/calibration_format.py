"""The format of a calibration file: figures to text and back.

One object for each setup (GPU, series of torch, version of cuDNN, source), in it one line for each
figure, sorted by operator and geometry, with sizes readable beside the exact bytes. The file is
written by machines alone: whatever is not known is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.snapshots.plain import (
    dump_file,
    parse_file,
    size,
    sized,
    table_of,
    text_of,
    texts_of,
)
from pytest_torchmem.targets.calibration import CUDNN, Figures, Setup, WorkspaceKey, WorkspaceSize

SCHEMA = 1
KIND = "pytest-torchmem calibration"
_TABLES = ("workspaces", "reserves")
_TEXTS = ("gpu", "torch", "cudnn", "source")


def dump(figures: Figures) -> str:
    """Return the text of a file; equal figures give equal text."""
    blocks = [_plain(setup, figures[setup]) for setup in sorted(figures)]
    return dump_file({"kind": KIND, "schema": SCHEMA}, "setups", blocks)


def load(text: str) -> dict[Setup, dict[WorkspaceKey, WorkspaceSize]]:
    """Return what a file's ``text`` holds; raises ``SnapshotError`` that says what is wrong."""
    data = parse_file(text, "calibration", SCHEMA, "setups")
    if data.get("kind") != KIND:
        raise SnapshotError(f'is not a calibration: its "kind" is not {text_of(KIND)}')
    _refuse_others(data, ("kind", "schema", "setups"), "the file")
    figures: dict[Setup, dict[WorkspaceKey, WorkspaceSize]] = {}
    for number, plain in enumerate(data["setups"], start=1):
        setup, found = _setup(plain, f"setup {number}")
        if setup in figures:
            raise SnapshotError(f"has the setup {setup} twice. Remove one of them")
        figures[setup] = found
    return figures


def _plain(setup: Setup, figures: Mapping[WorkspaceKey, WorkspaceSize]) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(setup, name) for name in _TEXTS if getattr(setup, name)}
    for name in _TABLES:
        by_operator: dict[str, dict[str, int]] = {}
        for question in sorted(figures):
            nbytes = getattr(figures[question], name.removesuffix("s"))
            if nbytes is not None:
                by_operator.setdefault(question.operator, {})[question.geometry] = nbytes
        if by_operator:
            plain[name] = {operator: sized(found) for operator, found in by_operator.items()}
    return plain


def _setup(plain: Any, where: str) -> tuple[Setup, dict[WorkspaceKey, WorkspaceSize]]:
    setup = Setup(**texts_of(plain, _TEXTS, ("gpu", "torch"), where))
    if setup.source not in ("", CUDNN):
        raise SnapshotError(f"{where} has the source {text_of(setup.source)}, which is not known")
    where = f"the setup {setup}"
    _refuse_others(plain, (*_TEXTS, *_TABLES), where)
    workspaces, reserves = (_table(plain.get(name, {}), f"{where}, {name}") for name in _TABLES)
    for question in reserves:
        if question not in workspaces:
            raise SnapshotError(
                f"{where} has a reserve of {question.operator} without its workspace: "
                f"{text_of(question.geometry)}"
            )
    return setup, {
        question: WorkspaceSize(nbytes, reserves.get(question))
        for question, nbytes in workspaces.items()
    }


def _table(plain: Any, where: str) -> dict[WorkspaceKey, int]:
    def sizes(by_geometry: Any, where: str) -> dict[str, int]:
        return table_of(by_geometry, where, size)

    return {
        WorkspaceKey(operator, geometry): nbytes
        for operator, by_geometry in table_of(plain, where, sizes).items()
        for geometry, nbytes in by_geometry.items()
    }


def _refuse_others(plain: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    others = [name for name in plain if name not in known]
    if others:
        raise SnapshotError(f"{where} has {text_of(others[0])}, which is not part of a calibration")
