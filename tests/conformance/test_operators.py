"""torch's own samples of named operators: traced, they take what they are measured to take."""

import gc
import warnings
from functools import cache
from typing import Any

import pytest

from pytest_torchmem.interception.plan import remembered_plans
from pytest_torchmem.operators.spec import OnDevice, spec_of

samples = pytest.importorskip("benchmarks.conformance.samples")
worker = pytest.importorskip("benchmarks.isolation.worker")


from benchmarks.comparison import Comparison, Status  # noqa: E402
from tests.conformance.operators import CANNOT_RUN, OPERATORS  # noqa: E402

SAMPLES = 2
"""Of each operator, data type and layout, spread over all there are."""

COMPARED = (Status.EXACT, Status.CLOSE, Status.DIFFERENT)


@pytest.fixture(scope="module", autouse=True)
def samples_are_not_garbage() -> None:
    """Keep torch's sample makers out of the collections before each measurement."""
    samples.units()
    gc.collect()
    gc.freeze()


def compare(unit: Any) -> list[Comparison]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            worker.run_sample(f"{unit.case}/{sample.index}", sample)
            for sample in samples.samples(unit, SAMPLES)
        ]


@cache
def compared(name: str) -> dict[str, dict[str, int]]:
    """Return traced minus measured bytes of every figure that differs, by sample."""
    suite, _, operator = name.partition(":")
    found = [one for unit in samples.units(f"^{operator}$", [suite]) for one in compare(unit)]
    ran = [one for one in found if one.error != CANNOT_RUN.get(name)]
    assert ran, f"torch has no samples of {name}"
    assert [(one.case, one.error) for one in ran if one.status not in COMPARED] == []
    return {
        one.case: {
            figure: one.traced.get(figure, 0) - one.measured.get(figure, 0)
            for figure in {*one.traced, *one.measured}
            if one.traced.get(figure) != one.measured.get(figure)
        }
        for one in ran
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_every_figure_is_as_measured(name: str) -> None:
    assert {case: found for case, found in compared(name).items() if found} == {}


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_what_torch_refuses_is_refused_still(name: str) -> None:
    suite, _, operator = name.partition(":")
    units = samples.units(f"^{operator}$", [suite], layouts=["channels_last"])
    assert {one.error for unit in units for one in compare(unit)} == {CANNOT_RUN[name]}


def test_a_kernel_that_is_not_modelled_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnDevice, "decomposition", None, raising=False)
    spec_of.cache_clear()
    remembered_plans.cache_clear()
    try:
        units = samples.units("^(histc|linalg.lstsq)$", ["op"], ["float32"], ["contiguous"])
        found = {one.status for unit in units for one in compare(unit)}
    finally:
        remembered_plans.cache_clear()
    assert found & {Status.DIFFERENT, Status.UNSUPPORTED}
