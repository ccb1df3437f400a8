"""The code that a test leads to: a snapshot has two letters for each line of these functions."""

import ast
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from inspect import getattr_static
from io import StringIO
from itertools import islice
from keyword import iskeyword
from pathlib import PurePath
from string import ascii_letters, digits
from tokenize import COMMENT, TokenError, generate_tokens
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

from torch import nn

from pytest_torchmem.interception import attribution
from pytest_torchmem.step.imports import is_installed
from pytest_torchmem.tracing.sources import file_of, first_line, is_of_program, text_of, tree_of

_CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Names of files that are code like any other where a function or a constant names them."""
_MOST_BYTES = 50_000
"""Of such a file; what is larger is data."""
_MOST_ITEMS = 50
"""Those of a container that are followed to functions."""
_LONGEST = 160
"""Characters of a statement that counts as one line."""
_MOST_OBJECTS = 5000
"""Those that are followed from a test to the functions that it leads to."""

Code = Mapping[str, Mapping[int, str]]
"""By file and function, ``"losses.py: Focal.forward"``, its lines by their numbers, each after two
letters that stand for it; ``"losses.py: "`` has those outside of functions, and ``"timm"`` the
version of a library."""


def code_of(functions: Iterable[Any]) -> Code:
    """Return the lines of the program's functions that some lead to, without comments, and the
    versions of the libraries that these name.

    A function leads to what its names are, where they are looked up: functions, the methods of
    classes, of modules what is named beside them, and files with a configuration.
    """
    files, libraries = _reached(functions)
    found = {name: {0: _version_of(name)} for name in sorted(libraries)}
    for file, starts in sorted(files.items()):
        path, text = _path_of(file), text_of(file)
        for name, (span, lines) in parts_of(text).items():
            if lines and (not name or not starts.isdisjoint(span)):
                found[f"{path}: {name}"] = lines
    return found


@lru_cache(maxsize=256)
def parts_of(text: str) -> dict[str, tuple[Collection[int], dict[int, str]]]:
    """Return a text's functions with the numbers of their lines and those that hold code; by ""
    what is outside of them.
    """
    lines = _lines_of(text)
    spans = _spans(text)
    found: dict[str, tuple[Collection[int], dict[int, str]]] = {
        name: (span, {number: lines[number] for number in span if number in lines})
        for name, span in spans.items()
    }
    outside = set(lines).difference(*spans.values())
    return found | {"": (outside, {number: lines[number] for number in sorted(outside)})}


def texts_of(code: Code) -> dict[str, str]:
    """Return code as a snapshot has it: of each line the two letters."""
    return {
        name: lines[0] if 0 in lines else "".join(line[:2] for line in lines.values())
        for name, lines in code.items()
    }


def last_committed(now: Code, text_at: Callable[[str, str], str]) -> dict[str, str]:
    """Return code as the last commit has it, or as the one before does where nothing has changed
    since; ``text_at`` returns the text of a file in a revision.
    """
    texts = texts_of({name: lines for name, lines in now.items() if 0 not in lines})
    files = {name.partition(": ")[0] for name in texts}
    for revision in ("HEAD", "HEAD^"):
        found = dict[str, str]()
        for file in sorted(files):
            parts = parts_of(text_at(os.path.abspath(file), revision))
            found |= texts_of({f"{file}: {name}": lines for name, (_, lines) in parts.items()})
        if any(found.values()) and not texts.items() <= found.items():
            return {name: lines[0] for name, lines in now.items() if 0 in lines} | found
    return {}


def _reached(functions: Iterable[Any]) -> tuple[dict[str, set[int]], set[str]]:
    """Return the program's files that functions lead to, with the first lines of the functions in
    them, and the libraries that these name.
    """
    left, seen, files, libraries = [*functions], set[int](), dict[str, set[int]](), set[str]()
    data = set[str]()

    def reach(file: str, scope: Mapping[str, Any], names: Iterable[str] = ()) -> set[int]:
        outside = _named_outside(text_of(file)) if file not in files else ()
        left.extend(named := _named({*names, *outside}, file, scope))
        libraries.update(map(_library_of, named))
        return files.setdefault(file, set())

    for one in left:  # which grows meanwhile, and keeps alive what was seen
        if id(one) in seen or len(seen) > _MOST_OBJECTS:
            continue
        seen.add(id(one))
        kind = type(one)  # what an object says of itself may run the program
        if kind is FunctionType:
            left += (getattr(one, "__wrapped__", None), *(one.__defaults__ or ()))
            for cell in one.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    left.append(cell.cell_contents)
            if _is_own(file := one.__code__.co_filename):
                starts = reach(file, one.__globals__, _named_in(one.__code__))
                starts.add(one.__code__.co_firstlineno)
        elif kind is ModuleType:
            if _is_own(file := vars(one).get("__file__") or ""):
                reach(file, vars(one))
        elif issubclass(kind, type):
            if _is_own(file := file_of(one)):
                reach(file, vars(sys.modules[one.__module__]))
                left += (*vars(one).values(), *one.__mro__[1:])
        elif issubclass(kind, staticmethod | classmethod | MethodType):
            left.append(one.__func__)
        elif issubclass(kind, property):
            left.append(one.fget)
        elif issubclass(kind, partial | cached_property):
            left.append(one.func)
        elif kind in (dict, list, tuple):
            left += islice(one.values() if kind is dict else one, _MOST_ITEMS)
        elif kind is str or issubclass(kind, PurePath):
            data |= {str(one)} if str(one).endswith(_CONFIGURATIONS) else set()
        elif issubclass(kind, nn.Module):
            left += {type(each) for each in nn.Module.modules(one)}
        else:
            left += (kind, getattr_static(one, "__wrapped__", None))
    folders = dict.fromkeys(("", *map(os.path.dirname, files)))
    for name in data:
        found = filter(os.path.isfile, (os.path.abspath(os.path.join(f, name)) for f in folders))
        if (file := next(found, None)) and os.path.getsize(file) < _MOST_BYTES and _is_own(file):
            files.setdefault(file, set())
    return files, libraries - {""}


def _named_in(code: CodeType) -> Iterator[str]:
    """Yield the names in a function and those within it, and its texts, which getattr may be
    given.
    """
    yield from (*code.co_names, *code.co_varnames)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _named_in(one)
        elif type(one) is str:
            yield one


@lru_cache(maxsize=256)
def _named_outside(text: str) -> set[str]:
    """Return the names in a text outside of functions: also what is a default or a decorator."""
    nodes: list[Any] = [tree_of(text)]
    for one in nodes:
        is_function = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = (one.args, *getattr(one, "decorator_list", ())) if is_function else ()
        nodes += inside or ast.iter_child_nodes(one)
    names = {getattr(one, name, "") for one in nodes for name in ("id", "attr", "value")}
    return {name for name in names if type(name) is str}


def _named(names: Iterable[str], file: str, scope: Mapping[str, Any]) -> list[Any]:
    """Return what names of a file are, in modules that it names, too, and the modules from which
    they are imported.
    """
    names = sorted(names)
    found = [scope[name] for name in names if name in scope]
    found += (text for text in names if text.endswith(_CONFIGURATIONS))
    found += [sys.modules[name] for name in names if name in sys.modules]  # that it imports
    for module, imported in _imports_of(text_of(file)):
        if not imported.isdisjoint(names):
            with suppress(ImportError, ValueError):  # of no package
                found.append(sys.modules.get(resolve_name(module, scope.get("__package__"))))
    for module in found:
        own = vars(module) if type(module) is ModuleType else {}
        if _is_own(own.get("__file__") or ""):
            there = [own[name] for name in names if name in own]
            found += [one for one in there if all(one is not other for other in found)]
    return found


@lru_cache(maxsize=256)
def _imports_of(text: str) -> list[tuple[str, set[str]]]:
    """Return the modules from which a text imports names, and what these are called in it."""
    nodes = (one for one in ast.walk(tree_of(text)) if isinstance(one, ast.ImportFrom))
    return [
        (f"{'.' * one.level}{one.module or ''}", {name.asname or name.name for name in one.names})
        for one in nodes
    ]


_NO_LIBRARIES = ("pytest", "pytest_torchmem", "torch")
"""Torch's version is in a snapshot anyway, and the others decide nothing."""


