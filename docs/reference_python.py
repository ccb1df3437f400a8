"""The reference of Python: ``python docs/reference_python.py`` writes it from docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest_torchmem
from pytest_torchmem import MemoryProfile, errors
from pytest_torchmem.plugin import hookspec

PAGES = [Path(__file__).with_name(name) for name in ("reference-python.md", "reference-profile.md")]
LINKS = {
    "node_table": "graphs.md",
    "graph_profile": "graphs.md",
    "advise": "tasks/lower-the-peak.md",
    "suggestions": "tasks/lower-the-peak.md",
    "advised": "tasks/lower-the-peak.md",
    "scaling": "tasks/sizes.md",
    "largest": "tasks/sizes.md",
    "calibrate": "calibration.md",
    "Gpu": "extending.md#gpus",
    "OperatorModel": "extending.md#custom-operators",
    "Torchmem": "reference.md#the-fixture-torchmem",
    "plan": "graphs.md",
    "level": "tasks/compiled.md",
    "values": "values.md",
    "facts": "snapshot-file.md",
    "load": "pictures.md#a-recording-of-a-real-gpu",
    "to_html": "pictures.md",
    "allocated_peak": "#requested-allocated-reserved",
    "reserved_peak": "#requested-allocated-reserved",
    "host_peak": "#the-hosts-memory",
}


def _markdown(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split()))


def _paragraphs(documented: Any) -> list[str]:
    return (inspect.getdoc(documented) or "").split("\n\n")


def _table(rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    for name, text in rows:
        link = LINKS.get(re.match(r"\w*", name)[0], "")
        shown = f"[`{name}`]({link})" if link else f"`{name}`"
        yield f"| {shown} | {_markdown(text).replace('|', chr(92) + '|')} |"


def _arguments(paragraph: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a docstring's section, with what it says of each."""
    for entry in re.split(r"\n    (?=\S)", paragraph)[1:]:
        name, _, text = entry.partition(": ")
        yield name, text


def _function(name: str) -> Iterator[str]:
    yield from (f"### `{name}(target, *args, ...)`", "")
    for paragraph in _paragraphs(getattr(pytest_torchmem, name)):
        if paragraph.startswith("Args:\n"):
            yield from _table(_arguments(paragraph))
        else:
            yield _markdown(paragraph)
        yield ""


def functions() -> Iterator[str]:
    """Yield two functions in full, and the first paragraph of the other public names."""
    full = ("trace", "measure")
    for name in full:
        yield from _function(name)
    yield from ("### Others", "")
    others = [name for name in pytest_torchmem.__all__ if name not in (*full, "__version__")]
    yield from _table((one, _paragraphs(getattr(pytest_torchmem, one))[0]) for one in others)


def profile() -> Iterator[str]:
    """Yield the fields of a profile with what stands below each, and its methods."""
    yield from (_markdown(_paragraphs(MemoryProfile)[0]), "")
    body = ast.parse(inspect.getsource(MemoryProfile)).body[0].body
    fields = {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    shown = {name: text for name, text in fields.items() if not name.startswith("_")}
    for name in sorted(set(dir(MemoryProfile)) - set(shown)):
        if not name.startswith("_") and (found := inspect.getdoc(getattr(MemoryProfile, name))):
            called = "" if isinstance(getattr(MemoryProfile, name), property) else "()"
            shown[f"{name}{called}"] = found.split("\n\n")[0]
    yield from _table(iter(shown.items()))


def filled(text: str) -> str:
    """Return the page with every part that docstrings say."""
    parts = {"functions": functions, "profile": profile, "hooks": _hooks, "errors": _errors}

    def part(found: re.Match[str]) -> str:
        lines = "\n".join(parts[found[2]]()).strip()
        return f"{found[1]}\n{lines}\n\n<!-- end -->"

    return re.sub(r"(<!-- docstrings: (\w+) -->\n).*?<!-- end -->", part, text, flags=re.S)


def _hooks() -> Iterator[str]:
    found = [name for name in vars(hookspec) if name.startswith("pytest_torchmem")]
    yield from _table((_called(name), _paragraphs(getattr(hookspec, name))[0]) for name in found)


def _called(name: str) -> str:
    return f"{name}({', '.join(inspect.signature(getattr(hookspec, name)).parameters)})"


def _errors() -> Iterator[str]:
    found = [
        name
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, errors.TorchmemError)
    ]
    yield from _table((name, _paragraphs(getattr(errors, name))[0]) for name in found)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
