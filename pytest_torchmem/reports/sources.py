"""Where a comparison's entries come from: a JSON report, snapshot files, or a git revision."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_torchmem.checks.result import Outcome
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.reports.files import KIND, SCHEMA
from pytest_torchmem.snapshots import format, store
from pytest_torchmem.snapshots.files import git, parse, size, table_of, texts_of
from pytest_torchmem.snapshots.location import DIRECTORY, is_calibration, is_proposal, is_snapshot

Entries = dict[tuple[str, format.Key], format.Entry]
"""Entries by test module and key."""
_TEXTS = (*format.IDENTITY, "nodeid", "outcome", "torch", "workload", "message")


@dataclass(frozen=True, slots=True)
class Source:
    """One side of a comparison."""

    name: str
    entries: Entries = field(default_factory=dict)
    unchecked: dict[tuple[str, format.Key], str] = field(default_factory=dict)
    """Checks of a report that could not be evaluated, with the reason."""
    revision: bool = False
    """Whether it is a revision, whose files are named from the repository's root."""
    path: Path | None = None
    """The file or directory with snapshots that it is, whose test modules are named from there."""


def load_sources(base: str | None, head: str | None, directory: Path) -> tuple[Source, Source]:
    """Return both sides of a comparison, with their test modules named from the same place.

    Raises ``UsageError`` where a side is none of what ``load_source`` reads, or where a file or a
    directory has no check in common with the other side.
    """
    before, now = aligned(load_source(base, directory), load_source(head, directory), directory)
    named = before.path is not None or now.path is not None
    if named and before.entries and now.entries and before.entries.keys().isdisjoint(now.entries):
        raise UsageError(
            f"{before.name} and {now.name} have no check in common: {_example(before)} on one "
            f"side, {_example(now)} on the other. Name the directory that the paths of both begin "
            "in"
        )
    return before, now


def aligned(one: Source, other: Source, directory: Path) -> tuple[Source, Source]:
    """Return both; of a revision the part that a path of its repository stands for, with the path's
    checks by the names of that.
    """
    if other.revision and one.path is not None:
        return aligned(other, one, directory)[::-1]
    if not one.revision or other.path is None:
        return one, other
    root = Path(git(directory, "rev-parse", "--show-toplevel").strip()).resolve()
    if not other.path.is_relative_to(root):
        return one, other
    within = PurePosixPath(other.path.relative_to(root).as_posix())
    if other.path.is_file():
        module = module_of(within)
        entries = {(module, key): entry for (_, key), entry in other.entries.items()}
        known = {at: entry for at, entry in one.entries.items() if at[0] == module}
    else:
        folder = within.parent if within.name == DIRECTORY else within
        entries = {(str(folder / at), key): entry for (at, key), entry in other.entries.items()}
        # In a folder itself, where its snapshots are named, else below it too.
        deepest = 1 if within.name == DIRECTORY else None
        known = {
            at: entry
            for at, entry in one.entries.items()
            if folder in [*PurePosixPath(at[0]).parents][:deepest]
        }
    if not known:  # a checkout of another revision inside of this repository
        return one, other
    return replace(one, entries=known), replace(other, entries=entries)


def _example(source: Source) -> str:
    file, key = next(iter(source.entries))
    return f"{file}::{key.test}"


def load_source(text: str | None, directory: Path) -> Source:
    """Return the entries that ``text`` names: a file, a directory or a git revision.

    ``None`` is the working tree. Raises ``UsageError`` where it is none of these.
    """
    if text is None:
        root = Path(git(directory, "rev-parse", "--show-toplevel").strip())
        return Source("the working tree", _tree(root))
    path = directory / text
    if path.is_dir():
        return Source(text, _tree(path), path=path.resolve())
    if path.is_file():
        return _file(text, path)
    try:
        git(directory, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}")
    except UsageError:
        raise UsageError(
            f"{text!r} is not a file, a directory or a git revision of this repository"
        ) from None
    listed = git(directory, "ls-tree", "-r", "-z", "--full-tree", "--name-only", text)
    root = Path(git(directory, "rev-parse", "--show-toplevel").strip())
    entries: Entries = {}
    for name in listed.split("\0"):
        file = PurePosixPath(name)
        if not is_snapshot(file) or is_proposal(root / file.parent.parent, root):
            continue
        try:
            snapshot = format.load(git(directory, "show", f"{text}:{name}"))
        except SnapshotError as error:
            raise SnapshotError(f"{name} in {text} {error}") from None
        entries.update(_keyed(module_of(file), snapshot.entries))
    return Source(text, entries, revision=True)


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
    return Source(name, _keyed(module, _entries(path)), path=path.resolve())


def _entries(path: Path) -> Mapping[format.Key, format.Entry]:
    stored = store.read(path)
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
            key = format.read_key(check, texts, "a check")
            where = (texts["nodeid"].removesuffix(f"::{key.test}"), key)
            if texts["outcome"] != Outcome.NOT_CHECKED.value:
                alive, older = check.get("alive"), data["schema"] < SCHEMA
                source.entries[where] = format.Entry(
                    key,
                    texts["torch"],
                    texts["workload"],
                    table_of(check["figures"], f"{key}: figures", size),
                    alive=format.read_alive(alive, "alive") if alive else None,
                    facts=format.read_facts(check.get("facts", {}), "facts", older=older),
                    grew=format.read_told(check.get("grew", check.get("growth")), "grew"),
                )
            # Older reports do not say whether it is left out, only whether the test passed.
            elif check["failed"] or (
                key.device and not check.get("left_out", check["test_passed"])
            ):
                source.unchecked[where] = texts["message"].partition("\n")[0] or texts["outcome"]
    except SnapshotError as error:
        raise UsageError(f"{name} is not a complete report: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{name} is not a complete report: {error!r} in its checks") from None
    return source


def _tree(root: Path) -> Entries:
    entries: Entries = {}
    if root.resolve().name == DIRECTORY:  # itself, and not what it is in
        root = root.resolve().parent
        found = root.glob(f"{DIRECTORY}/*.json")
    else:
        found = root.rglob(f"{DIRECTORY}/*.json")
    for path in sorted(filter(is_snapshot, found)):
        file = PurePosixPath(path.relative_to(root).as_posix())
        if not is_proposal(path.parent.parent, root):
            entries.update(_keyed(module_of(file), _entries(path)))
    return entries


def _keyed(module: str, entries: Mapping[format.Key, format.Entry]) -> Entries:
    return {(module, key): entry for key, entry in entries.items()}