def _library_of(one: Any) -> str:
    """Return the installed library of a module, class, function or object, "" if it says none."""
    kind = type(one)
    of = one if kind is FunctionType or issubclass(kind, type) else kind
    module = one.__name__ if kind is ModuleType else of.__module__
    root = str(module).partition(".")[0]
    own = getattr(sys.modules.get(root), "__dict__", {})
    is_known = is_installed(str(own.get("__file__"))) and root not in _NO_LIBRARIES
    return root if is_known and _version_of(root) else ""


@lru_cache(maxsize=256)
def _version_of(library: str) -> str:
    with suppress(PackageNotFoundError):
        return version(library)
    return ""


def _is_own(file: str) -> bool:
    """Tell whether a file is the program's, and not of this package either."""
    return bool(file) and is_of_program(file) and bool(_path_of(file))


def _path_of(file: str) -> str:
    return attribution.place_among([(file, 0)]).removesuffix(":0")


@lru_cache(maxsize=256)
def _spans(text: str) -> dict[str, range]:
    """Return the lines of a text's functions and methods, those within others left out."""
    found: dict[str, range] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                start = first_line(one)
                found[prefix + one.name] = range(start, (one.end_lineno or start) + 1)
            else:
                visit(one, f"{prefix}{one.name}." if isinstance(one, ast.ClassDef) else prefix)

    visit(tree_of(text), "")
    return found


