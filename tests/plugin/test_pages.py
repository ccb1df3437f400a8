"""``--torchmem-html``: a page for each check that failed, and an index."""

import json
import re
from pathlib import Path

import pytest


def pages(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_page_for_each_check_that_fails(stored, workers: int) -> None:
    stored.width(128)
    options = ["-n", str(workers)] if workers else []
    stored.run("--torchmem-html=out", *options)
    written = pages(stored.path / "out")
    index = (stored.path / "out" / "index.html").read_text()
    links = re.findall(r'href="([^"]+\.html)"', index)
    assert sorted([*links, "index.html"]) == written
    assert "3 of 3 memory checks failed" in index
    assert ":root{color-scheme:light dark}" in index  # of the body alone, the page stays white
    page = (stored.path / "out" / links[0]).read_text()
    assert re.search(r"\+6\.50 KiB \(\+97\.3 %\) backward peak\b", page)
    assert '"before":{"baseline"' in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["earlier"]) == len(data["totals"])
    assert max(data["earlier"]) == data["before"]["peak"] < max(data["totals"])


def test_the_index_of_a_run_that_passes(stored) -> None:
    stored.run("--torchmem-html=out")
    assert pages(stored.path / "out") == ["index.html"]
    assert "0 of 3 memory checks failed" in (stored.path / "out" / "index.html").read_text()


def test_pages_that_cannot_be_written(stored) -> None:
    stored.width(128)
    (stored.path / "out").write_text("a file")
    stored.run("--torchmem-html=out").tells("*a page cannot be written*")
    assert (stored.path / "out").read_text() == "a file"
