"""Which snapshot entries and files belong to tests that are gone, as far as a run proves it."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_torchmem.checks.settings import Settings
from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.plugin.collection import is_gone
from pytest_torchmem.plugin.seen import states_of
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.snapshots.location import Links, has_module, own_path
from pytest_torchmem.snapshots.store import StoredSnapshot, read


@dataclass(slots=True)
class Gone:
    """What is gone; files are relative to the root."""

    entries: dict[str, list[Key]] = field(default_factory=dict)
    """Entries that are obsolete: their module was seen whole and passed, without their test."""
    tests: dict[str, list[Key]] = field(default_factory=dict)
    """Entries whose test is certainly not in their module any more, where a part of it was seen, or
    where another test may be the one. An update may move them, and removes none."""
    orphans: dict[str, list[Key]] = field(default_factory=dict)
    """The entries of files whose module is gone, in directories that were seen whole."""
    unchecked: dict[str, list[Key]] = field(default_factory=dict)
    """Entries of tests that passed although nothing called a check. An update leaves them."""
    hidden: dict[str, list[Key]] = field(default_factory=dict)
    """Entries of tests that are in their module and were not collected."""
    held: dict[str, list[str]] = field(default_factory=dict)
    """Files of which nothing may be removed, each with the tests that an entry of it may belong to
    now: they have no entry of their own, and did not come to write one."""
    problems: list[str] = field(default_factory=list)

    def listed(self) -> list[tuple[str, Key]]:
        """Return every entry that is obsolete, with its file."""
        orphans = [(file, keys) for file, keys in self.orphans.items() if file not in self.held]
        every = (*self.entries.items(), *self.unchecked.items(), *orphans)
        return [(file, key) for file, keys in every for key in keys]

    def hints(self) -> list[str]:
        """Return why entries stay whose test seems to be gone."""
        held = (
            f"renamed? {file}: its entries without a test stay: {_names(tests)} may be the new "
            "name of one, and did not run to its end. Run it, or remove the entries by hand"
            for file, tests in self.held.items()
        )
        unchecked = (
            f"kept: {file}: an update leaves the entries of {_several(keys)}: nothing in them "
            "called torchmem.check. Let them check, or remove the entries by hand"
            for file, keys in self.unchecked.items()
        )
        hidden = (
            f"kept: {file}: the entries of {_several(keys)} stay: the module still has them, and "
            "they were not collected. Let pytest collect them, or remove the entries by hand"
            for file, keys in self.hidden.items()
        )
        return [*held, *unchecked, *hidden]


def _names(tests: list[str]) -> str:
    return tests[0] + (f" or one of {len(tests) - 1} others" if tests[1:] else "")


def _several(keys: Iterable[Key]) -> str:
    first, *others = dict.fromkeys(key.test for key in keys)
    return first + (f" and {len(others)} more" if others else "")


@dataclass(frozen=True, slots=True)
class Tests:
    """What became of the tests of a run, by node id."""

    outcome: Callable[[str], str]
    is_unchecked: Callable[[str], bool]
    """Whether it passed without a check that came to a result."""


class _File:
    """A snapshot file and the modules whose it is: several, where links make their files one."""

    def __init__(
        self, root: Path, modules: Sequence[Mapping[str, Any]], tests: Tests, links: Links
    ) -> None:
        self.path = min(module["file"] for module in modules)
        self.paths = {module["file"] for module in modules}
        self.outcomes: dict[str, str] = {}
        self.unchecked: set[str] = set()
        self.memory_tests: dict[str, str] = {}
        """The node ids of its memory tests, and what they are called in the file."""
        for module in modules:
            for test in module["tests"]:
                found = tests.outcome(f"{module['nodeid']}::{test}")
                if self.outcomes.get(test, "passed") == "passed":
                    self.outcomes[test] = found
            of_memory = {f"{module['nodeid']}::{t}": t for t in module["memory_tests"] or ()}
            self.memory_tests |= of_memory
            self.unchecked.update(t for node, t in of_memory.items() if tests.is_unchecked(node))
        known = [module["members"] for module in modules]
        self.members = None if None in known else {name for some in known for name in some}
        self.hidden = {test for module in modules for test in module["hidden"]}
        own = {own_path(root / file) for file in self.paths}
        same = all(states_of(root / m["path"]) == m["states"] for m in modules)
        self.is_known = same and links.sharers(root / self.path) <= own
        """It is no other module's, and neither it nor its modules changed since the run began."""
        self.whole = all(m["whole"] for m in modules)
        outcomes = set(self.outcomes.values())
        self.proven = self.whole and self.is_known and outcomes <= {"passed", "skipped"}
        self.proven = self.proven and not any(module["selective"] for module in modules)

    def certain(self, keys: Iterable[Key]) -> list[Key]:
        """Return which of its entries have no test any more, even where a part of it ran."""
        if not self.is_known:
            return []
        tests = self.outcomes
        return [key for key in keys if is_gone(key.test, tests, self.members, whole=self.whole)]


