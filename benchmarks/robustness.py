"""Snapshot files under the worst that can happen to them: killed workers, and random edits.

Runs the tests that the suite runs in small with the numbers of a release: a worker of four killed
half-way through the update of 200 tests, ten times; and 10,000 random edits of a snapshot file for
each property (read or refused, what is read is what is written, an update loses nothing), with 500
of them through whole runs of pytest:

    python benchmarks/robustness.py [--kills 10] [--edits 10000]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent / "tests" / "plugin"


def main() -> int:
    """Run both, print what they came to, and return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--edits", type=int, default=10_000)
    options = parser.parse_args()
    versions = f"Python {platform.python_version()}, pytest {pytest.__version__}"
    print(f"{date.today().isoformat()}, {versions}, {os.cpu_count()} cores")
    killed = run(["test_update.py", "-k", "killed_half_way"], TORCHMEM_KILLS=options.kills)
    print(f"a worker of four killed half-way through 200 tests, {options.kills} times: {killed}")
    edited = run(["test_fuzz.py"], TORCHMEM_FUZZ=options.edits)
    print(f"{options.edits:,} random edits for each of two properties, a twentieth of them through")
    print(f"whole runs: {edited}")
    return 0 if "failed" not in killed + edited else 1


def run(arguments: list[str], **environment: int) -> str:
    """Return the last line of a run of the named tests, without its frame."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=TESTS,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"\d+ (passed|failed)[^=\n]*", result.stdout.splitlines()[-1])
    if match is None:
        raise SystemExit(result.stdout[-3000:] + result.stderr)
    seconds = time.monotonic() - started
    outcome = match.group(0).partition(" in ")[0]
    return f"{outcome} ({seconds:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
