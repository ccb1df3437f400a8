"""``torchmem explain``: what is different between two profiles, snapshots or revisions, and why."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_torchmem.commands.console import is_profile
from pytest_torchmem.diagnosis.diagnose import diagnose
from pytest_torchmem.errors import UsageError
from pytest_torchmem.printable import counted, printable_lines
from pytest_torchmem.reports.growth import others, place, section, why
from pytest_torchmem.reports.layout import coloured, comparison_table, wrapped
from pytest_torchmem.reports.sources import Source, aligned, load_source
from pytest_torchmem.snapshots.alive import MOMENTS
from pytest_torchmem.snapshots.compare import Verdict, compare, entry_of
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.tolerance import parse_rules

_EXACTLY = (parse_rules("0", "torchmem explain"),)


def add_command(commands: Any) -> None:
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
    parts = [name, comparison_table({name: comparison.told}, "before")]
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