def find_gone(
    root: Path,
    settings: Settings,
    modules: Iterable[Mapping[str, Any]],
    orphans: Iterable[str],
    unwritten: Iterable[str],
    tests: Tests,
    seen: Mapping[str, set[Key]],
) -> Gone:
    """Return what is gone.

    ``modules``, ``orphans`` and ``unwritten`` are what ``Collection.to_plain`` gave, ``seen`` has
    the keys that checks asked for, by file.
    """
    gone = Gone()
    heirs = [test for test in unwritten if tests.outcome(test) != "passed"]
    annotated: dict[str, set[Key]] = {}
    series = {key.torch_series for keys in seen.values() for key in keys}
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for module in modules:
        by_path.setdefault(os.path.realpath(root / module["file"]), []).append(module)
    links = Links()
    for sharing in by_path.values():
        file = _File(root, sharing, tests, links)
        try:
            stored = read(root / file.path)
            asked = {key for path in file.paths for key in seen.get(path, ())}
            keys = sorted(
                key
                for key in stored.keys - asked
                # Another version's entries are for runs with that version.
                if not settings.split_by_torch or not key.torch_series or key.torch_series in series
            )
        except SnapshotError as error:
            if file.whole:
                gone.problems.append(str(error))
            continue
        heirs += _find_obsolete(gone, file, keys, stored, settings)
        annotated[file.path] = {
            key
            for key in gone.entries.get(file.path, ())
            # On either side of a merge conflict.
            for entry in stored.contested.get(key) or (stored.entries[key],)
            if entry.is_annotated
        }
    _hold_moved(gone, heirs, annotated)
    for orphan in orphans:
        if has_module(root / orphan):  # come since the run began
            continue
        try:
            stored = read(root / orphan)
        except SnapshotError as error:
            gone.problems.append(str(error))
        else:
            gone.orphans[orphan] = sorted(stored.keys)
            if heirs:
                gone.held[orphan] = heirs
    return gone


def _find_obsolete(
    gone: Gone, file: _File, keys: Sequence[Key], stored: StoredSnapshot, settings: Settings
) -> list[str]:
    """Take note of the ``keys`` of a file that are gone; return tests that may be their heirs."""
    path, outcomes = file.path, file.outcomes
    for kept, tests in ((gone.unchecked, file.unchecked), (gone.hidden, file.hidden)):
        some = [key for key in keys if key.test in tests]
        if some and file.proven and not settings.narrowed:
            kept[path] = some
    # Devices that this run was told to leave out are not gone.
    gone_with = {"passed", ""} if not settings.narrowed else {""}
    found = [
        key
        for key in keys
        if file.proven
        and outcomes.get(key.test, "") in gone_with
        and key.test not in file.unchecked | file.hidden
    ]
    known = {key.test for key in stored.keys}
    undecided = [
        node
        for node, test in file.memory_tests.items()
        if test not in known and outcomes.get(test) != "passed"
    ]
    if found and undecided:
        gone.held[path], gone.tests[path] = undecided, found
    elif found:
        gone.entries[path] = found
    certain = file.certain(key for key in keys if key.test not in file.hidden)
    if certain and not file.proven:
        gone.tests[path] = certain
    return undecided


def _hold_moved(gone: Gone, heirs: Iterable[str], annotated: Mapping[str, Collection[Key]]) -> None:
    """Keep entries that may belong to a test of the same id in another module.

    That is one of the ``heirs``, which have no entry and did not come to write one. A module that
    could not be collected may have any test: what people wrote waits for it.
    """
    by_id: dict[str, list[str]] = {}
    for heir in heirs:
        by_id.setdefault(heir.partition("::")[2], []).append(heir)
    for file, keys in list(gone.entries.items()):
        waits = {key: by_id.get(key.test, []) for key in keys}
        for key in annotated[file]:
            waits[key] = waits[key] + by_id.get("", [])
        kept = [key for key in keys if waits[key]]
        if kept:
            gone.entries[file] = [key for key in keys if not waits[key]]
            gone.tests[file] = kept
            gone.held[file] = list(dict.fromkeys(test for key in kept for test in waits[key]))
