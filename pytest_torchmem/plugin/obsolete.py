"""Which snapshot entries and files belong to tests that are gone, as far as a run proves it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_torchmem.checks.settings import Settings
from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.plugin.collection import is_gone
from pytest_torchmem.snapshots.format import Key
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
    held: dict[str, list[str]] = field(default_factory=dict)
    """Files of which nothing may be removed, each with the tests that an entry of it may belong to
    now: they have no entry of their own, and did not come to write one."""
    problems: list[str] = field(default_factory=list)

    def listed(self) -> list[tuple[str, Key]]:
        """Return every entry that is obsolete, with its file."""
        orphans = [(file, keys) for file, keys in self.orphans.items() if file not in self.held]
        both = (*self.entries.items(), *orphans)
        return [(file, key) for file, keys in both for key in keys]

    def hints(self) -> list[str]:
        """Return why entries stay whose test seems to be gone."""
        return [
            f"{file}: its entries without a test stay: {_names(tests)} may be the new name of one, "
            "and did not run to its end. Run it, or remove the entries by hand"
            for file, tests in self.held.items()
        ]


def _names(tests: list[str]) -> str:
    return tests[0] + (f" or one of {len(tests) - 1} others" if tests[1:] else "")


def find_gone(
    root: Path,
    settings: Settings,
    modules: Iterable[Mapping[str, Any]],
    orphans: Iterable[str],
    unwritten: Iterable[str],
    outcome: Callable[[str], str],
    seen: Mapping[str, set[Key]],
) -> Gone:
    """Return what is gone.

    ``modules``, ``orphans`` and ``unwritten`` are what ``Collection.to_plain`` gave, ``outcome``
    tells what became of the test with a node id, ``seen`` has the keys that checks asked for, by
    file.
    """
    gone = Gone()
    heirs = [test for test in unwritten if outcome(test) != "passed"]
    annotated: dict[str, set[Key]] = {}
    series = {key.torch_series for keys in seen.values() for key in keys}

    def unasked(stored: StoredSnapshot, file: str) -> list[Key]:
        keys = stored.keys - seen.get(file, set())
        if settings.split_by_torch:
            # Another version's entries are for runs with that version.
            keys = {key for key in keys if not key.torch_series or key.torch_series in series}
        return sorted(keys)

    for module in modules:
        file = module["file"]
        try:
            stored = read(root / file)
            keys = unasked(stored, file)
        except SnapshotError as error:
            if module["whole"]:
                gone.problems.append(str(error))
            continue
        outcomes = {test: outcome(f"{module['nodeid']}::{test}") for test in module["tests"]}
        proven = module["whole"] and not module["selective"]
        proven = proven and set(outcomes.values()) <= {"passed", "skipped"}
        found = [key for key in keys if proven and _is_obsolete(key, outcomes, settings)]
        known = {key.test for key in stored.keys}
        undecided = [
            f"{module['nodeid']}::{test}"
            for test in module["memory_tests"] or ()
            if test not in known and outcomes.get(test) != "passed"
        ]
        heirs += undecided
        if found and undecided:
            gone.held[file], gone.tests[file] = undecided, found
        elif found:
            gone.entries[file] = found
            annotated[file] = {key for key in found if _is_annotated(stored, key)}
        tests, members, whole = module["tests"], module["members"], module["whole"]
        certain = [key for key in keys if is_gone(key.test, tests, members, whole=whole)]
        if certain and not proven:
            gone.tests[file] = certain
    _hold_moved(gone, heirs, annotated)
    for file in orphans:
        try:
            stored = read(root / file)
        except SnapshotError as error:
            gone.problems.append(str(error))
        else:
            gone.orphans[file] = sorted(stored.keys)
            if heirs:
                gone.held[file] = heirs
    return gone


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


def _is_annotated(stored: StoredSnapshot, key: Key) -> bool:
    """Tell whether people wrote into an entry, on either side of a merge conflict."""
    sides = stored.contested.get(key) or (stored.entries[key],)
    return any(entry.is_annotated for entry in sides)


def _is_obsolete(key: Key, outcomes: Mapping[str, str], settings: Settings) -> bool:
    if key.test not in outcomes:
        return True
    # Devices that this run was told to leave out are not gone.
    return outcomes[key.test] == "passed" and not settings.narrowed
