"""What torch's own CUDA code took for its samples, recorded, is what a trace gives anywhere.

One sample of each operator and module, a part of them, measured under the stand-in:

    torchmem stand-in -- python -m benchmarks.conformance_cuda --samples 1 --shard 1/10 \
        --dtypes float32 bfloat16 float16 complex64 --record tests/stand_in/recorded_figures.json
"""

from __future__ import annotations

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

_NO_BACKWARD = {
    "op:bfloat16": "bfloat16",
    "op:diagflat": "bfloat16 float16 float32",
    "op:float": "float32",
    "op:half": "float16",
    "op:linalg.vander": "float32",
    "op:masked.prod": "bfloat16 float16 float32",
    "op:masked.sum": "bfloat16 float16 float32",
    "op:meshgrid.list_of_tensors": "bfloat16 float16 float32",
    "op:meshgrid.variadic_tensors": "bfloat16 float16 float32",
    "op:repeat": "bfloat16 float16 float32",
    "op:sum": "bfloat16 float16 float32",
    "op:sum_to_size": "bfloat16 float16 float32",
    "op:tile": "bfloat16 float16 float32",
}
"""2 to 16 bytes of what is retained: the backward of these samples runs no operator, by which a
trace would know that the forward has ended."""
DIFFERENT = {
    *(f"{name}:{dtype}" for name, dtypes in _NO_BACKWARD.items() for dtype in dtypes.split()),
    "op:_batch_norm_with_update:float16",  # 250 bytes: a cast lives a request longer
}
"""Samples that differ, by operator and type."""
RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("recorded_figures.json").read_text(encoding="utf-8")
)
FIGURES = RECORDED.pop("figures")
TORCH, GPU = RECORDED.pop("torch"), RECORDED.pop("gpu")
SECONDS = 20
"""How long a run measures samples anew."""


def known_as(case: str) -> str:
    return ":".join(case.split(":")[:3])


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
    assert {one: found for one, found in apart.items() if known_as(one) not in DIFFERENT} == {}
    assert DIFFERENT.intersection(map(known_as, RECORDED)) == {*map(known_as, apart)}


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
    failed = [one for one in found if one.status in (Status.DIFFERENT, Status.UNSUPPORTED)]
    assert [one for one in failed if known_as(one.case) not in DIFFERENT] == []
