"""The index of families names every operator that they speak of, so that none is missed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.operator_index import text
from pytest_torchmem.operators import index


def test_the_index_is_that_of_the_families() -> None:
    written = Path(index.__file__).read_text(encoding="utf-8")
    assert text() == written, "run python -m benchmarks.operator_index --write"
