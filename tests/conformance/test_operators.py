"""torch's own samples of named operators, traced and measured: none may become worse."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest

from pytest_torchmem.interception.plan import remembered_plans
from pytest_torchmem.operators import machine

samples = pytest.importorskip("benchmarks.conformance.samples")
worker = pytest.importorskip("benchmarks.isolation.worker")

from operators import CLOSE, EXACT  # noqa: E402  (it stands beside this file)

from benchmarks.comparison import Comparison, Status  # noqa: E402

SAMPLES = 2
"""Of each operator, data type and layout, spread over all there are."""


@pytest.fixture(scope="module", autouse=True)
def samples_are_not_garbage() -> None:
    """Keep torch's sample makers out of the collections before each measurement."""
    samples.units()
    gc.collect()
    gc.freeze()


def compare(unit: Any) -> list[Comparison]:
    """Compare a unit's samples, without those that cannot run for real."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            worker.run_sample(f"{unit.case}/{sample.index}", sample)
            for sample in samples.samples(unit, SAMPLES)
        ]
    return [one for one in found if one.status is not Status.SKIPPED]


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_stays_as_it_is(name: str) -> None:
    suite, _, operator = name.partition(":")
    allowed = (Status.EXACT,) if name in EXACT else (Status.EXACT, Status.CLOSE)
    units = samples.units(f"^{operator}$", [suite])
    found = [one for unit in units for one in compare(unit)]
    assert found, f"torch has no samples of {name}"
    worse = [one for one in found if one.status not in allowed]
    assert not worse, [(one.case, one.error or one.causes) for one in worse]


def test_a_kernel_that_is_not_modelled_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_body", lambda name, device: None)
    remembered_plans.cache_clear()
    try:
        units = samples.units("^(histc|linalg.lstsq)$", ["op"], ["float32"], ["contiguous"])
        found = {one.status for unit in units for one in compare(unit)}
    finally:
        remembered_plans.cache_clear()
    assert found & {Status.DIFFERENT, Status.UNSUPPORTED}
