"""The index of families names every operator that they speak of, so that none is missed."""

from benchmarks.operator_index import INDEX, text


def test_the_index_is_that_of_the_families() -> None:
    written = INDEX.read_text(encoding="utf-8")
    assert text() == written, "run python -m benchmarks.operator_index --write"
