"""Print how traces of programs of others compare with what a GPU counted.

python -m benchmarks.truth.programs benchmarks/truth/recorded/h200

``programs.json`` has each check's figures, traced and measured, as ``--torchmem-json`` wrote them;
the programs are not in this repository.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from tabulate import tabulate

from benchmarks import command

Figures: TypeAlias = dict[str, tuple[int, int]]
"""Traced and measured bytes, by figure."""
_ALLOCATORS = "allocated_peak", "reserved_peak"


def row(name: str, checks: Sequence[Figures]) -> tuple[object, ...]:
    """Return how many checks of a kind are equal, and how far the requested peak is off."""
    pairs = [[one[figure] for figure in one if figure not in _ALLOCATORS] for one in checks]
    requested = [all(traced == measured for traced, measured in own) for own in pairs]
    equal = [sum(one[name][0] == one[name][1] for one in checks) for name in _ALLOCATORS]
    off = [one["peak"][0] / one["peak"][1] - 1 for one in checks]
    near = sum(abs(one) <= 0.01 for one in off), sum(one == 0 for one in off)
    return name, len(checks), sum(requested), *equal, *near[::-1], f"{max(off, key=abs):+.1%}"


def main() -> None:
    """Read the recording and print the table."""
    parser = command("truth.programs", __doc__)
    parser.add_argument("recording", type=Path)
    recorded = json.loads((parser.parse_args().recording / "programs.json").read_text())
    print(", ".join(f"{name} {value}" for name, value in recorded["machine"].items()))
    rows = [row(name, [figures for _, figures in own]) for name, own in recorded["checks"].items()]
    heads = "checks", "number", "requested equal", "allocated equal", "reserved equal"
    print(tabulate(rows, headers=(*heads, "peaks equal", "within 1 %", "furthest peak")))


if __name__ == "__main__":
    main()
