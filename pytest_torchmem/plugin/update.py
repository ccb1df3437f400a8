"""An update of snapshot files, and which of their entries belong to tests that are gone."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pytest_torchmem.checks.request import Settings
from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.plugin.collection import is_gone
from pytest_torchmem.plugin.start import states_of
from pytest_torchmem.printable import first_of
from pytest_torchmem.snapshots import location, store
from pytest_torchmem.snapshots.format import Entry, Key


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
        orphans = [(file, keys) for file, keys in self.orphans.items() if file not in self.held]
        every = (*self.entries.items(), *self.unchecked.items(), *orphans)
        return [(file, key) for file, keys in every for key in keys]

    def hints(self) -> list[str]:
        """Return why entries stay whose test seems to be gone."""
        held = (
            f"renamed? {file}: its entries without a test stay: {_names(tests)} may be the new "
            "name of one, and has no entry. Let it pass with --torchmem-update, which moves them, "
            "or remove the entries by hand"
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
    return first_of(dict.fromkeys(key.test for key in keys))


class _File:
    """A snapshot file and the modules whose it is: several, where links make their files one."""

    def __init__(
        self,
        root: Path,
        modules: Sequence[Mapping[str, Any]],
        outcome: Callable[[str], str],
        is_unchecked: Callable[[str], bool],
        links: location.Links,
    ) -> None:
        self.path = min(module["file"] for module in modules)
        self.paths = {module["file"] for module in modules}
        self.outcomes: dict[str, str] = {}
        self.unchecked: set[str] = set()
        self.memory_tests: dict[str, str] = {}
        """The node ids of its memory tests, and what they are called in the file."""
        for module in modules:
            for test in module["tests"]:
                found = outcome(f"{module['nodeid']}::{test}")
                if self.outcomes.get(test, "passed") == "passed":
                    self.outcomes[test] = found
            of_memory = {f"{module['nodeid']}::{t}": t for t in module["memory_tests"] or ()}
            self.memory_tests |= of_memory
            self.unchecked.update(t for node, t in of_memory.items() if is_unchecked(node))
        known = [module["members"] for module in modules]
        self.members = None if None in known else {name for some in known for name in some}
        self.hidden = {test for module in modules for test in module["hidden"]}
        own = {location.own_path(root / file) for file in self.paths}
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
    outcome: Callable[[str], str],
    is_unchecked: Callable[[str], bool],
    seen: Mapping[str, set[Key]],
) -> Gone:
    """Return what is gone.

    ``modules``, ``orphans`` and ``unwritten`` are what ``Collection.to_plain`` gave; a test by its
    node id ``is_unchecked`` if it passed without a check that came to a result; ``seen`` has the
    keys that checks asked for, by file.
    """
    gone = Gone()
    heirs = [test for test in unwritten if outcome(test) != "passed"]
    annotated: dict[str, set[Key]] = {}
    series = {key.torch_series for keys in seen.values() for key in keys}
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for module in modules:
        by_path.setdefault(os.path.realpath(root / module["file"]), []).append(module)
    links = location.Links()
    for sharing in by_path.values():
        file = _File(root, sharing, outcome, is_unchecked, links)
        try:
            stored = store.read(root / file.path)
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
        if location.has_module(root / orphan):  # come since the run began
            continue
        try:
            stored = store.read(root / orphan)
        except SnapshotError as error:
            gone.problems.append(str(error))
        else:
            gone.orphans[orphan] = sorted(stored.keys)
            if heirs:
                gone.held[orphan] = heirs
    return gone


def _find_obsolete(
    gone: Gone, file: _File, keys: Sequence[Key], stored: store.StoredSnapshot, settings: Settings
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


_IS_TEST_MODULE = re.compile(r"test_.*|.*_test\.py").fullmatch


@dataclass(slots=True)
class Update:
    """Writes what a run found into the snapshot files, each whole or not at all."""

    root: Path
    settings: Settings
    accepted: Mapping[str, Mapping[Key, Entry]]
    """The entries to write by file, relative to the root."""
    gone: Gone
    memory_tests: Mapping[str, Sequence[str] | None]
    """The tests of a file's module that check memory, ``None`` where some may not be known."""
    clean: bool
    """Every test ran and none failed."""
    plans: list[store.SnapshotPlan] = field(default_factory=list)
    """What it did, or in a dry run would do; what cannot be read or written has a problem."""
    hints: list[str] = field(default_factory=list)
    """Tests that look renamed, where that could not be decided."""

    def run(self) -> None:
        removes = "obsolete" in self.settings.update
        removable = self.gone.entries if removes else {}
        files = set(self.gone.orphans)
        for file in self.accepted:
            directory = (self.root / file).parent.parent
            files.update(
                location.relative(path, self.root) for path in location.orphans_in(directory)
            )
        files -= {*self.accepted, *self.memory_tests}  # modules that went while their tests ran
        orphans = self._read_all(files)
        left = self._read_all({*self.gone.entries, *self.gone.tests})
        moved = self._moves(orphans, left)
        inherited: dict[str, dict[Key, Entry]] = {}
        for (old_file, old_key), (file, key) in moved.items():
            inherited.setdefault(file, {})[key] = (orphans | left)[old_file].entries[old_key]
        heirs = self._heirs(orphans, moved)
        written = set()
        for file in sorted({*self.accepted, *removable}):
            obsolete = [
                key
                for key in removable.get(file, ())
                if (file, key) not in moved and not self._has_left(file, key, left.get(file))
            ]
            renamable = [*self.gone.entries.get(file, ()), *self._renamable(file)]
            plan = partial(
                store.plan_file,
                accepted=list(self.accepted.get(file, {}).values()),
                obsolete=obsolete,
                gone=[key for key in renamable if (file, key) not in moved],
                inherited=inherited.get(file, {}),
                extra=heirs[file].extra if file in heirs else {},
            )
            if self._apply(self.root / file, plan):
                written.add(file)
        for file, stored in (*sorted(left.items()), *sorted(orphans.items())):
            going = {o[1]: n for o, n in moved.items() if o[0] == file and n[0] in written}
            # What has a new place that could not be written stays in the old one.
            goes = removes and self.clean and file not in self.gone.held
            rest = [
                key for key in self.gone.orphans.get(file, ()) if goes and (file, key) not in moved
            ]
            if going or rest:
                plan = partial(
                    store.plan_moved,
                    moved=going,
                    removed=rest,
                    module_is_gone=file in orphans,
                    extra_lives_on=any(heir is stored for heir in heirs.values()),
                )
                self._apply(stored.path, plan)

    def _apply(
        self, path: Path, plan: Callable[[store.StoredSnapshot], store.SnapshotPlan]
    ) -> bool:
        """Plan and write one file; tell whether that went well."""
        planned = store.change_file(path, store.read, plan, writes=self.settings.writes)
        self.plans.append(planned)
        return not planned.problem

    def _has_left(self, file: str, key: Key, stored: store.StoredSnapshot | None) -> bool:
        """Return whether a test may have moved to a module beside its own that was not run.

        Where people wrote something into its entry, that is for a run of both modules to move.
        """
        entry = stored.entries.get(key) if stored is not None else None
        if entry is None or not entry.is_annotated:
            return False
        function = key.test.partition("[")[0].rpartition("::")[2]
        defined = re.compile(rf"\bdef {re.escape(function)}\b")
        for module in sorted((self.root / file).parent.parent.glob("*.py")):
            its_file = location.relative(location.snapshot_path(module), self.root)
            ran = its_file == file or its_file in self.memory_tests or its_file in self.accepted
            if not ran and _IS_TEST_MODULE(module.name) and defined.search(_text(module)):
                self.hints.append(
                    f"renamed? {file}: {key} may have moved to {module.name}, which did not run. "
                    "The entry stays, for something was written into it: update both modules in "
                    "one run"
                )
                return True
        return False

    def _read(self, file: str) -> store.StoredSnapshot | None:
        """Return a file, ``None`` where it cannot be read: that is said where it is written."""
        try:
            return store.read(self.root / file)
        except SnapshotError:
            return None

    def _read_all(self, files: Iterable[str]) -> dict[str, store.StoredSnapshot]:
        return {file: stored for file in files if (stored := self._read(file)) is not None}

    def _moves(
        self, orphans: Mapping[str, store.StoredSnapshot], left: Mapping[str, store.StoredSnapshot]
    ) -> dict[store.Place, store.Place]:
        """Return which entries live on in another file, and where.

        A test that left a module that is still there has kept its id, or it is not known again: a
        new one that is like it may as well be another.
        """
        gone = [
            (file, entry)
            for file, stored in sorted(orphans.items())
            for entry in stored.entries.values()
        ]
        for file, partly in sorted(left.items()):
            keys = {*self.gone.entries.get(file, ()), *self.gone.tests.get(file, ())}
            gone += [(file, partly.entries[key]) for key in sorted(keys & set(partly.entries))]
        if not gone:
            return {}
        new = []
        for file, entries in sorted(self.accepted.items()):
            stored = self._read(file)
            if stored is not None:
                known = stored.keys
                new += [(file, entry) for key, entry in entries.items() if key not in known]
        found = store.moves(gone, new, certain=False)
        if self.clean and set(orphans) <= set(self.gone.orphans) - set(self.gone.held):
            # An entry that is left in the new one's own module is a rival, and then closer.
            gone = [(file, entry) for file, entry in gone if (file, entry.key) not in found]
            taken = set(found.values())
            new = [(file, entry) for file, entry in new if (file, entry.key) not in taken]
            rest = store.moves(gone, new, certain=True)
            found |= {old: place for old, place in rest.items() if old[0] in orphans}
        return found

    def _heirs(
        self, orphans: Mapping[str, store.StoredSnapshot], moved: Mapping[store.Place, store.Place]
    ) -> dict[str, store.StoredSnapshot]:
        """Return the files that do not exist yet and take over all that an orphan has."""
        found: dict[str, store.StoredSnapshot] = {}
        for old, stored in orphans.items():
            targets = {moved.get((old, key), ("",))[0] for key in stored.entries}
            if len(targets) == 1 and "" not in targets:
                (file,) = targets
                if not os.path.exists(self.root / file):
                    found.setdefault(file, stored)
        return found

    def _renamable(self, file: str) -> list[Key]:
        """Return keys of gone tests that a new one may take over although only a part was run.

        That is safe where every test that could be the renamed one is among those that were run.
        """
        gone = self.gone.tests.get(file, [])
        accepted = self.accepted.get(file, {})
        stored = self._read(file)
        if not gone or not accepted or stored is None:
            return []
        known = {key.test for key in stored.keys}
        tests = self.memory_tests.get(file)
        ran = {key.test for key in accepted}
        if tests is not None and not set(tests) - known - ran:
            return gone
        old = [stored.entries[key] for key in gone if key in stored.entries]
        new = [entry for key, entry in accepted.items() if key not in stored.entries]
        for before, after in store.renames(old, new):
            notes = stored.entries[before].is_annotated
            by_hand = ". What was written into it stays there: copy it by hand" if notes else ""
            self.hints.append(
                f"renamed? {file}: {after} may be the new name of {before}. Only a part of the "
                f"module ran, so the old entry stays until the whole module is updated{by_hand}"
            )
        return []


def _text(module: Path) -> str:
    """Return the text of a module, "" of one that cannot be read."""
    try:
        return module.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
