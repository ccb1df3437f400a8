"""What snapshots cost: 1,000 snapshot tests in one module, without the time of the traces.

Replaces the profiler by a double that returns at once a profile as large as that of a small
transformer, so that what is left is reading, comparing, explaining and writing. Compares with the
same tests that only make the profile:

    python benchmarks/snapshots.py [--tests 1000]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 5.0

_DOUBLE = """
import sys, types
from pytest_torchmem.profiler.profile import (
    Allocation, Kind, MemoryProfile, Origin, Phase, Timeline
)

ALLOCATIONS = tuple(
    Allocation(
        1000 + index,
        Kind.ACTIVATION,
        Origin(Phase.FORWARD, f"Net.layers.{index % 12}.part{index % 7}", f"aten::op{index % 15}",
               f"net.py:{index % 40}"),
    )
    for index in range(600)
)
EVENTS = (*range(1, 601), *(-index for index in range(600, 0, -1)))
PHASES = ((0, Phase.FORWARD), (500, Phase.BACKWARD))

def trace(target, *args, device="cpu", gpu=None, **kwargs):
    timeline = Timeline(ALLOCATIONS, EVENTS, PHASES)
    peak = sum(allocation.nbytes for allocation in ALLOCATIONS)
    return MemoryProfile(
        device=device, gpu=gpu, host=None, baseline=1000, forward_peak=peak - target,
        backward_peak=peak, optimizer_peak=None, peak=peak, retained=peak // 2, end=1000,
        torch_version="2.13.0", workload="w", timeline=timeline,
    )

double = types.ModuleType("pytest_torchmem.profiler.trace")
double.trace = trace
sys.modules[double.__name__] = double
"""
_TESTS = """
import os, pytest
from pytest_torchmem.profiler.trace import trace

@pytest.mark.parametrize("n", range({tests}))
def test_it(n{fixture}):
    {body}
"""


def main() -> int:
    """Measure, print the result, and return 1 if a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", type=int, default=1000)
    tests = parser.parse_args().tests
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        (project / "conftest.py").write_text(_DOUBLE)
        checks = "torchmem.check(n + int(os.environ.get('STEP', 0)), device='cpu')"
        write(project, tests, "", "trace(n)")
        base = min(run(project) for _ in range(3))
        write(project, tests, ", torchmem", checks)
        rows = {
            "write 1,000 new entries": run(project, "--torchmem-update"),
            "compare": min(run(project) for _ in range(3)),
            "rewrite every entry": run(project, "--torchmem-update", STEP="1"),
            "compare (strict)": run(project, "--torchmem-strict", STEP="1"),
        }
        size = (project / "__torchmem__" / "test_it.json").stat().st_size
    print(
        f"{tests} tests that only make a profile: {base:.2f} s; snapshot file {size / 1e6:.1f} MB"
    )
    worst = 0.0
    for what, seconds in rows.items():
        each = 1000 * (seconds - base) / tests
        worst = max(worst, each)
        print(f"{what}: {seconds:.2f} s, {each:.2f} ms a test more")
    print(f"limit: {LIMIT} ms a test: {'kept' if worst <= LIMIT else 'NOT kept'}")
    return 0 if worst <= LIMIT else 1


def write(project: Path, tests: int, fixture: str, body: str) -> None:
    """Write the test module."""
    (project / "test_it.py").write_text(_TESTS.format(tests=tests, fixture=fixture, body=body))


def run(project: Path, *options: str, **environment: str) -> float:
    """Return the seconds that pytest itself says a run took, from its start to its end."""
    kept = {key: value for key, value in os.environ.items() if key != "CI"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=project,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"(\d+) passed.* in ([0-9.]+)s", result.stdout)
    if match is None:
        raise SystemExit(result.stdout[-3000:] + result.stderr)
    return float(match.group(2))


if __name__ == "__main__":
    sys.exit(main())
