"""The console script ``torchmem``: compare reports or revisions, show and verify files, trace."""

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_torchmem import __version__
from pytest_torchmem.commands import console, files, traced
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.figures import FIGURES, label
from pytest_torchmem.printable import first_of, printable, printable_lines
from pytest_torchmem.reports import growth
from pytest_torchmem.reports.difference import (
    Difference,
    DifferenceKind,
    differences,
    failing,
    grouped,
    in_order,
    render,
    verdict,
)
from pytest_torchmem.reports.files import plain_cause, plain_changes
from pytest_torchmem.reports.layout import coloured, columns, joined, tabulated, wrapped
from pytest_torchmem.reports.sources import Source, load_sources
from pytest_torchmem.snapshots import calibration
from pytest_torchmem.snapshots.files import write
from pytest_torchmem.snapshots.format import Entry
from pytest_torchmem.snapshots.location import DIRECTORY, is_calibration
from pytest_torchmem.snapshots.store import Stored, read
from pytest_torchmem.snapshots.tolerance import parse_rules
from pytest_torchmem.targets.gpus import DEFAULT_GPU
from pytest_torchmem.units import format_size, format_step

KIND = "pytest-torchmem comparison"
SCHEMA = 1
_GREW = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status: 0, 1 on growth, 2 on an error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    with suppress(ImportError):  # completion in shells, for those who have it
        importlib.import_module("argcomplete").autocomplete(parser)
    options = parser.parse_args(given)
    console.prepare_streams()
    return console.status_of(lambda: _run(options, given))


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run a command. Raises ``UsageError`` for an argument of which nothing is left: a path would
    be this one. What follows ``--`` is another command's.
    """
    own = given[: given.index("--")] if "--" in given else given
    for before, argument in zip(("", *own), own, strict=False):
        is_option = argument.startswith("--")
        option, sign, value = argument.partition("=") if is_option else ("", "=", argument)
        if sign and not value.strip():
            named = option or (before if before.startswith("-") else "an argument")
            raise UsageError(
                f"{named} has an empty value. Is a variable not set? Else leave it out"
            )
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchmem", description="Compare and show the memory figures of pytest-torchmem."
    )
    parser.add_argument("--version", action="version", version=f"pytest-torchmem {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = commands.add_parser(
        "compare",
        help="compare two reports or two revisions' snapshots; exit 1 on growth",
        description="Compare BASE with HEAD. Exit 1 if a figure grew beyond its tolerance or a "
        "check of HEAD could not be evaluated, 2 on an error. BASE and HEAD are JSON reports "
        "(pytest --torchmem-json), snapshot files, directories of snapshot files, or git "
        "revisions.",
    )
    compare.add_argument("base", metavar="BASE")
    compare.add_argument("head", metavar="HEAD", nargs="?", help="default: the working tree")
    compare.add_argument("--tolerance", metavar="TOLERANCE", help="default: 1%%; such as 2%%+64KiB")
    compare.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    compare.add_argument("--output", metavar="FILE", type=Path, help="default: standard output")
    compare.set_defaults(run=_compare)
    show = commands.add_parser(
        "show",
        help="print a snapshot or calibration file, one figure a line, for git's textconv, or a "
        "saved profile",
        description="Print a snapshot file with one figure a line, each with its test, or a "
        "calibration file with one figure a line, each with its GPU, operator and geometry. Of a "
        "profile that torchmem trace --json or profile.save wrote, print its table.",
    )
    show.add_argument("file", metavar="FILE", type=Path)
    show.set_defaults(run=_show)
    cudnn = commands.add_parser(
        "cudnn",
        help="print what cuDNN takes for each layer of a step, on one or several GPUs",
        description="Trace a step and print the workspace that cuDNN takes for each of its "
        "convolutions and attentions, with the engine that it chooses and the copies that the "
        "workspace consists of. No GPU is needed. STEP is a function without arguments: it returns "
        "a module and its inputs, or runs a step itself.",
    )
    cudnn.add_argument("step", metavar="STEP", help="package.module:function or file.py:function")
    cudnn.add_argument(
        "--gpu",
        metavar="GPU",
        action="append",
        help=f"several are possible; default: {DEFAULT_GPU}",
    )
    cudnn.add_argument(
        "--cudnn",
        metavar="FOLDER",
        action="append",
        help="a folder that pip installed nvidia-cudnn-cu13 into (--target); several are possible; "
        "default: the cuDNN that is installed",
    )
    cudnn.set_defaults(run=_cudnn)
    verify = commands.add_parser(
        "verify",
        help="exit 1 if a snapshot or calibration file cannot be read or is in a merge conflict",
        description="Exit 1 if a snapshot or calibration file cannot be read or is in a merge "
        "conflict; for pre-commit.",
    )
    verify.add_argument(
        "files",
        metavar="FILE",
        type=Path,
        nargs="*",
        help="or a directory, for all such files below it",
    )
    verify.set_defaults(run=_verify)
    files.add_explain(commands)
    traced.add_commands(commands)
    files.add_commands(commands)
    traced.add_stand_in(commands)
    return parser


def _compare(options: argparse.Namespace) -> int:
    here = Path.cwd()
    base, head = load_sources(options.base, options.head, here)
    if not (base.entries or base.unchecked or head.entries or head.unchecked):
        raise UsageError(
            f"there is nothing to compare: neither {base.name} nor {head.name} contains a check. "
            "Name a report, a snapshot file, a git revision, or a directory above __torchmem__"
        )
    rules = parse_rules(options.tolerance, "--tolerance")
    found = differences(base.entries, head.entries, rules)
    unchecked = [
        Difference(f"{file}::{key.test}", key.name, key.where, DifferenceKind.FAILED, note=why)
        for (file, key), why in head.unchecked.items()
    ]
    tests = {difference.test for difference in unchecked}
    kept = [d for d in found if d.group is not DifferenceKind.GONE or d.test not in tests]
    found = in_order([*kept, *unchecked])
    groups = grouped(found)
    if options.format == "markdown":
        title = f"Memory snapshots, {base.name} → {head.name}"
        text = render(found, base.name, head.name, title=title)
    elif options.format == "json":
        text = json.dumps(_plain(found, base, head), indent=2) + "\n"
    else:
        text = _text(groups, base, head)
    if options.output is None:
        sys.stdout.write(coloured(text, sys.stdout) if options.format == "text" else text)
    else:
        write(options.output, text)
        print(printable(f"{verdict(groups)}: {options.output}"))
    return _GREW if any(failing(difference) for difference in found) else 0


def _text(groups: dict[DifferenceKind, list[Difference]], base: Source, head: Source) -> str:
    lines = [printable(f"{base.name} -> {head.name}: {verdict(groups)}")]
    for group, members in groups.items():
        if group is DifferenceKind.SAME:
            continue
        rows = [tuple(map(printable, _row(difference))) for difference in members]
        table = tabulated(rows, ("test", "device", "figure", "base", "head", "change", ""))
        if max(map(len, table)) > columns():
            table = []  # the test, and below it its figure
            for test, device, figure, before, now, change, note in rows:
                sides = " -> ".join(side for side in (before, now) if side != "-")
                step = f"  {figure} {sides}{f', {change}' if change else ''}" if sides else ""
                more = wrapped(note, "  ", start="  ") if note else ""
                table += filter(None, (f"{test}, {device}", step, more))
        lines += ["", group.value, *table]
        lines += _causes(members)
    return printable_lines("\n".join(lines) + "\n")


def _causes(members: Iterable[Difference]) -> Iterator[str]:
    """Yield each cause once, with its place, what changed, and the tests that share it."""
    found = growth.by_cause((difference, difference.diagnosis) for difference in members)
    for (why, place), sharing in found.items():
        first, diagnosis = sharing[0], sharing[0].diagnosis
        yield ""
        yield wrapped(f"{first_of([f'{first.test}, {first.device}', *sharing[1:]])}: {why}", "    ")
        if place:
            yield wrapped(place, "    ", start="  ")
        if diagnosis is not None:
            yield from growth.others(diagnosis)
            yield growth.section(diagnosis).text()


def _row(difference: Difference) -> tuple[str, ...]:
    name, change = difference.title, difference.main
    if change is None:
        size = format_size((difference.figures or {}).get("peak"))
        sides = (size, "-") if difference.group is DifferenceKind.GONE else ("-", size)
        return (name, difference.device, "peak", *sides, "", difference.note)
    sizes = format_step(change.before, change.now)
    return (name, difference.device, label(change.figure), *sizes, difference.note)


def _plain(found: Iterable[Difference], base: Source, head: Source) -> dict[str, Any]:
    found = list(found)
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "version": __version__,
        "base": base.name,
        "head": head.name,
        "failed": sum(failing(difference) for difference in found),
        "differences": [
            {
                "test": difference.test,
                "name": difference.name,
                "device": difference.device,
                "group": difference.group.name.lower(),
                "changes": plain_changes(difference.changes),
                "figures": dict(difference.figures or {}),
                "note": difference.note,
                "causes": [*map(plain_cause, diagnosis.causes if diagnosis is not None else ())],
                "grew": [one._asdict() for one in growth.told(diagnosis)],
            }
            for difference in found
            for diagnosis in [difference.diagnosis]
        ],
    }


def _show(options: argparse.Namespace) -> int:
    if options.file.is_dir():
        raise UsageError(f"{options.file} is a directory: name one of its files")
    if options.file.exists() and console.is_profile(options.file):
        from pytest_torchmem.profile.profile import MemoryProfile

        console.print_profile(MemoryProfile.load(options.file))
        return 0
    stored, shown = _read(options.file)
    if not stored.exists:
        raise UsageError(f"{options.file} does not exist")
    if stored.conflicted:
        # A diff of a file in conflict is about the conflict.
        sys.stdout.write(printable_lines(stored.text))
        return 0
    for line in shown:
        print(printable(line))
    return 0


def _cudnn(options: argparse.Namespace) -> int:
    from pytest_torchmem.reports.cudnn_table import columns, render

    step = console.load_function(options.step)
    with console.elapsed("asking cuDNN"):
        found = columns(step, options.gpu or [DEFAULT_GPU], options.cudnn or [])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    sys.stdout.write(printable_lines(render(found, max(width, 80))))
    return 0


def _verify(options: argparse.Namespace) -> int:
    if not options.files:
        raise UsageError(f"no file is named: torchmem verify tests/{DIRECTORY}/*.json, or a folder")
    bad = 0
    for file in (one for path in options.files for one in _files_at(path)):
        try:
            stored, _ = _read(file)
            problem = stored.conflict_message if stored.conflicted else ""
            problem = problem if stored.exists else f"{file} does not exist"
        except SnapshotError as error:
            problem = str(error)
        if problem:
            bad += 1
            print(f"torchmem: {printable(problem)}", file=sys.stderr)
    return 1 if bad else 0


def _files_at(path: Path) -> list[Path]:
    """Return a file itself, and of a directory all snapshot and calibration files below it."""
    if not path.is_dir():
        return [path]
    found = sorted(one for one in path.resolve().rglob("*.json") if one.parent.name == DIRECTORY)
    if not found:
        raise UsageError(f"{path} has no snapshot file, such as {DIRECTORY}/test_net.json")
    return [path / one.relative_to(path.resolve()) for one in found]


def _read(file: Path) -> tuple[Stored[Any, Any], Iterator[str]]:
    """Return a snapshot or calibration file, and how it is shown."""
    if is_calibration(file.resolve()):
        found = calibration.read_calibration_file(file)
        return found, _figures(found)
    stored = read(file)
    return stored, (
        f"{key}: {line}" for key in sorted(stored.entries) for line in _lines(stored.entries[key])
    )


def _figures(stored: calibration.StoredCalibration) -> Iterator[str]:
    for place, figure in sorted(stored.entries.items(), key=lambda item: item[0]):
        yield f"{calibration.place_name(place)}: workspace {_exact(figure.workspace)}"
        if figure.reserve is not None:
            yield f"{calibration.place_name(place)}: reserve {_exact(figure.reserve)}"


def _lines(entry: Entry) -> Iterable[str]:
    yield f"torch {entry.torch}" + (f", workload {entry.workload}" if entry.workload else "")
    if entry.reason is not None:
        yield f"reason: {entry.reason}"
    if entry.tolerance is not None:
        yield f"tolerance: {json.dumps(entry.tolerance)}"
    for figure in FIGURES:
        if figure in entry.figures:
            yield f"{label(figure)} {_exact(entry.figures[figure])}"
    for gpu, measured in sorted(entry.measured.items()):
        for figure, nbytes in measured.figures.items():
            yield f"{label(figure)} measured on {gpu} {_exact(nbytes)}, torch {measured.torch}"
    for topic, known in entry.facts.items():
        for name, value in known.items():
            yield f"{topic}: {name}: {value if isinstance(value, str) else json.dumps(value)}"
    yield from _alive(entry)


def _alive(entry: Entry) -> Iterable[str]:
    """Yield a line for each group at each moment, without what changes when a line moves."""
    if entry.alive is None:
        return
    for moment in entry.alive.moments:
        for group in entry.alive.groups:
            if moment in group.counts:
                what, total = group.what, format_size(group.nbytes(moment))
                name = joined(what.role, what.source, what.module)
                tensor = what.tensor or format_size(what.nbytes)
                yield f"at the {label(moment)}, {group.counts[moment]} × {tensor}, {name}: {total}"


def _exact(nbytes: int) -> str:
    return f"{format_size(nbytes)} ({nbytes:,} B)"


if __name__ == "__main__":
    sys.exit(main())
