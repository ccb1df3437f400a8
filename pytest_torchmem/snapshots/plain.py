"""The JSON of the files that people review: strict to read, one value a line to write."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Generic, TypeVar

from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.units import MOST, format_size, parse_size

_ROUNDED = 0.05
"""By how much the text of a size may differ from it."""
_OPENED = 3
"""Levels of objects that have a line for each of their values: a fact is one."""
_KINDS = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
DEEPEST = 100
"""Levels of objects and lists in a file."""
K = TypeVar("K")
V = TypeVar("V")
Names = tuple[str, ...]


@dataclass(frozen=True)  # ``typing`` cannot set ``__orig_class__`` on frozen slots
class FileContents(Generic[K, V]):
    """What the text of a file holds."""

    entries: Mapping[K, V] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of their own that people wrote at the top."""


def parse_file(text: str, what: str, schema: int, blocks: str) -> dict[str, Any]:
    """Return the object in a file's ``text``, whose list ``blocks`` holds ``what``.

    Raises ``SnapshotError`` for anything else, and for a newer ``schema``.
    """
    data = parse(text)
    if not isinstance(data, dict):
        raise SnapshotError(f"is not a {what}: expected an object, found {kind_of(data)}")
    found = data.get("schema")
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise SnapshotError(f'is not a {what}: it has no valid "schema" number')
    if found > schema:
        raise SnapshotError(
            f"was written by a newer pytest-torchmem (schema {found}; this one reads {schema}). "
            "Upgrade pytest-torchmem"
        )
    if not isinstance(data.get(blocks), list):
        raise SnapshotError(f'is not a {what}: it has no list "{blocks}"')
    return data


def dump_file(head: Mapping[str, Any], name: str, blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a file: what is at its top, then the list ``name`` of ``blocks``."""
    top = [f"  {text_of(key)}: {text_of(value)}," for key, value in head.items()]
    opened = ",\n".join(block(plain, "    ") for plain in blocks)
    body = f'  "{name}": [' + (f"\n{opened}\n  ]" if blocks else "]")
    return "\n".join(["{", *top, body, "}", ""])


def table_of(plain: Any, where: str, read: Callable[[Any, str], V], what: str = "") -> dict[str, V]:
    """Return what ``read`` makes of each value of an object."""
    if not isinstance(plain, dict):
        raise SnapshotError(f"{where}: expected an object{what}, found {kind_of(plain)}")
    return {name: read(value, f'{where}: "{name}"') for name, value in plain.items()}


def texts_of(plain: Any, names: Names, required: Names, where: str) -> dict[str, str]:
    """Return the texts of an object by name, empty for those that it does not have."""
    if not isinstance(plain, dict):
        raise SnapshotError(f"{where}: expected an object, found {kind_of(plain)}")
    texts = {name: plain.get(name, "") for name in names}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise SnapshotError(f'{where}: "{name}" must be a string, found {kind_of(value)}')
    for name in required:
        if not texts[name]:
            raise SnapshotError(f'{where} has no "{name}"')
    return texts


def parse(text: str) -> Any:
    """Return what JSON ``text`` holds; raises ``SnapshotError`` for what is not strictly JSON."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise SnapshotError(f"has the key {text_of(twice)} twice in one object")
        return found

    def constant(name: str) -> Any:
        raise SnapshotError(f"is not JSON: {name} is not a JSON value")

    def number(text: str) -> float:
        found = float(text)
        if not isfinite(found):  # what JSON has no way to write again
            raise SnapshotError(f"has the number {text[:40]}, which is too large")
        return found

    try:
        data = json.loads(
            text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number
        )
        _refuse_deep(data)
        if "\\ud" in text.lower():
            # A lone surrogate is legal JSON, but no text that can be printed or written again.
            json.dumps(data, ensure_ascii=False).encode()
    except SnapshotError:
        raise
    except json.JSONDecodeError as error:
        raise SnapshotError(
            f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise SnapshotError("cannot be read as JSON: it is nested too deeply") from None
    except UnicodeEncodeError:
        raise SnapshotError("contains half of a surrogate pair, which is not text") from None
    except ValueError as error:
        raise SnapshotError(f"cannot be read as JSON: {error}") from None
    return data


def _refuse_deep(data: Any) -> None:
    """Raise ``SnapshotError`` for what could not be written again: that takes a call a level."""
    level = [data]
    for _ in range(DEEPEST):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise SnapshotError(f"cannot be read: it is nested more than {DEEPEST} levels deep")


def size(value: Any, where: str) -> int:
    """Return the bytes of ``[1536, "1.50 KiB"]``; a plain number, written by hand, will do."""
    number = value[0] if isinstance(value, list) and len(value) == 2 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST:
        raise SnapshotError(f'{where} must be bytes such as [1536, "1.50 KiB"]')
    if number is not value and value[1] != format_size(number) and not _is_about(value[1], number):
        raise SnapshotError(
            f"{where} is {text_of(value)}, which are two sizes. Write the number of bytes alone"
        )
    return number


def _is_about(text: Any, number: int) -> bool:
    """Tell whether a text for people is that of a number: other versions may round otherwise."""
    try:
        return isinstance(text, str) and abs(parse_size(text) - number) <= number * _ROUNDED
    except UsageError:
        return False


def sized(table: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return sizes as they stand in a file: the bytes, and the same for people."""
    return {name: [nbytes, format_size(nbytes)] for name, nbytes in table.items()}


def block(plain: Mapping[str, Any], indent: str, levels: int = _OPENED) -> str:
    """Return an object with one value a line; objects and lists of lists are opened up.

    A fact, which is ``levels`` deep, has one line; one of several lists has a line for each.
    """
    if not plain:
        return indent + "{}"
    lines = [
        f"{indent}  {text_of(key)}: {_value(value, indent + '  ', levels - 1)}"
        for key, value in plain.items()
    ]
    return f"{indent}{{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _value(value: Any, indent: str, levels: int) -> str:
    if isinstance(value, dict) and levels:
        return block(value, indent, levels).lstrip(" ")
    several = isinstance(value, list | tuple) and (levels or value[1:])
    if several and value and isinstance(value[0], list | tuple):
        rows = ",\n".join(f"{indent}  {text_of(row)}" for row in value)
        return f"[\n{rows}\n{indent}]"
    return text_of(value)


def text_of(value: Any) -> str:
    """Return a value as JSON on one line, of ASCII alone."""
    return json.dumps(value, ensure_ascii=True)


def kind_of(value: Any) -> str:
    """Return what a JSON value is, for messages."""
    return _KINDS.get(type(value), "a number")
