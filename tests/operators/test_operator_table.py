"""The page of operators and the index of families are those that the records give."""

from benchmarks.operator_index import INDEX, text
from benchmarks.operator_table import PAGE, table, written


def test_the_page_has_the_records_and_their_paths() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run python -m benchmarks.operator_table --write"
    assert "`scaled_dot_product_attention`" in table()
    assert "`dropout`" in table()


def test_the_index_is_that_of_the_families() -> None:
    written = INDEX.read_text(encoding="utf-8")
    assert text() == written, "run python -m benchmarks.operator_index --write"
