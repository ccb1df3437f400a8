"""``torchmem explain``: what is different between two profiles, snapshots or revisions, and why.
``torchmem accept``, ``torchmem review`` and ``torchmem prune``: snapshot files changed without
running a test. ``torchmem history``: a test's figures over the git log of its snapshot.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pytest_torchmem.commands.console import is_profile, progress
from pytest_torchmem.diagnosis.diagnose import diagnose
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.figures import FIGURES, label
from pytest_torchmem.printable import counted, printable, printable_lines
from pytest_torchmem.profile.pictures.svg import Line, Point, history_svg
from pytest_torchmem.reports.growth import others, place, section, why
from pytest_torchmem.reports.layout import coloured, columns, comparison_table, wrapped
from pytest_torchmem.reports.sources import Source, aligned, load_source
from pytest_torchmem.snapshots import location, store
from pytest_torchmem.snapshots.alive import MOMENTS
from pytest_torchmem.snapshots.compare import Verdict, compare, entry_of, main_change
from pytest_torchmem.snapshots.files import git, locked, remove, write
from pytest_torchmem.snapshots.format import Entry, Key, load
from pytest_torchmem.snapshots.tolerance import parse_rules
from pytest_torchmem.units import format_change, format_size

_OF_OTHERS = ("site-packages", "node_modules")
"""Folders of what is installed; so are those that begin with a dot."""
_ROWS = 5
_EXACTLY = (parse_rules("0", "torchmem"),)
_SEPARATOR = "\x1f"
_NOW = "working tree"


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
    if path is None or not is_profile(path):
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
    history = commands.add_parser(
        "history",
        help="print a test's figures over the git log of its snapshot",
        description="Print how a figure of TEST changed, commit by commit of its snapshot file, "
        "the latest first. Commits that left it as it was are left out.",
    )
    history.add_argument(
        "test",
        metavar="TEST",
        help="such as tests/test_net.py::test_memory, or with the snapshot file before the ::",
    )
    history.add_argument(
        "--figure",
        metavar="FIGURE",
        choices=FIGURES,
        default="peak",
        help=f"{', '.join(FIGURES)}; default: peak",
    )
    history.add_argument("--limit", metavar="N", type=int, help="only the latest N commits")
    history.add_argument("--format", choices=("text", "json"), default="text")
    history.add_argument("--svg", metavar="FILE", type=Path, help="write a picture of it")
    history.set_defaults(run=_history)


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
    files = sorted(filter(location.is_snapshot, directory.rglob(f"{location.DIRECTORY}/*.json")))
    if not files:
        raise UsageError(
            f"{directory} has no snapshot file (such as tests/{location.DIRECTORY}/test_net.json): "
            "name the directory that a run has proposed"
        )
    if directory.resolve() == root.resolve():
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
        left = len(found) - len(accepted)
        planned = store.change_file(target, store.read, plan, writes=True)
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
    for folder in sorted(directory.rglob(location.DIRECTORY)):
        parts = folder.relative_to(directory).parts
        foreign = any(part.startswith(".") or part in _OF_OTHERS for part in parts)
        if folder.is_dir() and not foreign and location.PROPOSAL not in parts:
            yield from location.orphans_in(folder.parent)


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
    if location.is_proposal(orphan.parent.parent, directory):
        return "it may be what a run proposes: take it over with torchmem accept, or remove it"
    return ""


class Version(NamedTuple):
    commit: str
    """Shortened; "" for the working tree."""
    date: str
    subject: str
    entries: Mapping[Key, Entry]


def _history(options: argparse.Namespace) -> int:
    file, separator, test = options.test.partition("::")
    if not separator or not file or not test:
        raise UsageError(f"{options.test!r}: write FILE::TEST, such as tests/test_net.py::test_it")
    if options.limit is not None and options.limit < 1:
        raise UsageError("--limit: expected at least 1")
    path = Path(file) if file.endswith(".json") else location.snapshot_path(Path(file))
    versions = _versions(path, options.limit)
    figure = options.figure
    keys = sorted({key for one in versions for key in one.entries if key.test == test})
    lines = {key: found for key in keys if (found := _changed_in(versions, key, figure))}
    if not lines:
        raise UsageError(f"no commit of {path} has a {label(figure)} of {test}")
    if options.format == "json":
        print(json.dumps(_plain(lines, figure), indent=2))
    else:
        print("\n\n".join(_table(key, found, figure) for key, found in lines.items()))
    if options.svg is not None:
        order = {id(one): place for place, one in enumerate(reversed(versions))}
        pictured = [
            Line(
                key.where,
                tuple(
                    Point(order[id(one)], one.date, one.commit, value)
                    for one, value in reversed(found)
                ),
            )
            for key, found in lines.items()
        ]
        write(options.svg, history_svg(f"{test}: {label(figure)}", pictured))
        print(printable(f"written: {options.svg}"))
    return 0


_Changes = list[tuple[Version, int]]


def _versions(path: Path, limit: int | None) -> list[Version]:
    """Return what the commits of a snapshot file have, the latest first."""
    folder = next(one for one in (path.parent, *path.parents) if one.is_dir())
    name = Path(path.name) if folder == path.parent else path.relative_to(folder)
    # ``--follow``: the file of a module that was renamed has another history before.
    logged = git(
        folder,
        "log",
        "--follow",
        "--name-only",
        f"--format={_SEPARATOR}%h{_SEPARATOR}%cs{_SEPARATOR}%s",
        *([f"-n{limit}"] if limit else []),
        "--",
        str(name),
    )
    found = []
    if path.is_file():
        found.append(Version("", _NOW, "", load(path.read_text("utf-8")).entries))
    blocks = logged.split(f"\n{_SEPARATOR}") if logged else []
    begun = 0
    with progress(lambda: f"{begun} of {len(blocks)} revisions"):
        for block in blocks:
            begun += 1
            commit, date, rest = block.lstrip(f"\n{_SEPARATOR}").split(_SEPARATOR, 2)
            subject, *names = [line for line in rest.split("\n") if line]
            if names:
                entries: Mapping[Key, Entry] = {}
                # A merge conflict may have been committed, or the file been removed.
                with suppress(SnapshotError, UsageError):
                    entries = load(git(folder, "show", f"{commit}:{names[0]}")).entries
                found.append(Version(commit, date, subject, entries))
    return found


def _changed_in(versions: Sequence[Version], key: Key, figure: str) -> _Changes:
    """Return the versions in which a figure changed, with what it was from there on."""
    found: _Changes = []
    for one in reversed(versions):
        entry = one.entries.get(key)
        value = entry.figures.get(figure) if entry is not None else None
        if value is not None and (not found or found[-1][1] != value):
            found.append((one, value))
    return found[::-1]


def _table(key: Key, found: _Changes, figure: str) -> str:
    from tabulate import tabulate

    rows = []
    for (one, value), before in zip(found, [*found[1:], None], strict=True):
        change = format_change(before[1], value) if before is not None else ""
        rows.append((one.date, one.commit, format_size(value), change, one.subject))
    headers = ("date", "commit", label(figure), "change", "subject")
    text = tabulate(
        rows,
        headers=headers,
        colalign=("left", "left", "right", "right", "left"),
        disable_numparse=True,
    )
    lines = [line.rstrip() for line in text.splitlines()]
    if max(map(len, lines)) > columns():  # the subject of a commit has a line of its own
        short = tabulate([row[:4] for row in rows], headers=headers[:4], disable_numparse=True)
        first, rule, *others = short.splitlines()
        lines = [first, rule]
        for line, row in zip(others, rows, strict=True):
            lines += [line.rstrip(), *([f"  {row[4]}"] if row[4] else [])]
    return "\n".join(printable(line) for line in (str(key), *lines))


def _plain(lines: dict[Key, _Changes], figure: str) -> list[dict[str, Any]]:
    return [
        {
            "test": key.test,
            "name": key.name,
            "device": key.where,
            "figure": figure,
            "versions": [
                {"commit": one.commit, "date": one.date, "subject": one.subject, "bytes": value}
                for one, value in found
            ],
        }
        for key, found in lines.items()
    ]
