"""Where a comparison's entries come from: a JSON report, snapshot files, or a git revision."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_torchmem.checks.findings import Outcome
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.reports.json_report import KIND, SCHEMA
from pytest_torchmem.snapshots.alive_format import read_alive, read_facts
from pytest_torchmem.snapshots.format import Entry, Key, load
from pytest_torchmem.snapshots.location import DIRECTORY, is_calibration, is_proposal, is_snapshot
from pytest_torchmem.snapshots.plain import parse, size, table_of, texts_of
from pytest_torchmem.snapshots.store import read

_KEY = ("test", "name", "device", "gpu", "torch_series")
_TEXTS = (*_KEY, "nodeid", "outcome", "torch", "workload", "message")


@dataclass(frozen=True, slots=True)
class Source:
    """One side of a comparison."""

    name: str
    entries: dict[tuple[str, Key], Entry] = field(default_factory=dict)
    unchecked: dict[tuple[str, Key], str] = field(default_factory=dict)
    """Checks of a report that could not be evaluated, with the reason."""


def load_source(text: str | None, directory: Path) -> Source:
    """Return the entries that ``text`` names: a file, a directory or a git revision.

    ``None`` is the working tree. Raises ``UsageError`` where it is none of these.
    """
    if text is not None and not text.strip():
        raise UsageError(
            "an empty name is neither a file nor a revision. Is a variable not set? For the "
            "working tree, leave HEAD out"
        )
    if text is None:
        root = Path(git(directory, "rev-parse", "--show-toplevel").strip())
        return Source("the working tree", _tree(root))
    path = directory / text
    if path.is_dir():
        return Source(text, _tree(path))
    if path.is_file():
        return _file(text, path)
    try:
        git(directory, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}")
    except UsageError:
        raise UsageError(
            f"{text!r} is not a file, a directory or a git revision of this repository"
        ) from None
    return Source(text, _revision(text, directory))


def module_of(file: PurePosixPath) -> str:
    """Return the test module of a snapshot file: "tests/test_net.py"."""
    name = file.stem if "." in file.stem else f"{file.stem}.py"
    folder = file.parent.parent
    return str(folder / name)


def _file(name: str, path: Path) -> Source:
    try:
        data = parse(path.read_bytes().decode("utf-8"))
    except (ValueError, SnapshotError):
        data = None
    if isinstance(data, dict) and data.get("kind") == KIND:
        return _report(name, data)
    from pytest_torchmem.profile.profile import SAVED

    if isinstance(data, dict) and data.get("kind") == SAVED:
        raise UsageError(
            f"{name} is a saved profile, and no check: torchmem explain BASE HEAD compares profiles"
        )
    file = PurePosixPath(path.resolve().as_posix())
    if is_calibration(file):
        raise UsageError(f"{name} is a calibration file, which has no checks to compare")
    module = PurePosixPath(module_of(file)).name
    return Source(name, _keyed(module, _entries(path)))


def _entries(path: Path) -> Mapping[Key, Entry]:
    stored = read(path)
    if stored.conflicted:
        raise SnapshotError(stored.conflict_message)
    return stored.entries


def _report(name: str, data: dict[str, Any]) -> Source:
    if data.get("schema") not in range(1, SCHEMA + 1):
        raise UsageError(
            f"{name} is a report of schema {data.get('schema')!r}, and this pytest-torchmem reads "
            f"schema {SCHEMA}"
        )
    source = Source(name)
    try:
        for check in data["checks"]:
            texts = texts_of(check, _TEXTS, (), "a check")
            named: dict[str, Any] = {name: texts[name] for name in _KEY}
            named |= {name: _number(check, name) for name in ("world_size", "rank")}
            key = Key(**named)
            where = (texts["nodeid"].removesuffix(f"::{key.test}"), key)
            if texts["outcome"] != Outcome.NOT_CHECKED.value:
                entry = Entry(
                    key,
                    texts["torch"],
                    texts["workload"],
                    table_of(check["figures"], f"{key}: figures", size),
                    alive=read_alive(alive, "alive") if (alive := check.get("alive")) else None,
                    facts=read_facts(check.get("facts", {}), "facts"),
                )
                source.entries[where] = entry
            elif check["failed"] or (key.device and not check["test_passed"]):
                source.unchecked[where] = texts["message"].partition("\n")[0] or texts["outcome"]
    except SnapshotError as error:
        raise UsageError(f"{name} is not a complete report: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{name} is not a complete report: {error!r} in its checks") from None
    return source


def _number(check: dict[str, Any], name: str) -> int:
    """Return a number of a check that older reports do not have."""
    found = check.get(name, 0)
    if not isinstance(found, int) or isinstance(found, bool):
        raise SnapshotError(f'"{name}" of a check must be a number')
    return found


def _tree(root: Path) -> dict[tuple[str, Key], Entry]:
    entries: dict[tuple[str, Key], Entry] = {}
    for path in sorted(filter(is_snapshot, root.rglob(f"{DIRECTORY}/*.json"))):
        file = PurePosixPath(path.relative_to(root).as_posix())
        if not is_proposal(file):
            entries.update(_keyed(module_of(file), _entries(path)))
    return entries


def _revision(revision: str, directory: Path) -> dict[tuple[str, Key], Entry]:
    listed = git(directory, "ls-tree", "-r", "-z", "--full-tree", "--name-only", revision)
    entries: dict[tuple[str, Key], Entry] = {}
    for name in listed.split("\0"):
        file = PurePosixPath(name)
        if not is_snapshot(file) or is_proposal(file):
            continue
        try:
            snapshot = load(git(directory, "show", f"{revision}:{name}"))
        except SnapshotError as error:
            raise SnapshotError(f"{name} in {revision} {error}") from None
        entries.update(_keyed(module_of(file), snapshot.entries))
    return entries


def _keyed(module: str, entries: Mapping[Key, Entry]) -> dict[tuple[str, Key], Entry]:
    return {(module, key): entry for key, entry in entries.items()}


def git(directory: Path, *arguments: str) -> str:
    """Return what git prints; raises ``UsageError`` where it fails or is not there."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UsageError("git is not installed, so revisions cannot be compared") from None
    if result.returncode:
        message = result.stderr.decode("utf-8", "replace").strip() or "git failed"
        raise UsageError(f"git {arguments[0]}: {message}")
    return result.stdout.decode("utf-8", "surrogateescape")
