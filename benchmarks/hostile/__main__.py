"""Runs that mean harm, by the thousand.

    python -m benchmarks.hostile [--runs 10000] [--seconds S] [--seed N] [--kind suites]

Each begins with a seed of its own, which a finding prints: ``--seed`` with ``--runs 1`` repeats it.
"""

import argparse
import contextlib
import gc
import importlib
import inspect
import math
import pkgutil
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import pytest_torchmem
from benchmarks.hostile.names import hostile_names
from benchmarks.hostile.project import Project
from benchmarks.hostile.replaced import hostile_replaced
from benchmarks.hostile.runs import hostile_file, hostile_neighbours, hostile_signal
from benchmarks.hostile.suites import hostile_suite
from benchmarks.hostile.traces import hostile_trace

KINDS = {
    "suites": hostile_suite,
    "signals": hostile_signal,
    "neighbours": hostile_neighbours,
    "files": hostile_file,
    "names": hostile_names,
    "replaced": hostile_replaced,
    "traces": hostile_trace,
}
TURNS = ("suites", "signals", "neighbours", "files", "names", "suites", "replaced", "traces")
"""Which kind comes next."""
_PACKAGES = ("_pytest", "pytest_torchmem")
_MINUTE = 60.0


def prepare() -> None:
    """Import what runs need, once, and keep the garbage collector of each away from it.

    pytest collects garbage three times a run; a walk over the objects of torch takes as long as all
    else of a run, and copies their pages into the process that was forked.
    """
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, package + "."
        ):
            if not module.name.endswith("__main__") and ".integrations." not in module.name:
                importlib.import_module(module.name)
    for device in ("cpu", "cuda"):  # what the first trace of a process writes stays
        pytest_torchmem.trace(torch.nn.Linear(1, 1), torch.ones(1), device=device)
    inspect.getmodule(sys._getframe())  # remembers the file of every module
    gc.collect()
    gc.freeze()


def attack(seed: int, kind: str) -> list[str]:
    """Make one run, or a few that belong together; return what was not as it must be."""
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
    prepare()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is stopped has its count
    began = told = time.monotonic()
    made, findings = Counter[str](), Counter[str]()
    with contextlib.suppress(KeyboardInterrupt):
        for seed in range(options.seed, options.seed + options.runs):
            now = time.monotonic()
            if now > began + options.seconds:
                break
            if now > told + _MINUTE:
                told = now
                print(_counted(made, findings, now - began), flush=True)
            kind = options.kind or TURNS[seed % len(TURNS)]
            found = attack(seed, kind)
            made[kind] += 1
            if found:
                findings[kind] += 1
                print(f"--kind {kind} --seed {seed} --runs 1", *found, sep="\n  ", flush=True)
    print(f"from seed {options.seed}:", _counted(made, findings, time.monotonic() - began))
    return bool(findings)


def _counted(made: Counter[str], findings: Counter[str], seconds: float) -> str:
    kinds = ", ".join(f"{kind} {made[kind]:,} ({findings[kind]})" for kind in made)
    total = f"{made.total():,} runs, {findings.total()} findings in {seconds:,.0f} s"
    return f"{total}; runs (findings) by kind: {kinds or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
