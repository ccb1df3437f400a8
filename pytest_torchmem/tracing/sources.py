"""Lines of a program's source at which something comes into a list, an attribute or a module.

What runs when a peak comes is seldom what was changed: a list is filled at another line, and a
layer is made in the constructor of the module that calls it. Both are read from the source, where
one line alone does it.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import FunctionType
from typing import Any

from torch import nn

from pytest_torchmem.interception.attribution import place_among
from pytest_torchmem.interception.facts import is_installed

_STANDARD_LIBRARY = os.path.dirname(os.__file__)
"""``sysconfig`` reads how Python was built to say so."""
_PUTS = ("add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update")
"""Methods by which something comes into a container."""
_MOST_FUNCTIONS = 50
"""Those that are followed from a constructor to what makes a module."""
_NOTHING = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.Tuple)


def is_of_program(file: str) -> bool:
    """Tell whether a file is neither of an installed library nor of Python's own."""
    return not (is_installed(file) or file.startswith((_STANDARD_LIBRARY, "<")))


def file_of(kind: type) -> str:
    """Return the file of a class, "" where there is none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def placed(file: str, line: int) -> str:
    """Return a line of the program as it follows a name, "" for any other."""
    at = place_among([(file, line)])
    return f" ({at})" if at else ""


def filled_at(file: str, definition: int | str, name: str, *, is_tensor: bool) -> str:
    """Return the only line at which a function, by its first line, or a class puts something into
    what is called ``name``, or makes it if it is a tensor, as it follows a name; "" where there is
    none or there are several.
    """
    lines = {node.lineno for node in _filling(file, definition, name, is_tensor=is_tensor)}
    return placed(file, lines.pop()) if len(lines) == 1 else ""


def lines_with(pattern: str) -> list[str]:
    """Return the lines of the program's loaded files with a pattern outside of comments."""
    sought = re.compile(rf"^[^#]*{pattern}")
    # Asked for an attribute, what stands for a module may import it.
    files = {getattr(one, "__dict__", {}).get("__file__") for one in [*sys.modules.values()]}
    found = (
        place_among([(file, number)])
        for file in sorted(file for file in files if type(file) is str and is_of_program(file))
        for number, text in enumerate(linecache.getlines(file), 1)
        if sought.search(text)
    )
    return [line for line in found if line]


def made_at(module: nn.Module, path: Sequence[str]) -> str:
    """Return the line at which a module's class makes what is at a path in it, "" if unknown."""
    for kind in type(module).__mro__:
        file = file_of(kind)
        made = _filling(file, kind.__name__, path[0])
        if len(made) == 1:
            value = made[0].value if _sets(made[0]) else made[0]
            scope = vars(sys.modules[kind.__module__])
            for part in path[1:] if _sets(made[0]) else ():  # of a ``Sequential`` or a list
                called = getattr(getattr(value, "func", None), "id", "")
                is_function = isinstance(scope.get(called), FunctionType)  # of other arguments
                items = () if is_function else getattr(value, "args", ())
                items = items[0].elts if items and isinstance(items[0], ast.List) else items
                before = items[: int(part) + 1] if part.isdecimal() else ()
                is_there = part.isdecimal() and len(before) == int(part) + 1
                if not is_there or any(isinstance(one, ast.Starred) for one in before):
                    break
                value = before[-1]
            names = {one.__name__ for one in type(module.get_submodule(".".join(path))).__mro__}
            return place_among([_made_by(value, scope, names) or (file, value.lineno)])
    return ""


def _made_by(value: ast.AST, scope: Mapping[str, Any], names: set[str]) -> tuple[str, int] | None:
    """Return the only line of the program's functions that a call leads to which names a class."""
    functions, found = [*_called_in(value, scope)], set[tuple[str, int]]()
    for function in islice(functions, _MOST_FUNCTIONS):  # which grows meanwhile
        code = function.__code__
        definition = _definitions(code.co_filename).get(code.co_firstlineno)
        if definition is None or not is_of_program(code.co_filename):
            continue
        calls = (node for node in ast.walk(definition) if isinstance(node, ast.Call))
        own = {(code.co_filename, one.lineno) for one in calls if names & _names_in(one.func)}
        found |= own
        inner = () if own else _called_in(definition, function.__globals__)
        functions += [one for one in inner if one not in functions]
    return found.pop() if len(found) == 1 else None


def _called_in(node: ast.AST, scope: Mapping[str, Any]) -> Iterator[FunctionType]:
    for call in ast.walk(node):
        function = scope.get(getattr(getattr(call, "func", None), "id", ""))
        if isinstance(function, FunctionType):
            yield function


def _names_in(called: ast.expr) -> set[str]:
    """Return the names in what is called: ``nn``, ``Embedding`` and ``from_pretrained``."""
    return {getattr(one, name, "") for one in ast.walk(called) for name in ("id", "attr")} - {""}


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


@lru_cache(maxsize=64)
def _definitions(file: str) -> dict[int | str, Any]:
    """Return the functions of a file by their first lines, and its classes by their names."""
    try:
        nodes: list[Any] = [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    except (SyntaxError, ValueError):
        return {}
    functions = (one for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    starts = {min([one.lineno, *(d.lineno for d in one.decorator_list)]): one for one in functions}
    return starts | {one.name: one for one in nodes if isinstance(one, ast.ClassDef)}


def _filled_by(node: Any) -> list[Any]:
    """Return the expressions into whose values a statement or a call puts something, or that it
    sets.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [node.func.value] if node.func.attr in _PUTS else []
    if isinstance(node, ast.AugAssign):
        return [node.target, getattr(node.target, "value", None)]
    if not isinstance(node, ast.Assign):
        return []
    items = [one.value for one in node.targets if isinstance(one, ast.Subscript)]
    is_emptied = isinstance(node.value, _NOTHING)
    return items if is_emptied else [*items, *node.targets]
