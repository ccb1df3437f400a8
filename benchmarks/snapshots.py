"""What snapshots cost: 1,000 snapshot tests in one module, without the time of the traces.

Replaces the profiler by a double that returns at once a profile as large as that of a small
transformer, so that what is left is reading, comparing, explaining and writing. Compares with the
same tests that only make the profile. Times are the processor's, user and system, of whole runs,
the best of three: they say the same on a machine that does other things besides:

    python -m benchmarks.snapshots [--tests 1000]
"""

import argparse
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

LIMIT = 5.0

_DOUBLE = """
import sys, types
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline

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

double = types.ModuleType("pytest_torchmem.tracing.trace")
double.trace = trace
sys.modules[double.__name__] = double
"""
_TESTS = """
import os, pytest
from pytest_torchmem.tracing.trace import trace

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
        base = best_of_three(project)
        write(project, tests, ", torchmem", checks)
        file = project / "__torchmem__" / "test_it.json"
        rows = {}
        rows["write new entries"] = best_of_three(project, "--torchmem-update", without=file)
        rows["compare"] = best_of_three(project)
        rows["compare (strict)"] = best_of_three(project, "--torchmem-strict")
        rows["rewrite every entry"] = best_of_three(project, "--torchmem-update", steps=(1, 2, 3))
        size = file.stat().st_size
    print(f"Python {platform.python_version()}, pytest {pytest.__version__}")
    print(f"{tests} tests that only make a profile: {base:.2f} s; file of {size / 1e6:.1f} MB")
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


def best_of_three(
    project: Path,
    *options: str,
    without: Path | None = None,
    steps: tuple[int, int, int] = (0, 0, 0),
) -> float:
    """Return the seconds of the best of three runs, each without a file, or with another size."""
    seconds = []
    for step in steps:
        if without is not None:
            without.unlink(missing_ok=True)
        seconds.append(run(project, *options, STEP=str(step)))
    return min(seconds)


def run(project: Path, *options: str, **environment: str) -> float:
    """Return the processor seconds that a run took, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    kept = {key: value for key, value in os.environ.items() if key != "CI"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=project,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if re.search(r"\d+ passed.* in ", result.stdout) is None or result.returncode:
        raise SystemExit(result.stdout[-3000:] + result.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
