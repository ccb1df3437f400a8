"""Modules import what docs/architecture.md lists below them, and nothing above."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest_torchmem

PACKAGE = Path(pytest_torchmem.__file__).parent
DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"
_LISTED = re.compile(r"(?:^|\s{2,})([\w/]+(?:\.py|/))(?=\s|$)")


def read_listing(text: str) -> list[str]:
    """Return the files and folders of the listing, from the top down and from left to right."""
    block = text.partition("## Layers")[2].partition("```\npytest_torchmem/\n")[2]
    found, profiler = [], ""
    for line in block.partition("```")[0].splitlines():
        if line.strip() == "profiler/":
            profiler = "profiler/"
            continue
        if not line.startswith("    "):
            profiler = ""
        found += [profiler + name for name in _LISTED.findall(line)]
    return found


def rank(path: str, listing: list[str]) -> int:
    """Return where a file stands in the listing: by its own name, else by its folder's."""
    names = [path, *(f"{parent.as_posix()}/" for parent in Path(path).parents)]
    places = [listing.index(name) for name in names if name in listing]
    assert places, f"{path} is not listed in docs/architecture.md under Layers: add it there"
    return places[0]


def imported(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the files that a module imports when it runs, also those imported in functions."""
    for node in ast.iter_child_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import: name the package"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield from file_of(name)
        yield from imported(path, node)


def file_of(name: str) -> Iterator[str]:
    """Yield the file of a module, or of the module that a name is taken from."""
    first, *rest = name.split(".")
    if first != PACKAGE.name:
        return
    for parts in (rest, rest[:-1]):
        for path in (
            Path(*parts).with_suffix(".py") if parts else Path(),
            Path(*parts, "__init__.py"),
        ):
            if (PACKAGE / path).is_file():
                yield path.as_posix()
                return


def imports_of_the_package() -> dict[str, set[str]]:
    """Return what each file imports of the package, without the modules of its own folder.

    A registry, which is a package's ``__init__``, loads its modules when it is first asked.
    """
    found = {}
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE)
        files = set(imported(path, ast.parse(path.read_text(encoding="utf-8"))))
        if own.name == "__init__.py":
            files = {file for file in files if own.parent not in Path(file).parents}
        found[own.as_posix()] = files - {own.as_posix()}
    return found


def test_imports_point_downwards() -> None:
    listing = read_listing(DOCUMENT.read_text(encoding="utf-8"))
    imports = imports_of_the_package()
    # An ``__init__`` that only says what its package is has no place.
    involved = {path for path in imports if imports[path]}.union(*imports.values())
    ranks = {path: rank(path, listing) for path in involved}
    upwards = [
        f"{path} imports {other}: turn that around, or list it below in docs/architecture.md"
        for path, others in sorted(imports.items())
        for other in sorted(others)
        if ranks[other] < ranks[path]
    ]
    assert upwards == []
    list(TopologicalSorter(imports).static_order())  # raises where modules import in a circle


def test_what_is_listed_is_there() -> None:
    listing = read_listing(DOCUMENT.read_text(encoding="utf-8"))
    assert len(listing) == len(set(listing))
    assert [name for name in listing if not (PACKAGE / name).exists()] == []
