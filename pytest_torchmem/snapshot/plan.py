"""What an update changes in one snapshot file, worked out before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_torchmem.snapshot.format import Entry, Key, Snapshot, dump, merged
from pytest_torchmem.snapshot.store import Stored


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file before and after; ``problem`` says why it cannot be written at all."""

    stored: Stored
    text: str | None
    """The new text; ``None`` where nothing is left to keep."""
    added: tuple[Key, ...] = ()
    changed: tuple[Key, ...] = ()
    removed: tuple[Key, ...] = ()
    renamed: tuple[tuple[Key, Key], ...] = ()
    problem: str = ""

    @property
    def changes_file(self) -> bool:
        """Whether there is anything to write."""
        if self.problem:
            return False
        if self.text is None:
            return self.stored.exists
        # A checkout may have other line endings; that alone is no reason to write.
        return self.text != self.stored.text.replace("\r\n", "\n")


def plan_file(stored: Stored, accepted: Iterable[Entry], obsolete: Iterable[Key]) -> FilePlan:
    """Return what the ``accepted`` entries and the removal of ``obsolete`` keys make of a file.

    What people wrote into an entry is kept, also where its test was renamed: a new entry beside an
    obsolete one of the same workload, name and device takes it over.
    """
    old = stored.snapshot.entries
    obsolete = sorted(set(obsolete) & set(old))
    entries = {key: entry for key, entry in old.items() if key not in obsolete}
    added, changed, contested = [], [], dict(stored.contested)
    for entry in accepted:
        before = old.get(entry.key)
        if entry.key in contested:
            ours, theirs = contested.pop(entry.key)
            notes = _notes(ours, theirs)
            if notes is None:
                return _refused(stored, [entry.key], "have different notes on the two sides of")
            entries[entry.key] = merged(entry, notes)
            changed.append(entry.key)
        elif before is None:
            entries[entry.key] = entry
            added.append(entry.key)
        elif not before.same_measurement(entry):
            entries[entry.key] = merged(entry, before)
            changed.append(entry.key)
    if contested:
        return _refused(stored, sorted(contested), "were not run, and differ between the sides of")
    renamed = renames([old[key] for key in obsolete], [entries[key] for key in added])
    for before_key, after_key in renamed:
        entries[after_key] = merged(entries[after_key], old[before_key])
    extra = stored.snapshot.extra
    text = dump(Snapshot(entries, extra)) if entries or extra else None
    moved_from, moved_to = {pair[0] for pair in renamed}, {pair[1] for pair in renamed}
    return FilePlan(
        stored,
        text,
        added=tuple(sorted(key for key in added if key not in moved_to)),
        changed=tuple(sorted(changed)),
        removed=tuple(key for key in obsolete if key not in moved_from),
        renamed=tuple(renamed),
    )


def renames(gone: Sequence[Entry], new: Sequence[Entry]) -> list[tuple[Key, Key]]:
    """Return which gone entries live on as which new ones, where there is no doubt about it."""

    def likeness(entry: Entry) -> tuple[str, ...]:
        key = entry.key
        return (entry.workload, key.name, key.device, key.gpu, key.torch_series)

    pairs = []
    for entry in gone:
        if not entry.workload:
            continue
        like = [other for other in new if likeness(other) == likeness(entry)]
        rivals = [other for other in gone if likeness(other) == likeness(entry)]
        if len(like) == len(rivals) == 1:
            pairs.append((entry.key, like[0].key))
    return pairs


def _notes(ours: Entry, theirs: Entry) -> Entry | None:
    """Return the side whose notes to keep, or ``None`` where both have some and they differ."""
    if not theirs.is_annotated or merged(ours, theirs) == ours:
        return ours
    return None if ours.is_annotated else theirs


def _refused(stored: Stored, keys: Sequence[Key], what: str) -> FilePlan:
    names = ", ".join(str(key) for key in keys[:5])
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    problem = (
        f"{stored.path} was left as it is: the entries of {names}{more} {what} its merge conflict. "
        "Run pytest --torchmem-update on the whole test module, or settle these entries by hand"
    )
    return FilePlan(stored, None, problem=problem)
