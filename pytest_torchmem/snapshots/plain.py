"""The JSON of the files that people review: strict to read, one value a line to write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.units import format_size


def parse(text: str) -> Any:
    """Return what JSON ``text`` holds; raises ``SnapshotError`` for what is not strictly JSON."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise SnapshotError(f"holds the key {text_of(twice)} twice in one object")
        return found

    def constant(name: str) -> Any:
        raise SnapshotError(f"is not JSON: {name} is not a JSON value")

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
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
        raise SnapshotError("is not JSON that can be read: it is nested too deeply") from None
    except UnicodeEncodeError:
        raise SnapshotError("holds half of a surrogate pair, which is not text") from None
    except ValueError as error:
        raise SnapshotError(f"is not JSON that can be read: {error}") from None
    return data


def size(value: Any, where: str) -> int:
    """Return the bytes of ``[1536, "1.50 KiB"]``; a plain number, written by hand, will do."""
    number = value[0] if isinstance(value, list) and len(value) == 2 else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise SnapshotError(f'{where} must be bytes such as [1536, "1.50 KiB"]')
    return number


def sized(table: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return sizes as they stand in a file: the bytes, and the same for people."""
    return {name: [nbytes, format_size(nbytes)] for name, nbytes in table.items()}


def block(plain: Mapping[str, Any], indent: str) -> str:
    """Return an object with one value a line; only objects are opened up, lists stay on a line."""
    if not plain:
        return indent + "{}"
    lines = [
        f"{indent}  {text_of(key)}: {_value(value, indent + '  ')}" for key, value in plain.items()
    ]
    return f"{indent}{{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _value(value: Any, indent: str) -> str:
    if isinstance(value, dict):
        return block(value, indent).lstrip(" ")
    return text_of(value)


def text_of(value: Any) -> str:
    """Return a value as JSON on one line, of ASCII alone."""
    return json.dumps(value, ensure_ascii=True)


def kind_of(value: Any) -> str:
    """Return what a JSON value is, for messages."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        type(None): "null",
        bool: "a boolean",
    }
    return names.get(type(value), "a number")
