"""``torchmem explain``: what is different between two profiles, snapshots or revisions, and why.
``torchmem accept``, ``torchmem review`` and ``torchmem prune``: snapshot files changed without
running a test.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_torchmem.commands.console import is_profile
from pytest_torchmem.diagnosis.diagnose import diagnose
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.figures import label
from pytest_torchmem.printable import counted, printable, printable_lines
from pytest_torchmem.reports.growth import others, place, section, why
from pytest_torchmem.reports.layout import coloured, comparison_table, wrapped
from pytest_torchmem.reports.sources import Source, aligned, load_source
from pytest_torchmem.snapshots import store
from pytest_torchmem.snapshots.alive import MOMENTS
from pytest_torchmem.snapshots.compare import Verdict, compare, entry_of, main_change
from pytest_torchmem.snapshots.files import locked, remove
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.location import DIRECTORY, is_proposal, is_snapshot, orphans_in
from pytest_torchmem.snapshots.tolerance import parse_rules
from pytest_torchmem.units import format_change, format_size

_OF_OTHERS = ("site-packages", "node_modules")
"""Folders of what is installed; so are those that begin with a dot."""
_ROWS = 5
_EXACTLY = (parse_rules("0", "torchmem"),)


def add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="say what grew between two profiles, snapshots or revisions, and why",
        description="Say what is different between A and B: what came, what went, and the cause "
        "where it can be told. A and B are profiles (torchmem trace --json, profile.save), JSON "
        "reports, snapshot files, directories of them, or git revisions.",
    )
    explain.add_argument("a", metavar="A")
    explain.add_argument("b", metavar="B", nargs="?", help="default: the working tree")
    explain.add_argument("--rows", metavar="N", type=int, default=10, help="rows of each table")
    explain.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    one, other = aligned(_source(options.a), _source(options.b), Path.cwd())
    pairs = list(_pairs(one, other))
    if not pairs:
        raise UsageError(f"{one.name} and {other.name} have no test or profile in common")
    texts = (explanation(*pair, options.rows) for pair in pairs)
    told = [text for text in texts if text]
    if same := len(pairs) - len(told):
        told.append(f"{counted(same, 'check')} {'is' if same == 1 else 'are'} the same")
    print(coloured("\n\n".join(told), sys.stdout))
    return 0


def _source(text: str | None) -> Source:
    path = Path(text) if text is not None else None
    if path is None or not path.is_file() or not is_profile(path):
        return load_source(text, Path.cwd())
    from pytest_torchmem.profile.profile import MemoryProfile

    profile = MemoryProfile.load(path)
    key = Key("", "", profile.device, profile.gpu or "")
    return Source(str(path), {("", key): entry_of(key, profile)})


def _pairs(one: Source, other: Source) -> Iterator[tuple[str, Entry, Entry]]:
    """Yield the entries that both sides have; two alone are a pair."""
    if len(one.entries) == len(other.entries) == 1:
        (before,), (now,) = one.entries.values(), other.entries.values()
        yield f"{one.name} -> {other.name}", before, now
        return
    for at, entry in one.entries.items():
        if at in other.entries:
            yield f"{at[0]}::{at[1]}", entry, other.entries[at]


def explanation(name: str, before: Entry, now: Entry, rows: int) -> str:
    """Return what is different between two entries and why, "" where nothing is."""
    comparison = compare(before, now, _EXACTLY)
    if not comparison.having(Verdict.GREW, Verdict.SHRANK, Verdict.NEW, Verdict.NOT_RUN):
        return ""
    parts = [name, comparison_table({name: comparison.told})]
    told = [one for one in now.grew if before.figures.get(one.moment) == one.before]
    shrunk = [c for c in comparison.having(Verdict.SHRANK) if c.figure in MOMENTS]
    most = min(shrunk, key=lambda change: (change.now or 0) - (change.before or 0), default=None)
    moment = comparison.grown_moment or (most.figure if most is not None else "")
    moment = told[-1].moment if told else moment
    if moment:
        diagnosis = diagnose(before, now, moment)
        if diagnosis.causes or diagnosis.told:
            where = place(diagnosis)
            parts += [wrapped(why(diagnosis) + (f": {where}" if where else "")), *others(diagnosis)]
        parts.append(section(diagnosis).text(rows))
    return printable_lines("\n\n".join(part for part in parts if part))


def add_commands(commands: Any) -> None:
    accept = commands.add_parser(
        "accept",
        help="take over the snapshots that a run in CI proposes",
        description="Take over the updated snapshots that a run in CI left in DIR "
        "(torchmem-proposal, or --torchmem-proposal=DIR). What people wrote into entries is kept. "
        "Exit 1 if a file could not be written.",
    )
    accept.add_argument("--dry-run", action="store_true", help="write nothing")
    review = commands.add_parser(
        "review",
        help="walk through the snapshots that a run proposes, one by one",
        description="Show each entry below DIR that differs from the stored one, with what grew "
        "and why, and ask whether to take it over. Exit 1 if one was not.",
    )
    for command in (accept, review):
        command.add_argument("directory", metavar="DIR", type=Path, help="what CI left")
        command.add_argument("--root", metavar="DIR", type=Path, default=Path(), help="default: .")
    accept.set_defaults(run=lambda options: max(_each_file(options, options.dry_run, None)))
    review.set_defaults(run=lambda options: max(_each_file(options, False, _Answers())))
    prune = commands.add_parser(
        "prune",
        help="remove snapshot files whose test module no longer exists",
        description="Remove the snapshot files below DIR whose test module no longer exists. A "
        "file stays if a module beside it without snapshots may be the renamed one (pytest "
        "--torchmem-update moves its entries), or if a run in CI may have proposed it. To remove "
        "entries from the file of a module that exists, run pytest --torchmem-update=obsolete.",
    )
    prune.add_argument(
        "directories", metavar="DIR", type=Path, nargs="*", help="default: the current directory"
    )
    prune.add_argument("--dry-run", action="store_true", help="remove nothing")
    prune.set_defaults(run=_prune)


class _Answers:
    def __init__(self) -> None:
        self._rest = ""

    def accepts(self, key: Key, before: Entry | None, now: Entry) -> bool:
        """Show how an entry differs, and ask whether it is accepted; none is after "quit"."""
        if self._rest == "q":
            return False
        told = "" if before is None else explanation(str(key), before, now, _ROWS)
        print(f"\n{told or printable(f'{key}: {_change(before, now)}')}")
        answer = self._rest
        while answer not in ("y", "n", "a", "q"):
            try:
                answer = input("accept? [y]es, [n]o, [a]ll that are left, [q]uit: ").strip().lower()
            except EOFError:
                answer = "q"
        self._rest = answer if answer in ("a", "q") else ""
        return answer in ("y", "a")


def _each_file(options: argparse.Namespace, dry: bool, answers: _Answers | None) -> Iterator[int]:
    """Take over each proposed file; yield whether anything was not, as an exit status."""
    directory, root = options.directory, options.root
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: name the one that a run has proposed")
    files = sorted(filter(is_snapshot, directory.rglob(f"{DIRECTORY}/*.json")))
    if not files:
        raise UsageError(
            f"{directory} has no snapshot file (such as tests/{DIRECTORY}/test_net.json): name the "
            "directory that a run has proposed"
        )
    if root.resolve() in (directory.resolve(), *directory.resolve().parents):
        own = directory.resolve().relative_to(root.resolve())
        if own == Path():
            raise UsageError(f"{directory} is where its files would be written to: name another")
    for file in files:
        yield _take_over(file, root / file.relative_to(directory), dry, answers)


def _take_over(proposed: Path, target: Path, dry: bool, answers: _Answers | None) -> int:
    new = store.read(proposed)
    if new.conflicted:
        raise SnapshotError(new.conflict_message)
    accepted = set(new.entries)

    def plan(stored: store.StoredSnapshot) -> store.SnapshotPlan:
        return store.plan_file(stored, [new.entries[key] for key in sorted(accepted)], ())

    left, planned = 0, store.change_file(target, store.read, plan, writes=not (dry or answers))
    if answers is not None and not planned.problem:
        found = {key: planned.stored.entries.get(key) for key in (*planned.added, *planned.changed)}
        accepted = {key for key in found if answers.accepts(key, found[key], new.entries[key])}
        if found and not accepted:
            return 1
        left, planned = (
            len(found) - len(accepted),
            store.change_file(target, store.read, plan, writes=True),
        )
    if planned.problem:
        print(f"torchmem: error: {printable(planned.problem)}", file=sys.stderr)
        return 1
    if not planned.changes_file:
        print(printable(f"{target}: nothing new"))
        return 0
    did = "would write" if dry else "wrote"
    print(printable(f"{did} {target}: {len(planned.added)} new, {len(planned.changed)} changed"))
    for key in (*planned.added, *planned.changed):
        print(printable(f"  {key}: {_change(planned.stored.entries.get(key), new.entries[key])}"))
    return 1 if left else 0


def _change(before: Entry | None, now: Entry) -> str:
    if before is None:
        return f"peak {format_size(now.figures.get('peak'))}, new"
    main = main_change(compare(before, now, _EXACTLY).changes)
    if main is None or main.before == main.now:
        return "the same figures"
    return f"{label(main.figure)} {format_change(main.before, main.now)}"


def _prune(options: argparse.Namespace) -> int:
    held = found = 0
    for directory in options.directories or [Path()]:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory")
        for orphan in _orphans_below(directory):
            found += 1
            why = _why_kept(orphan, directory)
            if why:
                held += 1
                print(printable(f"kept {orphan}: {why}"))
                continue
            keys: set[Key] = set()
            with suppress(SnapshotError):
                keys = store.read(orphan).keys
            did = "would remove" if options.dry_run else "removed"
            if not options.dry_run:
                with locked(orphan):
                    remove(orphan)
            entries = counted(len(keys), "entry")
            print(printable(f"{did} {orphan}: its test module no longer exists ({entries})"))
    if not found:
        print("nothing to remove: every snapshot file has its test module")
    return 1 if held else 0


def _orphans_below(directory: Path) -> Iterator[Path]:
    for folder in sorted(directory.rglob(DIRECTORY)):
        parts = folder.relative_to(directory).parts
        foreign = any(part.startswith(".") or part in _OF_OTHERS for part in parts)
        if folder.is_dir() and not foreign and not is_proposal(folder):
            yield from orphans_in(folder.parent)


def _why_kept(orphan: Path, directory: Path) -> str:
    """Return why a snapshot file without a module stays; nothing where none may claim it."""
    modules = sorted(orphan.parent.parent.glob("*.py"))
    named = (one for one in modules if one.stem.startswith("test_") or one.stem.endswith("_test"))
    heir = next((one for one in named if not (orphan.parent / f"{one.stem}.json").exists()), None)
    if heir is not None:
        return (
            f"{heir.name} beside it has no snapshots, and may be its module, renamed. Run pytest "
            "--torchmem-update to move the entries"
        )
    # The module that a copy of its snapshot file belongs to, looked for by folder.
    folders = orphan.parent.parent.relative_to(directory).parts
    rests = (folders[first:] for first in range(1, len(folders) + 1))
    places = (directory.joinpath(*rest, f"{orphan.stem}.py") for rest in rests)
    module = next((place for place in places if place.exists()), None)
    if module is not None:
        return (
            f"it may be what a run proposes for {module}. Take it over with torchmem accept, or "
            "remove it yourself"
        )
    return ""
