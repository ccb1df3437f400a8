"""Links of the documentation to files that are not pages lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the repository's address, which pyproject.toml has, before links that leave ``docs``."""
    found = re.search(r'^Source = "(.*)"', _PROJECT.read_text(encoding="utf-8"), re.M)
    assert found is not None
    up = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\]\({re.escape(up)}(?!\.)", f"]({found[1]}/blob/main/", markdown)
