"""Folders are layers: a module imports from its own folder and from those listed below it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest_torchmem

PACKAGE = Path(pytest_torchmem.__file__).parent
DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"
_LISTED = re.compile(r"^  ([\w/]+(?:\.py|/))(?=\s|$)", re.MULTILINE)

#: Imports that point upwards still, to be turned round: none may be added.
UPWARDS = frozenset({})

#: The same for files that import each other.
CIRCLES = frozenset({})


def read_layers(text: str) -> list[str]:
    """Return the layers of the listing, the topmost first."""
    block = text.partition("## Layers")[2].partition("```\npytest_torchmem/\n")[2]
    return _LISTED.findall(block.partition("```")[0])


def layer_of(path: str) -> str:
    """Return the layer that a file belongs to: its outermost folder, or the file itself."""
    first, separator, _ = path.partition("/")
    return first + separator


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


@cache
def names_imported(path: Path) -> tuple[str, ...]:
    """Return the names that a module imports, those for annotations and in functions included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import: name the package"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


@cache
def imports_of_the_package() -> dict[str, set[str]]:
    """Return what each file imports of the package."""
    return {
        own: {file for name in names_imported(path) for file in file_of(name)} - {own}
        for path in PACKAGE.rglob("*.py")
        for own in [path.relative_to(PACKAGE).as_posix()]
    }


def test_every_file_stands_in_a_layer() -> None:
    layers = read_layers(DOCUMENT.read_text(encoding="utf-8"))
    assert len(layers) == len(set(layers))
    assert {layer_of(path) for path in imports_of_the_package()} == set(layers)


def test_imports_point_downwards() -> None:
    layers = read_layers(DOCUMENT.read_text(encoding="utf-8"))
    upwards = {
        (path, other)
        for path, others in imports_of_the_package().items()
        for other in others
        if other != "__init__.py" and layers.index(layer_of(other)) < layers.index(layer_of(path))
    }
    assert upwards == UPWARDS


def test_the_diagram_shows_the_imports() -> None:
    arrows: dict[str, set[str]] = {}  # by the names of folders and files without their ends
    text = DOCUMENT.read_text(encoding="utf-8")
    for above, below in re.findall(r"^    (\w+) --> (\w+)$", text, re.MULTILINE):
        arrows.setdefault(above, set()).add(below)
    imports: dict[str, set[str]] = {}
    for path, others in imports_of_the_package().items():
        own = layer_of(path).removesuffix("/").removesuffix(".py")
        layers = {layer_of(other).removesuffix("/").removesuffix(".py") for other in others}
        imports.setdefault(own, set()).update(layers - {own, "__init__"})
    del imports["__init__"]  # has everything, when it is first used
    reached: dict[str, set[str]] = {}
    for name in TopologicalSorter(arrows).static_order():
        nearest = arrows.get(name, set())
        reached[name] = nearest.union(*(reached[below] for below in nearest))
    assert not {(one, two) for one, below in arrows.items() for two in below - imports[one]}
    assert not {(one, two) for one, below in imports.items() for two in below - reached[one]}


def test_no_circle_of_files() -> None:
    imports = {
        path: {other for other in others if (path, other) not in UPWARDS | CIRCLES}
        for path, others in imports_of_the_package().items()
    }
    list(TopologicalSorter(imports).static_order())  # raises where modules import in a circle


def test_only_the_plugin_imports_pytest() -> None:
    for path in PACKAGE.rglob("*.py"):
        if layer_of(path.relative_to(PACKAGE).as_posix()) != "plugin/":
            packages = {name.split(".")[0] for name in names_imported(path)}
            assert not {"pytest", "_pytest"} & packages, path


def test_files_and_names_in_the_document_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"((?:\w+/)+\w+\.py|(?<=`)\w+\.py)(?::(\w+))?", text))
    assert len(named) > 30
    stale = {
        (path, name)
        for path, name in named - {("tests/test_imports.py", "")}
        if not (PACKAGE / path).is_file()
        or not re.search(rf"^(?:class |def )?{name}\b", (PACKAGE / path).read_text("utf-8"), re.M)
    }
    assert stale == set()


def test_a_concept_is_in_three_files() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").partition("## Where is")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (`.+`) \|$", table, re.MULTILINE)
    assert len(rows) == 6
    files = {concept: set(re.findall(r"`([\w/]+\.py)", read)) for concept, read in rows}
    assert {concept: found for concept, found in files.items() if not 0 < len(found) <= 3} == {}
