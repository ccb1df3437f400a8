"""How much later pytest starts because of the plugin, and whether it imports torch.

Runs a project with one trivial test with and without the plugin, in pairs that alternate. Other
programs only ever make a run longer, so it is the fastest runs of either kind that are compared;
the quartiles of the pairs' differences show how much the machine was disturbed:

    python -m benchmarks.startup [--pairs 30]
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.snapshots import run

LIMIT = 5.0
_WITHOUT = ("-p", "no:torchmem")
_TEST = """
import sys

def test_nothing():
    assert "torch" not in sys.modules, "the plugin imported torch"
"""


def main() -> int:
    """Measure, print the result, and return 1 if it is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        (project / "test_nothing.py").write_text(_TEST)
        options: tuple[str, ...]
        for options in ((), _WITHOUT):
            run(project, *options)  # compiles what is not compiled yet
        differences = []
        times: dict[tuple[str, ...], list[float]] = {(): [], _WITHOUT: []}
        for index in range(pairs):
            order: list[tuple[str, ...]] = [(), _WITHOUT]
            measured = {
                options: 1000 * run(project, *options) for options in order[:: 1 - 2 * (index % 2)]
            }
            differences.append(measured[()] - measured[_WITHOUT])
            for options, spent in measured.items():
                times[options].append(spent)
    added = min(times[()]) - min(times[_WITHOUT])
    spread = statistics.quantiles(differences, n=4)
    print(f"pytest without the plugin: {min(times[_WITHOUT]):.1f} ms (fastest of {pairs} runs)")
    print(f"added by the plugin: {added:.1f} ms")
    print("pairs' differences, quartiles: " + ", ".join(f"{value:.1f}" for value in spread))
    print(f"limit: {LIMIT} ms: {'kept' if added <= LIMIT else 'NOT kept'}")
    return 0 if added <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
