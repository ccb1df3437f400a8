"""How long ``largest`` takes to find the largest batch of a decoder with a billion parameters.

    python -m benchmarks.largest [--gpus h100,a100-80gb,rtx-4090] [--sequence 2048]

The model has the shapes of Llama 3.2 1B (its published config.json), in bfloat16 on ``meta``, and
AdamW. Processor time of the search alone, in this process, after one that finds nothing: what is
imported and cached then is left out, and told by itself.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks.language_models import LLAMA_1B
from pytest_torchmem.units import format_size

LIMIT = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.largest")
    parser.add_argument("--gpus", default="h100,a100-80gb,rtx-4090")
    parser.add_argument("--sequence", type=int, default=2048)
    options = parser.parse_args(arguments)
    model = LLAMA_1B.build("meta", torch.bfloat16)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e9:.2f} billion parameters, sequences of {options.sequence}")

    def build(batch: int) -> tuple[Any, ...]:
        words = torch.zeros(batch, options.sequence, dtype=torch.long, device="meta")
        return model, {"input_ids": words, "labels": words}

    start = time.process_time()
    torchmem.largest(build, memory="1 GiB", gpu="rtx-4090", optimizer=torch.optim.AdamW)
    print(f"the first, which does not fit: {time.process_time() - start:.2f} s")
    rows = []
    for gpu in options.gpus.split(","):
        start = time.process_time()
        found = torchmem.largest(build, gpu=gpu, optimizer=torch.optim.AdamW)
        seconds = time.process_time() - start
        reserved = found.profile.reserved_peak if found.profile is not None else None
        shown = format_size(reserved) if reserved is not None else "-"
        rows.append((gpu, found.size, shown, found.traces, f"{seconds:.2f}"))
    print(tabulate(rows, ("gpu", "largest batch", "reserved", "traces", "seconds")))
    return int(any(float(row[-1]) > LIMIT for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
