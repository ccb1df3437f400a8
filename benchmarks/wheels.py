"""Trace the same samples on fake cuda under two installations of torch, and compare the bytes.

python -m benchmarks.wheels /venv-a/bin/python /venv-b/bin/python
python -m benchmarks.wheels a/bin/python b/bin/python -- --suites zoo -k bert

Each interpreter runs ``python -m benchmarks.conformance_cuda``, with what follows ``--``. What fake
cuda says must not depend on the build (with CUDA or without); between versions it differs where
an operator does, and the table names those operators.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tabulate import tabulate

from benchmarks.comparison import Comparison, Status
from benchmarks.conformance import report


@dataclass(frozen=True, slots=True)
class Difference:
    """One sample that the two installations do not agree on."""

    case: str
    detail: str
    kind: str
    """The figure that differs first, or what one of them did not do."""
    first: str
    second: str
    operators: str
    """What made storages in one of them only."""


def compare(first: Iterable[Comparison], second: Iterable[Comparison]) -> list[Difference]:
    """Return the samples of both that do not have the same figures."""
    theirs = _by_sample(second)
    return [
        difference
        for key, one in _by_sample(first).items()
        if (other := theirs.get(key)) is not None
        and (difference := _difference(one, other)) is not None
    ]


def alone(first: Iterable[Comparison], second: Iterable[Comparison]) -> tuple[int, int]:
    """Return how many samples only one of the two has; versions of torch differ in theirs."""
    mine, theirs = _by_sample(first), _by_sample(second)
    return len(mine.keys() - theirs.keys()), len(theirs.keys() - mine.keys())


def _by_sample(comparisons: Iterable[Comparison]) -> dict[tuple[str, str, int], Comparison]:
    """Return comparisons by unit and arguments: a sample's index is another in another version."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for comparison in comparisons:
        unit = comparison.case.rpartition("/")[0]
        key = unit, comparison.detail
        found[unit, comparison.detail, seen[key]] = comparison
        seen[key] += 1
    return found


def _difference(one: Comparison, other: Comparison) -> Difference | None:
    if one.status is not other.status:
        states = [
            comparison.status.value if comparison.status is not Status.EXACT else "completed"
            for comparison in (one, other)
        ]
        return Difference(
            one.case, one.detail, "status", states[0], states[1], one.error or other.error
        )
    for figure in one.traced.keys() | other.traced.keys():
        values = one.traced.get(figure), other.traced.get(figure)
        if values[0] != values[1]:
            texts = [f"{value:,}" if value is not None else "-" for value in values]
            return Difference(
                one.case, one.detail, figure, texts[0], texts[1], _operators(one, other)
            )
    return None


def _operators(one: Comparison, other: Comparison) -> str:
    counts = []
    for comparison in (one, other):
        pairs = [cause.split(" ", 1) for cause in comparison.causes]
        counts.append(Counter({name: int(number) for number, name in pairs}))
    only = [
        f"{sign}{number} {name}"
        for sign, left in (("-", counts[0] - counts[1]), ("+", counts[1] - counts[0]))
        for name, number in sorted(left.items())
    ]
    return ", ".join(only) or "the same operators, other sizes"


def table(differences: Iterable[Difference]) -> str:
    """Return one line per operator or model: how many of its samples differ, and an example."""
    groups: dict[str, list[Difference]] = defaultdict(list)
    for difference in differences:
        groups[report.operator_of(difference.case)].append(difference)
    rows = [
        (name, len(found), found[0].kind, found[0].first, found[0].second, found[0].operators[:90])
        for name, found in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    headers = ("samples of", "differ", "first", "one", "other", "made by one (-), other (+) only")
    return tabulate(rows, headers=headers, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both interpreters and print what differs; return 1 if anything does."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wheels", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("interpreters", nargs=2, type=Path, help="python of each installation")
    parser.add_argument("--keep", type=Path, help="directory for the results, read where there")
    given = list(sys.argv[1:] if arguments is None else arguments)
    passed = given[given.index("--") + 1 :] if "--" in given else []
    options = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    with TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        files = [directory / f"{position}.json" for position in ("one", "other")]
        for interpreter, file in zip(options.interpreters, files, strict=True):
            if not file.exists():
                _run(interpreter, file, passed)
        one, other = (report.read(file) for file in files)
    differences = compare(one, other)
    for interpreter in options.interpreters:
        print(version_of(interpreter))
    mine, theirs = alone(one, other)
    print(f"{len(one) - mine} samples of both; only one has {mine}, only the other {theirs}")
    print(f"{len(differences)} differ")
    print(table(differences))
    return int(bool(differences) or len(one) == mine)


def _run(interpreter: Path, file: Path, passed: Sequence[str]) -> None:
    command = [str(interpreter), "-m", "benchmarks.conformance_cuda", "--output", str(file)]
    # Its exit status says whether samples were left out, which the comparison does too.
    subprocess.run([*command, *passed], check=False, stdout=subprocess.DEVNULL, env=environment())
    if not file.exists():
        raise SystemExit(f"{interpreter} -m benchmarks.conformance_cuda wrote no results")


def version_of(interpreter: Path) -> str:
    """Return which torch an interpreter has, and built for which CUDA."""
    code = "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda)"
    done = subprocess.run([str(interpreter), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """Return the environment with this checkout first: an interpreter may have none installed."""
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": root}


if __name__ == "__main__":
    sys.exit(main())
