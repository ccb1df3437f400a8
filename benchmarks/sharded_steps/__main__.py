"""How traces of one rank compare with real processes.

    python -m benchmarks.sharded_steps [--world-size 2] [NAME...]

Each line is one rank and phase: the bytes of the trace, those of the real process without what gloo
took for itself, and those with it.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.conformance.report import machine
from benchmarks.sharded_steps.programs import PROGRAMS
from benchmarks.sharded_steps.real import run, without_gloo
from pytest_torchmem import trace

PHASES = ("forward_peak", "backward_peak", "optimizer_peak")


def main() -> None:
    """Run, compare, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as the real processes have: kernels take space for each thread
    with tempfile.TemporaryDirectory() as directory:
        real = run(options.names, options.world_size, Path(directory))
    rows = []
    for name in options.names:
        for rank, measured in enumerate(real[name]):
            traced = trace(PROGRAMS[name], host="here", world_size=options.world_size, rank=rank)
            own = without_gloo(measured)
            for phase in PHASES:
                found, expected = getattr(traced, phase), getattr(own, phase)
                difference = "" if found == expected else f"{(found - expected) / expected:+.2%}"
                rows.append(
                    [name, rank, phase, found, expected, getattr(measured, phase), difference]
                )
    headers = ["program", "rank", "phase", "trace", "real", "with gloo's", "difference"]
    print(tabulate(rows, headers, intfmt=","))
    print(f"\n{options.world_size} processes, torch {torch.__version__}, {machine()}")


if __name__ == "__main__":
    main()
