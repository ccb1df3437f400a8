"""What torch's own CUDA code took for its samples, recorded, is what a trace gives anywhere.

One sample of each operator and module, a part of them, measured under the stand-in:

    torchmem stand-in -- python -m benchmarks.conformance_cuda --samples 1 --shard 1/10 \
        --dtypes float32 bfloat16 float16 complex64 --record tests/stand_in/recorded_figures.json
"""

import json
import os
import random
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import conformance_cuda
from benchmarks.comparison import Comparison, Status
from benchmarks.conformance import samples

RECORDED = json.loads(Path(__file__).with_name("recorded_figures.json").read_text("utf-8"))
FIGURES = RECORDED.pop("figures")
TORCH, GPU = RECORDED.pop("torch"), RECORDED.pop("gpu")
SECONDS = 20
"""How long a run measures samples anew."""


def compare(unit: Any) -> list[Comparison]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            (one,) = samples.samples(unit, 1)
        except Exception:  # torch has none of this type
            return []
        return [conformance_cuda.run_sample(f"{unit.case}/{one.index}", one, lambda: None, GPU)]


def test_traces_are_as_recorded() -> None:
    if torch.__version__.partition("+")[0] != TORCH.partition("+")[0]:
        pytest.skip(f"recorded with torch {TORCH}")
    if torch.cuda.is_available():
        pytest.skip("what is measured here is compared below")
    wanted = {case.rpartition("/")[0] for case in RECORDED}
    units = samples.units(".", ("op", "module"), tuple(samples.DTYPES), samples.LAYOUTS[:1])
    apart, met = {}, set()
    for unit in units:
        for found in compare(unit) if unit.case in wanted else ():
            if found.case in RECORDED:
                met.add(found.case)
                traced = [found.traced.get(name, 0) for name in FIGURES]
                if traced != RECORDED[found.case]:
                    apart[found.case] = traced, RECORDED[found.case], found.error
    assert met == set(RECORDED)
    assert apart == {}


@pytest.mark.skipif("STAND_IN_NAME" not in os.environ, reason="runs by: torchmem stand-in")
def test_a_drawn_part_is_measured_anew() -> None:
    units = samples.units(".", ("op", "module"), tuple(samples.DTYPES), samples.LAYOUTS[:1])
    seed = random.SystemRandom().randrange(1 << 32)
    random.Random(seed).shuffle(units)
    start, found = time.monotonic(), list[Comparison]()
    for unit in units:
        if time.monotonic() - start > SECONDS:
            break
        found += compare(unit)
    judged = [one for one in found if one.status in (Status.EXACT, Status.DIFFERENT)]
    print(f"seed {seed}: {len(judged)} of {len(found)} samples judged")
    assert len(judged) > len(found) / 2
    assert [one for one in found if one.status in (Status.DIFFERENT, Status.UNSUPPORTED)] == []
