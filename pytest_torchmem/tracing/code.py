"""The code that a test leads to, and what of it changed since a snapshot.

A snapshot has two letters for each line of the functions that a test led to then. Those that
changed are shown with a failure: what makes an allocation is seldom what was changed.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cached_property, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from inspect import getattr_static
from io import StringIO
from itertools import islice, takewhile
from keyword import iskeyword
from operator import itemgetter
from pathlib import PurePath
from string import ascii_letters, digits
from textwrap import shorten
from tokenize import COMMENT, TokenError, generate_tokens
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

from torch import nn

from pytest_torchmem.interception.attribution import place_among
from pytest_torchmem.interception.facts import is_installed
from pytest_torchmem.printable import counted
from pytest_torchmem.profile.facts import CodeLine
from pytest_torchmem.tracing.sources import file_of, first_line, is_of_program, text_of, tree_of

_CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Names of files that are code like any other where a function or a constant names them."""
_MOST_BYTES = 50_000
"""Of such a file; what is larger is data."""
_MOST_ITEMS = 50
"""Those of a container that are followed to functions."""
_LONGEST = 120
"""Characters of lines that are gone."""
_AT_A_TIME = 2
"""Lines of a function that come before those of the next."""
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
        for name, (span, lines) in _parts_of(text).items():
            if lines and (not name or not starts.isdisjoint(span)):
                found[f"{path}: {name}"] = lines
    return found


@lru_cache(maxsize=256)
def _parts_of(text: str) -> dict[str, tuple[Collection[int], dict[int, str]]]:
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


Versions = Callable[[str], Iterable[str]]
"""Yields the texts that a file of the program had."""


class Growth(NamedTuple):
    """What is known of a growth that code made."""

    near: Sequence[str] = ()
    """The lines that lead to it, those to blame first."""
    words: AbstractSet[str] = frozenset()
    """The names in its cause."""
    renamed: Mapping[str, str] = {}
    """Attributes that are modules, with what their names were."""


_UNKNOWN = Growth()


def changed_lines(
    before: Mapping[str, str],
    now: Code,
    growth: Growth = _UNKNOWN,
    versions: Versions = lambda file: (),
) -> list[CodeLine]:
    """Return the lines of code that a snapshot has otherwise, those most likely meant first.

    First come those with a word of the cause, then functions with lines near the growth, in their
    order, then others of their classes and files, a few lines of each at a time; new functions
    elsewhere and lines with other names of variables alone are last. Modules, functions and classes
    of another name or in another file are no news; nor are imports beside what they serve. Where
    ``versions`` have the very lines of the snapshot, what stood there is told.
    """
    near, words, names = growth
    texts, at_near = texts_of(now), {line: at for at, line in enumerate(near)}
    named = {**names, **_renamed(before, texts)}
    former = re.compile(rf"['\"](.*\b)?({'|'.join(map(re.escape, names.values()))})\b")
    gone = {text: name for name, text in before.items() if name not in now}
    levels = dict[str, int]()
    for name, lines in now.items():
        places = (f"{name.partition(': ')[0]}:{number}" for number in lines)
        levels[name] = min((at_near[one] for one in places if one in at_near), default=len(near))
    around = {_around(name) for name, level in levels.items() if level < len(near)}
    found = list[tuple[tuple[int, ...], CodeLine]]()
    for name, level in levels.items() if before else ():
        was, is_far = before.get(name, ""), level == len(near)
        function = level, _around(name) not in around, name.endswith(": ")
        changes = list[tuple[bool, CodeLine]]()
        if was != texts[name] and (was or texts[name] not in gone):
            changes = _changes(name, was, now[name], named, _lines_then(name, was, versions))
        if names and 0 not in now[name]:
            changes += _with_former_names(name, now[name], former)
        changes.sort(key=lambda one: (at_near.get(one[1].place, len(near)), _STOOD in one[1].text))
        for at, (is_same, line) in enumerate(changes):
            others = words.isdisjoint(_WORD.findall(line.text))
            order = is_same, others, is_far and not was, at // _AT_A_TIME, *function
            found.append((order, line))
    ordered = [line for _, line in sorted(found, key=itemgetter(0))]
    if names and not ordered:
        return changed_lines(before, now, growth._replace(renamed={}), versions)
    bare = ((line, line.text.partition("  # ")[0]) for line in ordered)
    return [line for line, text in bare if not _SAYS_LITTLE.search(text)] or ordered


