"""The oldest Python that is supported reads what it has to: a newer one would not notice."""

import ast
from pathlib import Path

import pytest

import pytest_torchmem

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
