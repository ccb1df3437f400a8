"""How much later pytest starts because of the plugin, and whether it imports torch.

Runs a project with one trivial test with and without the plugin, in pairs that alternate. Other
programs only ever make a run longer, so it is the fastest runs of either kind that are compared;
the quartiles of the pairs' differences show how much the machine was disturbed:

    python benchmarks/startup.py [--pairs 30]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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
            run(project, options)  # compiles what is not compiled yet
        differences = []
        times: dict[tuple[str, ...], list[float]] = {(): [], _WITHOUT: []}
        for index in range(pairs):
            order: list[tuple[str, ...]] = [(), _WITHOUT]
            measured = {options: run(project, options) for options in order[:: 1 - 2 * (index % 2)]}
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


def run(project: Path, options: tuple[str, ...]) -> float:
    """Return the milliseconds of processor time that one pytest run takes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {key: value for key, value in os.environ.items() if key != "CI"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    # The time of the processor is what the plugin costs; the clock also shows other programs.
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


if __name__ == "__main__":
    sys.exit(main())
