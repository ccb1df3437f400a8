"""Show the allocations of one sample by both ways, side by side.

python -m benchmarks.conformance.explain op:nn.functional.conv2d:float32:contiguous:function/3
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks.conformance.samples import by_case, samples
from benchmarks.isolation.sample import NothingToDifferentiate, Sample
from pytest_torchmem import MemoryProfile


def main(arguments: Sequence[str]) -> int:
    """Print the figures and the events of each case given."""
    warnings.simplefilter("ignore")
    for unit, index in by_case(arguments):
        for sample in samples(unit):
            if sample.index == index:
                print(f"{unit.case}/{index}\n{sample.detail}\n")
                print(side_by_side(*profiles(sample)))
    return 0


def profiles(sample: Sample) -> tuple[MemoryProfile, MemoryProfile]:
    """Return a sample's trace and measurement."""
    options: dict[str, Any] = {**sample.options, **sample.kwargs}
    torch.manual_seed(0)
    try:
        measured = torchmem.measure(sample.target, *sample.args, **options)
    except NothingToDifferentiate:
        options["backward"] = False
        measured = torchmem.measure(sample.target, *sample.args, **options)
    return torchmem.trace(sample.target, *sample.args, host="here", **options), measured


def side_by_side(traced: MemoryProfile, measured: MemoryProfile) -> str:
    """Return the figures of both, and under them the events of each in their own order."""
    names = sorted({*traced.figures(), *measured.figures()})
    figures = [(name, traced.figures().get(name), measured.figures().get(name)) for name in names]
    rows = [
        (*(left or ("",) * 4), *(right or ("",) * 4))
        for left, right in zip_longest(events(traced), events(measured))
    ]
    headers = ("traced", "live", "phase", "operator", "measured", "live", "phase", "operator")
    return (
        tabulate(figures, headers=("figure", "traced", "measured"), intfmt=",")
        + "\n\n"
        + tabulate(rows, headers=headers, disable_numparse=True)
    )


def events(profile: MemoryProfile) -> Iterator[tuple[str, str, str, str]]:
    """Yield each request (+) and release (-) with the bytes live after it and its operator."""
    timeline = profile.timeline
    starts = dict(timeline.phases)
    phase, live = "", 0
    for position, event in enumerate(timeline.events):
        phase = starts[position].value if position in starts else phase
        allocation = timeline.allocations[abs(event) - 1]
        size = allocation.nbytes if event > 0 else -allocation.nbytes
        live += size
        yield f"{size:+,}", f"{live:,}", phase, allocation.origin.operator


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