@lru_cache(maxsize=256)
def _lines_of(text: str) -> dict[int, str]:
    """Return the lines of a text that hold code, without comments, each after two letters."""
    strings = {
        number
        for node in ast.walk(tree_of(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = dict(enumerate(text.splitlines(), 1))
    with suppress(SyntaxError, TokenError):
        for token in generate_tokens(StringIO(text).readline):
            if token.type == COMMENT:
                lines[token.start[0]] = token.line[: token.start[1]]
    lines = {
        number: line.rstrip()
        for number, line in lines.items()
        if line.strip() and number not in strings
    }
    return {number: letters_of(line) + line for number, line in _joined(lines, text).items()}


def _joined(lines: dict[int, str], text: str) -> dict[int, str]:
    """Return lines with each short statement of a text in one, as a formatter may have it."""
    left = {**lines}
    for node in ast.walk(tree_of(text)):
        is_data = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Await)
        if not isinstance(node, ast.stmt) or is_data or isinstance(node, ast.Match):
            continue
        end = node.end_lineno or node.lineno
        for one in getattr(node, "body", ())[:1]:
            end = min(each.lineno for each in (one, *getattr(one, "decorator_list", ()))) - 1
        if end <= node.lineno:
            continue
        numbers = [number for number in range(node.lineno, end + 1) if number in lines]
        parts = [lines[number].strip() for number in numbers]
        whole = _BRACKETS.sub("", " ".join(parts))
        if parts[1:] and len(whole) <= _LONGEST and '"""' not in whole:
            indent = lines[numbers[0]].partition(parts[0])[0]
            left[numbers[0]] = indent + whole
            for number in numbers[1:]:
                left.pop(number, None)
    return left


def letters_of(line: str) -> str:
    """Return two letters for a line: one for it without names of variables, one for all of it. A
    function of another name is no other one.
    """
    code = NAME.sub("", line.rstrip())
    plain = _VARIABLE.sub(lambda found: found[0] if found[1] or iskeyword(found[0]) else "_", code)
    sides = (crc32(plain.encode()), crc32(code.encode()) >> 6)  # other bits, where both are equal
    return "".join(_LETTERS[side & 63] for side in sides)


NAME = re.compile(r"(?<=\bdef )\w+")
_BRACKETS = re.compile(r"(?<=[(\[{]) | ?,? (?=[)\]}])")
"""The spaces within brackets, and a comma before them, that a statement of several lines has."""
_VARIABLE = re.compile(r"""(^\s*\w+:|["'].*?["'])|(?<![\w.])[a-z_]\w*(?![\w(])(?!=\w)""")
"""Neither an attribute nor called nor a keyword, as most programs are formatted; and before it what
has a meaning: fields, keys and texts."""
_LETTERS = f"{ascii_letters}{digits}+/"