def last_committed(now: Code, text_at: Callable[[str, str], str]) -> dict[str, str]:
    """Return code as the last commit has it, or as the one before does where nothing has changed
    since; ``text_at`` returns the text of a file in a revision.
    """
    texts = texts_of({name: lines for name, lines in now.items() if 0 not in lines})
    files = {name.partition(": ")[0] for name in texts}
    for revision in ("HEAD", "HEAD^"):
        found = dict[str, str]()
        for file in sorted(files):
            parts = _parts_of(text_at(os.path.abspath(file), revision))
            found |= texts_of({f"{file}: {name}": lines for name, (_, lines) in parts.items()})
        if any(found.values()) and not texts.items() <= found.items():
            return {name: lines[0] for name, lines in now.items() if 0 in lines} | found
    return {}


def _with_former_names(
    name: str, lines: Mapping[int, str], former: re.Pattern[str]
) -> Iterator[tuple[bool, CodeLine]]:
    """Yield the lines in whose texts modules still have the names that they had."""
    for number, line in lines.items():
        if found := former.search(line[2:]):
            text = f"{line[2:].strip()}  # nothing is called {found[2]} now"
            yield False, CodeLine(name.partition(": ")[0], number, text)


def _renamed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the former names of functions and classes that have another one and the same lines."""
    gone = {text: name for name, text in before.items() if name not in now}
    found = dict[str, str]()
    for name, text in now.items():
        if name not in before and text in gone:
            parts = (one.rpartition(": ")[2].split(".")[::-1] for one in (name, gone[text]))
            found |= zip(*parts, strict=False)
    return {new: old for new, old in found.items() if new != old}


def _lines_then(name: str, was: str, versions: Versions) -> list[str]:
    """Return the lines that a function had in the snapshot, none where no version has them."""
    file, _, function = name.partition(": ")
    for text in versions(os.path.abspath(file)) if was and file != name else ():
        _, lines = _parts_of(text).get(function, ((), {}))
        if was == "".join(line[:2] for line in lines.values()):
            return [_shown(line[2:]) for line in lines.values()]
    return []


def _changes(
    name: str, was: str, lines: Mapping[int, str], names: Mapping[str, str], former: Sequence[str]
) -> list[tuple[bool, CodeLine]]:
    """Return the lines of a function that changed, with new names of others undone, and whether
    names of variables alone did; with the ``former`` ones, if these are known.
    """
    file = name.partition(": ")[0]
    if file == name:
        return [(False, CodeLine(file, 0, f"{lines[0]} ({f'was {was}' if was else 'new'})"))]
    shown = {number: _shown(line[2:]) for number, line in lines.items()}
    if not was:
        said = [number for number, text in shown.items() if not _SAYS_LITTLE.search(text)]
        at = next((at for at in said if _NAME.search(shown[at])), [*said, *shown][0])
        head = (text for number, text in shown.items() if text[:1] == "@" and number < at)
        return [(False, CodeLine(file, at, f"{' '.join((*head, shown[at]))}  # new"))]
    then, numbers = re.findall("..", was), [*lines]
    as_named = partial(_WORD.sub, lambda found: names.get(found[0], found[0]))
    sides = ((_letters(as_named(line[2:])), line[:2]) for line in lines.values())
    there = [undone if undone in then else own for undone, own in sides]
    matched = SequenceMatcher(None, then, there, autojunk=False).get_opcodes()
    changes = [one for one in matched if one[0] != "equal"]
    came = {letters for *_, first, last in changes for letters in there[first:last]}
    stood = {letters: first for _, start, stop, first, _ in changes for letters in then[start:stop]}
    found = list[tuple[bool, CodeLine]]()
    for _, start, stop, first, last in changes:
        alike = {letters[0] for letters in then[start:stop]}
        for at in range(first, last):
            text, was_at = shown[numbers[at]], stood.get(there[at])
            if was_at is not None:  # it passed a line
                over = shown[numbers[max(0, (at if was_at < at else was_at) - 1)]]
                text += f"{_STOOD}{'before' if was_at < at else 'after'}: {over}"
            else:
                line, span = lines[numbers[at]][2:], slice(start, stop)
                text += _note(line, then[span], former[span], at - first, last - first)
            found.append((there[at][0] in alike, CodeLine(file, numbers[at], text)))
        gone = [one for one in former[start:stop] if not _SAYS_LITTLE.search(one)]
        if first == last and not came.issuperset(then[start:stop]) and (gone or not former):
            after = first == len(numbers)
            number = numbers[first - after]
            note = f"gone {'after' if after else 'before'} it"
            number_gone = counted(stop - start, "line")
            note = f"{note}: {_shortened(gone)}" if former else f"{number_gone} {note}"
            found.append((False, CodeLine(file, number, f"{shown[number]}  # {note}")))
    return found


def _note(line: str, then: Collection[str], former: Sequence[str], at: int, number: int) -> str:
    """Return in words what stood in the place of a line or around it: of several changed ones
    together, of which it is the one ``at`` a position.
    """
    is_same = not former or _shown(line) in former  # and letters may be equal by chance
    if is_same and _letters(f"    {line}") in then:
        block = (one.removesuffix(":") for one in former if one.endswith(":"))
        return f"  # no longer in {next(block, 'a block')}"
    if is_same and line[:4].isspace() and _letters(line[4:]) in then:
        return "  # newly in a block"
    if len(former) != number:
        return f"  # was: {_shortened(former)}" if former and not at else ""
    sides = [re.findall(r"\w+|\W", one) for one in (former[at], _shown(line))]
    for _ in range(2):  # what both begin with goes, and then what both end with
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False))
        alike = sum(1 for _ in same)
        sides = [side[alike:][::-1] for side in sides]
    gone, came = ("".join(side).strip(" ,") for side in sides)
    is_whole = all(gone.count(start) == gone.count(end) for start, end in ("()", "[]", "{}"))
    gone = gone if is_whole else former[at]
    return f"  # was: {gone}" if gone else f"  # came: {came}"


def _shortened(lines: Iterable[str]) -> str:
    return shorten("; ".join(lines), _LONGEST, placeholder=" …")


def _shown(line: str) -> str:
    return _SECRET.sub(r"\1…", line.strip())


def _around(name: str) -> str:
    """Return the class or the file of a function."""
    return name.rpartition(".")[0]


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
    return place_among([(file, 0)]).removesuffix(":0")


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
    return {
        number: _letters(line) + line.rstrip()
        for number, line in lines.items()
        if line.strip() and number not in strings
    }


def _letters(line: str) -> str:
    """Return two letters for a line: one for it without names of variables, one for all of it. A
    function of another name is no other one.
    """
    code = _NAME.sub("", line.rstrip())
    plain = _VARIABLE.sub(lambda found: found[0] if found[1] or iskeyword(found[0]) else "_", code)
    sides = (crc32(plain.encode()), crc32(code.encode()) >> 6)  # other bits, where both are equal
    return "".join(_LETTERS[side & 63] for side in sides)


_NAME = re.compile(r"(?<=\bdef )\w+")
_STOOD = "  # stood "
_WORD = re.compile(r"\w+")
_VARIABLE = re.compile(r"""(^\s*\w+:|["'].*?["'])|(?<![\w.])[a-z_]\w*(?![\w(])(?!=\w)""")
"""Neither an attribute nor called nor a keyword, as most programs are formatted; and before it what
has a meaning: fields, keys and texts."""
_SAYS_LITTLE = re.compile(r"^(from|import)\b|^\W*$|\(new\)$")
"""Lines of code, and new libraries, that say little beside others."""
_SECRET = re.compile(
    r"""(?i)((?:token|secret|passw\w*|key|credentials?)["']?\s*[:=]\s*)"""
    r"""["']?(?=[\w\-+/.]*\d)[\w\-+/.]{20,}(?![\w(])["']?"""
)
"""What a configuration may hold, and no report is to show."""
_LETTERS = f"{ascii_letters}{digits}+/"
