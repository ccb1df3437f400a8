"""What is published says the same in every place, and the oldest Python reads the package."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml
from packaging.requirements import Requirement

import pytest_torchmem

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_workflow_and_nox_test_the_same_versions() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    nox = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    assert (tuple(matrix["python"]), tuple(matrix["torch"])) == (nox["PYTHONS"], nox["TORCHES"])
    assert {(one["python"], one["torch"]) for one in matrix["exclude"]} == nox["MISSING"]
    named = {entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if "3." in entry}
    assert named == set(nox["PYTHONS"])
    assert set(PROJECT["optional-dependencies"]) == set(nox["EXTRAS"])


def test_the_extra_allows_the_cudnn_of_every_torch() -> None:
    wanted = [Requirement(line) for line in PROJECT["optional-dependencies"]["cudnn"]]
    (cudnn,) = (one for one in wanted if one.name == "nvidia-cudnn-cu13")
    page = (ROOT / "docs/cudnn.md").read_text(encoding="utf-8")
    pinned = re.findall(r"`nvidia-cudnn-cu13==([\d.]+)`", page)
    assert len(pinned) > 3
    assert [version for version in pinned if version not in cudnn.specifier] == []


def test_a_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["abstract"] == PROJECT["description"]


PACKAGE = Path(pytest_torchmem.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def mixed_with_named_tuple(tree: ast.AST) -> list[str]:
    """Return the classes with NamedTuple and another base: an error until Python 3.11."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and len(node.bases) > 1
        and "NamedTuple" in {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    ]


@pytest.mark.parametrize(
    "text", ["class A(NamedTuple, Generic[T]): ...", "class A(B, t.NamedTuple): ..."]
)
def test_a_mixed_class_is_found(text: str) -> None:
    assert mixed_with_named_tuple(ast.parse(text)) == ["A"]


def test_every_file_is_of_that_language_and_has_no_mixed_class() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text("utf-8"), str(path), feature_version=(3, 10))
        assert mixed_with_named_tuple(tree) == [], path
