"""The format of a calibration file: figures to text and back.

One object for each setup (GPU, series of torch, version of cuDNN), in it one line for each figure,
sorted by operator and geometry, with sizes readable beside the exact bytes. The file is written by
machines alone: whatever is not known is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.snapshots.plain import block, kind_of, parse, size, sized, text_of
from pytest_torchmem.targets.calibration import Figure, Figures, Question, Setup

SCHEMA = 1
KIND = "pytest-torchmem calibration"
_TABLES = ("workspaces", "reserves")
_TEXTS = ("gpu", "torch", "cudnn")


def dump(figures: Figures) -> str:
    """Return the text of a file; equal figures give equal text."""
    blocks = [block(_plain(setup, figures[setup]), "    ") for setup in sorted(figures)]
    head = [f'  "kind": {text_of(KIND)},', f'  "schema": {SCHEMA},']
    body = '  "setups": [' + ("\n" + ",\n".join(blocks) + "\n  ]" if blocks else "]")
    return "\n".join(["{", *head, body, "}", ""])


def load(text: str) -> dict[Setup, dict[Question, Figure]]:
    """Return what a file's ``text`` holds; raises ``SnapshotError`` that says what is wrong."""
    data = parse(text)
    if not isinstance(data, dict):
        raise SnapshotError(f"is not a calibration: expected an object, found {kind_of(data)}")
    if data.get("kind") != KIND:
        raise SnapshotError(f'is not a calibration: its "kind" is not {text_of(KIND)}')
    schema = data.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise SnapshotError('is not a calibration: it has no "schema" number')
    if schema > SCHEMA:
        raise SnapshotError(
            f"was written by a newer pytest-torchmem (schema {schema}; this one reads {SCHEMA}). "
            "Upgrade pytest-torchmem"
        )
    _refuse_others(data, ("kind", "schema", "setups"), "the file")
    listed = data.get("setups")
    if not isinstance(listed, list):
        raise SnapshotError('is not a calibration: it has no list "setups"')
    figures: dict[Setup, dict[Question, Figure]] = {}
    for number, plain in enumerate(listed, start=1):
        setup, found = _setup(plain, f"setup {number}")
        if setup in figures:
            raise SnapshotError(f"holds the setup {setup} twice. Remove one of them")
        figures[setup] = found
    return figures


def _plain(setup: Setup, figures: Mapping[Question, Figure]) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(setup, name) for name in _TEXTS if getattr(setup, name)}
    sizes = {
        "workspaces": {question: figure.workspace for question, figure in figures.items()},
        "reserves": {
            question: figure.reserve
            for question, figure in figures.items()
            if figure.reserve is not None
        },
    }
    for name, table in sizes.items():
        by_operator: dict[str, dict[str, int]] = {}
        for question in sorted(table):
            by_operator.setdefault(question.operator, {})[question.geometry] = table[question]
        if by_operator:
            plain[name] = {operator: sized(found) for operator, found in by_operator.items()}
    return plain


def _setup(plain: Any, where: str) -> tuple[Setup, dict[Question, Figure]]:
    if not isinstance(plain, dict):
        raise SnapshotError(f"{where} is {kind_of(plain)}, not an object")
    texts = {name: plain.get(name, "") for name in _TEXTS}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise SnapshotError(f'{where}: "{name}" is {kind_of(value)}, not a text')
    for name in ("gpu", "torch"):
        if not texts[name]:
            raise SnapshotError(f'{where} has no "{name}"')
    setup = Setup(**texts)
    where = f"the setup {setup}"
    _refuse_others(plain, (*_TEXTS, *_TABLES), where)
    tables = {name: _table(plain.get(name, {}), f"{where}, {name}") for name in _TABLES}
    workspaces, reserves = tables["workspaces"], tables["reserves"]
    for question in reserves:
        if question not in workspaces:
            raise SnapshotError(
                f"{where} has a reserve of {question.operator} without its workspace: "
                f"{text_of(question.geometry)}"
            )
    return setup, {
        question: Figure(nbytes, reserves.get(question)) for question, nbytes in workspaces.items()
    }


def _table(plain: Any, where: str) -> dict[Question, int]:
    if not isinstance(plain, dict):
        raise SnapshotError(f"{where}: expected an object, found {kind_of(plain)}")
    found: dict[Question, int] = {}
    for operator, by_geometry in plain.items():
        if not isinstance(by_geometry, dict):
            raise SnapshotError(f'{where}: "{operator}" is {kind_of(by_geometry)}, not an object')
        for geometry, value in by_geometry.items():
            nbytes = size(value, f"{where}, {operator}: {text_of(geometry)}")
            found[Question(operator, geometry)] = nbytes
    return found


def _refuse_others(plain: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    others = [name for name in plain if name not in known]
    if others:
        raise SnapshotError(f"{where} has {text_of(others[0])}, which no calibration has")
