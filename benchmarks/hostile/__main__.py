"""Runs that mean harm, by the thousand.

    python -m benchmarks.hostile [--runs 10000] [--seconds S] [--seed N] [--kind suites]

Each begins with a seed of its own, which a finding prints: ``--seed`` with ``--runs 1`` repeats it.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.hostile.project import Project
from benchmarks.hostile.runs import hostile_file, hostile_neighbours, hostile_signal
from benchmarks.hostile.suites import hostile_suite


def _threads(project: Project, chance: random.Random) -> list[str]:
    from benchmarks.hostile.threads import hostile_threads  # traces for real, and imports it all

    return hostile_threads(project, chance)


KINDS = {
    "suites": hostile_suite,
    "signals": hostile_signal,
    "neighbours": hostile_neighbours,
    "files": hostile_file,
    "threads": _threads,
}
TURNS = ("suites", "signals", "neighbours", "files", "suites") * 2 + ("threads",)
"""Which kind comes next; traces take the longest."""
_PLUGIN = ("hooks", "fixture", "settings", "run", "header", "expected", "skipped")
_NEEDED = (
    "tabulate",
    "pytest_torchmem.step.program_state",  # and torch
    *(f"pytest_torchmem.plugin.{name}" for name in _PLUGIN),
    "pytest_torchmem.reports.terminal",
    "pytest_torchmem.reports.files",
    "pytest_torchmem.profile.profile",
)
"""What each run would import, and what takes longer than all else of it."""


def attack(seed: int, kind: str) -> list[str]:
    """Make one run, or a few that belong together; return what was not as it must be."""
    for name in _NEEDED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as directory:
        try:
            return KINDS[kind](Project(Path(directory)), random.Random(seed))
        except TimeoutError as error:
            return [str(error)]


def main() -> int:
    """Print how many of each kind ran, and what they found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    parser.add_argument("--kind", choices=KINDS, help="default: each in turn")
    options = parser.parse_args()
    until, made, findings = time.monotonic() + options.seconds, Counter[str](), Counter[str]()
    for number in range(options.runs):
        if time.monotonic() > until:
            break
        seed = options.seed + number
        kind = options.kind or TURNS[seed % len(TURNS)]
        found = attack(seed, kind)
        made[kind] += 1
        if found:
            findings[kind] += 1
            print(f"--kind {kind} --seed {seed} --runs 1", *found, sep="\n  ", flush=True)
    for kind in made:
        print(f"{kind}: {made[kind]:,} runs, {findings[kind]} findings")
    print(f"{made.total():,} runs from seed {options.seed}, {findings.total()} findings")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
