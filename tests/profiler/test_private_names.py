"""Private parts of torch are used in the places that docs/architecture.md names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest_torchmem

PACKAGE = Path(pytest_torchmem.__file__).parent
PLACES = (
    "torch_private/",
    "fake_cuda/",
    "measurement/events.py",
    "measurement/device.py",
)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield what a module takes from torch whose name begins with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield f"torch.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.startswith("torch._"):
                yield module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("torch._"))


def test_what_is_found() -> None:
    program = "import torch._C\nfrom torch._ops import x\ntorch._C.f()\ntorch.add(a._b)"
    assert list(private_names(ast.parse(program))) == ["torch._C", "torch._ops", "torch._C"]


def test_private_names_stand_where_the_architecture_says() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in private_names(ast.parse(path.read_text()))
    }
    for place in PLACES:
        assert any(path.startswith(place) for path, _ in found), f"{place} uses none any more"
    assert {
        (path, name) for path, name in found if not path.startswith(PLACES) and name != "torch._ops"
    } == set()
