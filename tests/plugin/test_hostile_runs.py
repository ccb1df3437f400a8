"""A few runs of the benchmark that means harm, others each time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="runs are forked, and pipes are Linux's")
def test_hostile_runs_find_nothing(chance) -> None:
    seed = str(chance.randrange(10**9))
    command = [sys.executable, "-m", "benchmarks.hostile", "--runs", "4", "--seed", seed]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 runs" in result.stdout
