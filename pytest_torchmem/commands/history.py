"""``torchmem history``: a test's figures over the git log of its snapshot."""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pytest_torchmem.commands.console import progress
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.figures import FIGURES, label
from pytest_torchmem.printable import printable
from pytest_torchmem.profile.pictures.svg import Line, Point, history_svg
from pytest_torchmem.reports.layout import columns
from pytest_torchmem.snapshots.files import git, write
from pytest_torchmem.snapshots.format import Entry, Key, load
from pytest_torchmem.snapshots.location import snapshot_path
from pytest_torchmem.units import format_change, format_size

_SEPARATOR = "\x1f"
_NOW = "working tree"


class Version(NamedTuple):
    commit: str
    """Shortened; "" for the working tree."""
    date: str
    subject: str
    entries: dict[Key, Entry]


def add_command(commands: Any) -> None:
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


def _history(options: argparse.Namespace) -> int:
    file, separator, test = options.test.partition("::")
    if not separator or not file or not test:
        raise UsageError(f"{options.test!r}: write FILE::TEST, such as tests/test_net.py::test_it")
    if options.limit is not None and options.limit < 1:
        raise UsageError("--limit: expected at least 1")
    path = Path(file) if file.endswith(".json") else snapshot_path(Path(file))
    versions = _versions(path, test, options.limit)
    figure = options.figure
    keys = sorted({key for one in versions for key in one.entries})
    lines = {key: _changes(versions, key, figure) for key in keys}
    lines = {key: found for key, found in lines.items() if found}
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


def _versions(path: Path, test: str, limit: int | None) -> list[Version]:
    """Return what the commits of a snapshot file say of a test, the latest first."""
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
        now = load(path.read_text("utf-8")).entries
        found.append(Version("", _NOW, "", _of_test(now, test)))
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
                found.append(Version(commit, date, subject, _of_test(entries, test)))
    return found


def _of_test(entries: Mapping[Key, Entry], test: str) -> dict[Key, Entry]:
    return {key: entry for key, entry in entries.items() if key.test == test}


def _changes(versions: Sequence[Version], key: Key, figure: str) -> _Changes:
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
    for place, (one, value) in enumerate(found):
        before = found[place + 1][1] if place + 1 < len(found) else None
        change = format_change(before, value) if before is not None else ""
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
