"""The function that a program's source calls where an operator runs: ``F.one_hot`` of ``zeros``."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from itertools import islice
from types import CodeType

from pytest_torchmem.profile.timeline import Origin

_LONGEST = 30
"""Letters of a dotted name beyond which its last part is told alone."""
_UNIT = 2
"""Bytes of an instruction."""


def functions_called(
    sites: Iterable[tuple[Origin, tuple[CodeType, int]]],
) -> Iterator[tuple[Origin, str]]:
    """Yield the functions that call operators of other names, where Python knows (from 3.11)."""
    names: dict[tuple[int, int], str] = {}  # the hash of code is that of its constants
    for origin, (code, instruction) in sites:
        at = id(code), instruction
        if at not in names:
            names[at] = _function_at(code, instruction)
        name = names[at]
        own = origin.operator.partition("::")[2].partition(".")[0]
        called = name.rpartition(".")[2].strip("_")
        if called and called not in (own.strip("_"), "forward"):
            yield origin, name


def _function_at(code: CodeType, instruction: int) -> str:
    """Return the name of what an instruction calls, as the source has it, "" for anything else."""
    if not hasattr(code, "co_positions"):
        return ""
    found = next(islice(code.co_positions(), instruction // _UNIT, None), None)
    if found is None:
        return ""
    first, last, begin, end = found
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if len(lines) != last - first + 1:
        return ""
    lines[-1] = lines[-1][:end]  # before the first is cut, which may be the same
    lines[0] = lines[0][begin:]
    try:
        tree = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since it was imported
        return ""
    return _name_of(tree.func) if isinstance(tree, ast.Call) else ""


def _name_of(function: ast.expr) -> str:
    """Return a dotted name; of a method of what an expression gives, its own: ``.float``."""
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    whole = ast.unparse(function)
    dotted = all(part.isidentifier() for part in whole.split("."))
    if not dotted:
        return f".{function.attr}"
    return whole if len(whole) <= _LONGEST else function.attr
