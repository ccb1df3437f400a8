"""Lines of a program's source that fill something or make it.

What keeps a tensor is known by its name. The line at which a list is filled, or a variable set, is
read from the source, where one line alone does it.
"""

import ast
import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from pytest_torchmem.interception import attribution
from pytest_torchmem.step.imports import is_installed

_STANDARD_LIBRARY = os.path.dirname(os.__file__)
"""``sysconfig`` reads how Python was built to say so."""
_PUTS = ("add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update")
"""Methods by which something comes into a container."""
_NOTHING = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.Tuple)


def is_of_program(file: str) -> bool:
    """Tell whether a file is neither of an installed library nor of Python's own."""
    return not (is_installed(file) or file.startswith((_STANDARD_LIBRARY, "<")))


def file_of(kind: type) -> str:
    """Return the file of a class, "" where there is none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def placed(file: str, line: int) -> str:
    """Return a line of the program as it follows a name, "" for any other."""
    at = attribution.place_among([(file, line)])
    return f" ({at})" if at else ""


def filled_at(
    file: str, definition: int | str, name: str, known: Mapping[str, Any], *, is_tensor: bool
) -> str:
    """Return the only line at which a function, by its first line, or a class puts something into
    what is called ``name``, or makes it if it is a tensor, as it follows a name; else that of the
    functions among ``known`` names that it gives this to. "" where there is none or several.
    """
    nodes = _filling(file, definition, name, is_tensor=is_tensor)
    lines = {(file, node.lineno) for node in nodes}
    lines = lines or {*_filled_by_called(_definitions(file).get(definition), name, known)}
    return placed(*lines.pop()) if len(lines) == 1 else ""


def _filled_by_called(
    within: ast.AST | None, name: str, known: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the lines of called functions that put something into what they are given."""
    for node in ast.walk(within) if within else ():
        called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        code = getattr(known.get(called), "__code__", None)
        if isinstance(node, ast.Call) and isinstance(code, CodeType):
            by_place = zip(code.co_varnames[: code.co_argcount], node.args, strict=False)
            for parameter, value in (*by_place, *((one.arg, one.value) for one in node.keywords)):
                if parameter and getattr(value, "id", "") == name:
                    file = code.co_filename
                    for one in _filling(file, code.co_firstlineno, parameter):
                        yield file, one.lineno


def _filling(file: str, definition: int | str, name: str, *, is_tensor: bool = False) -> list[Any]:
    """Return what in a function or a class of the program puts something into what is called
    ``name``, or else sets it; of several what its constructor does not, which gives it a first
    value.
    """
    within: Any = _definitions(file).get(definition) if file and is_of_program(file) else None
    if within is None:
        return []
    for kind in _definitions(file).values():
        is_method = isinstance(kind, ast.ClassDef) and within in kind.body
        if is_method and (attribute := _attribute_in(within, name)):
            return _filling(file, kind.name, attribute, is_tensor=is_tensor)
    own = "attr" if isinstance(within, ast.ClassDef) else "id"  # an attribute, or a variable
    nodes: list[Any] = [
        node
        for node in ast.walk(within)
        if name in (getattr(one, own, "") for one in _filled_by(node))
    ]
    if is_tensor:  # whose items are numbers
        nodes = [node for node in nodes if not isinstance(_target(node), ast.Subscript)]
    nodes = [node for node in nodes if not _sets(node)] or nodes
    makers = (one for one in within.body if getattr(one, "name", "") == "__init__")
    first = {line for one in makers for line in range(one.lineno, one.end_lineno + 1)}
    return [node for node in nodes if node.lineno not in first] or nodes


def _attribute_in(method: ast.AST, name: str) -> str:
    """Return the attribute of ``self`` that a variable is set to, "" for any other variable."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            sides = (getattr(one, "elts", [one]) for one in (node.targets[0], node.value))
            for target, value in zip(*sides, strict=False):
                owner = getattr(getattr(value, "value", None), "id", "")
                if getattr(target, "id", "") == name and owner == "self":
                    return str(getattr(value, "attr", ""))
    return ""


def _sets(node: Any) -> bool:
    """Tell whether a statement is an assignment of a whole value, and of no item."""
    return isinstance(node, ast.Assign) and not isinstance(_target(node), ast.Subscript)


def _target(node: Any) -> Any:
    """Return what an assignment sets, ``None`` of anything else."""
    return node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)


def text_of(file: str) -> str:
    """Return the present text of a file, "" where it cannot be read."""
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))


@lru_cache(maxsize=64)
def tree_of(text: str) -> ast.Module:
    """Return the syntax tree of a text, an empty one of what is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line of a function's first decorator, or else of its name, as its code has it."""
    return min([function.lineno, *(one.lineno for one in function.decorator_list)])


@lru_cache(maxsize=64)
def _definitions(file: str) -> dict[int | str, Any]:
    """Return the functions of a file by their first lines, and its classes by their names."""
    nodes: list[Any] = [*ast.walk(tree_of(text_of(file)))]
    functions = (one for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    starts: dict[int | str, Any] = {first_line(one): one for one in functions}
    return starts | {one.name: one for one in nodes if isinstance(one, ast.ClassDef)}


def _filled_by(node: Any) -> list[Any]:
    """Return the expressions into whose values a statement or a call puts something, or that it
    sets.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        item_of = owner.value if isinstance(owner, ast.Subscript) else None
        return [owner, item_of] if node.func.attr in _PUTS else []
    if isinstance(node, ast.AugAssign):
        return [node.target, getattr(node.target, "value", None)]
    if not isinstance(node, ast.Assign):
        return []
    targets = [one for each in node.targets for one in getattr(each, "elts", [each])]
    items = [one.value for one in targets if isinstance(one, ast.Subscript)]
    is_emptied = isinstance(node.value, _NOTHING[:-1] if targets[1:] else _NOTHING)
    return items if is_emptied else [*items, *targets]
