"""An update of snapshot files: entries written, renamed, moved and removed, file by file."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pytest_torchmem.checks.settings import Settings
from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.plugin.obsolete import Gone
from pytest_torchmem.snapshots.changes import (
    Place,
    SnapshotPlan,
    change_file,
    moves,
    plan_file,
    plan_moved,
)
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.location import orphans_in, relative, snapshot_path
from pytest_torchmem.snapshots.store import StoredSnapshot, read

_IS_TEST_MODULE = re.compile(r"test_.*|.*_test\.py").fullmatch


@dataclass(slots=True)
class Updated:
    """What an update did, or in a dry run would do."""

    plans: list[SnapshotPlan] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    """Tests that look renamed, where that could not be decided."""


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
    done: Updated = field(default_factory=Updated)

    def run(self) -> Updated:
        """Do it; what cannot be read or written is a plan with a problem."""
        removes = "obsolete" in self.settings.update
        removable = self.gone.entries if removes else {}
        files = set(self.gone.orphans)
        for file in self.accepted:
            directory = (self.root / file).parent.parent
            files.update(relative(path, self.root) for path in orphans_in(directory))
        files -= {*self.accepted, *self.memory_tests}  # modules that went while their tests ran
        orphans, left = (
            self._read_all(files),
            self._read_all({*self.gone.entries, *self.gone.tests}),
        )
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
            if self._plan(file, obsolete, inherited.get(file, {}), moved, heirs.get(file)):
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
                    plan_moved,
                    moved=going,
                    removed=rest,
                    module_is_gone=file in orphans,
                    extra_lives_on=any(heir is stored for heir in heirs.values()),
                )
                self._apply(stored.path, plan)
        return self.done

    def _plan(
        self,
        file: str,
        obsolete: Sequence[Key],
        inherited: Mapping[Key, Entry],
        moved: Mapping[Place, Place],
        before: StoredSnapshot | None,
    ) -> bool:
        """Plan and write one file, which may be that of ``before`` under another name."""
        renamable = [*self.gone.entries.get(file, ()), *self._renamable(file)]
        plan = partial(
            plan_file,
            accepted=list(self.accepted.get(file, {}).values()),
            obsolete=obsolete,
            gone=[key for key in renamable if (file, key) not in moved],
            inherited=inherited,
            extra=before.extra if before is not None else {},
        )
        return self._apply(self.root / file, plan)

    def _apply(self, path: Path, plan: Callable[[StoredSnapshot], SnapshotPlan]) -> bool:
        """Plan and write one file; tell whether that went well."""
        planned = change_file(path, read, plan, writes=self.settings.writes)
        self.done.plans.append(planned)
        return not planned.problem

    def _has_left(self, file: str, key: Key, stored: StoredSnapshot | None) -> bool:
        """Return whether a test may have moved to a module beside its own that was not run.

        Where people wrote something into its entry, that is for a run of both modules to move.
        """
        entry = stored.entries.get(key) if stored is not None else None
        if entry is None or not entry.is_annotated:
            return False
        function = key.test.partition("[")[0].rpartition("::")[2]
        defined = re.compile(rf"\bdef {re.escape(function)}\b")
        for module in sorted((self.root / file).parent.parent.glob("*.py")):
            its_file = relative(snapshot_path(module), self.root)
            ran = its_file == file or its_file in self.memory_tests or its_file in self.accepted
            if not ran and _IS_TEST_MODULE(module.name) and defined.search(_text(module)):
                self.done.hints.append(
                    f"renamed? {file}: {key} may have moved to {module.name}, which did not run. "
                    "The entry stays, for something was written into it: update both modules in "
                    "one run"
                )
                return True
        return False

    def _read(self, file: str) -> StoredSnapshot | None:
        """Return a file, ``None`` where it cannot be read: that is said where it is written."""
        try:
            return read(self.root / file)
        except SnapshotError:
            return None

    def _read_all(self, files: Iterable[str]) -> dict[str, StoredSnapshot]:
        return {file: stored for file in files if (stored := self._read(file)) is not None}

    def _moves(
        self, orphans: Mapping[str, StoredSnapshot], left: Mapping[str, StoredSnapshot]
    ) -> dict[Place, Place]:
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
        found = moves(gone, new, certain=False)
        if self.clean and set(orphans) <= set(self.gone.orphans) - set(self.gone.held):
            # An entry that is left in the new one's own module is a rival, and then closer.
            gone = [(file, entry) for file, entry in gone if (file, entry.key) not in found]
            taken = set(found.values())
            new = [(file, entry) for file, entry in new if (file, entry.key) not in taken]
            rest = moves(gone, new, certain=True)
            found |= {old: place for old, place in rest.items() if old[0] in orphans}
        return found

    def _heirs(
        self, orphans: Mapping[str, StoredSnapshot], moved: Mapping[Place, Place]
    ) -> dict[str, StoredSnapshot]:
        """Return the files that do not exist yet and take over all that an orphan has."""
        found: dict[str, StoredSnapshot] = {}
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
        old = [("", stored.entries[key]) for key in gone if key in stored.entries]
        new = [("", entry) for key, entry in accepted.items() if key not in stored.entries]
        for (_, before), (_, after) in sorted(moves(old, new, certain=True).items()):
            notes = stored.entries[before].is_annotated
            by_hand = ". What was written into it stays there: copy it by hand" if notes else ""
            self.done.hints.append(
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
