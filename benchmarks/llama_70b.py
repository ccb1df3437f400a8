"""Trace the training step of a 70-billion-parameter Llama in bf16 at 4,096 tokens.

python -m benchmarks.llama_70b
"""

import resource
import sys
import time
import warnings

import torch
from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks.conformance.report import machine
from benchmarks.language_models import LLAMA_70B
from pytest_torchmem.units import format_size


def main() -> int:
    """Build on ``meta``, trace, and print the time, this process's memory and the step's peaks."""
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    model = LLAMA_70B.build("meta", torch.bfloat16)
    inputs = LLAMA_70B.inputs("cpu")
    built = time.perf_counter()
    profile = torchmem.trace(model, device="cpu", **inputs)  # type: ignore[arg-type]
    traced = time.perf_counter()
    torchmem.trace(model, device="cpu", **inputs)  # type: ignore[arg-type]
    again = time.perf_counter()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = [
        ("parameters", f"{parameters:,}"),
        ("build on meta", f"{built - start:.2f} s"),
        ("first trace", f"{traced - built:.2f} s"),
        ("repeated trace", f"{again - traced:.2f} s"),
        ("most ever resident", format_size(most_resident())),
        *((name.replace("_", " "), format_size(size)) for name, size in profile.figures().items()),
    ]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(tabulate(rows, colalign=("left", "right"), disable_numparse=True))
    return 0


def most_resident() -> int:
    """Return the most bytes this process ever had in memory."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    sys.exit(main())
