"""The table of docs/cuda-operators.md is the one that the records give."""

from benchmarks.operator_table import PAGE, table, written


def test_the_page_has_the_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run python -m benchmarks.operator_table --write"


def test_every_path_stands_in_the_table() -> None:
    assert "`scaled_dot_product_attention`" in table()
    assert "`dropout`" in table()
