"""Pickles written piece by piece: a list of millions of dictionaries is never in memory.

The opcodes are those of Lib/pickle.py, protocol 4. What comes more than once is written once, and
fetched from the reader's memo after that.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

_BATCH = 1000
"""Elements of a list that a reader holds before it adds them; as in ``pickle.Pickler``."""
_OPEN = pickle.EMPTY_DICT + pickle.MARK
_SMALL = struct.Struct("<ci").pack


class PickleWriter:
    """Writes a dictionary, of which some values are lists that are made as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[Any, bytes] = {}
        """What fetches a text, or an object by its id, from the memo."""

    def dictionary(self, values: Iterable[tuple[str, Any]], rows: str) -> None:
        """Write a dictionary; the value of ``rows`` yields dictionaries, for a list in a list."""
        write = self._file.write
        write(pickle.PROTO + bytes([4]) + pickle.EMPTY_DICT + pickle.MARK)
        for name, value in values:
            write(self._text(name))
            if name == rows:
                write(pickle.EMPTY_LIST)
                self._list(value)
                write(pickle.APPEND)
            else:
                write(_whole(value))
        write(pickle.SETITEMS + pickle.STOP)

    def _list(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.write(pickle.EMPTY_LIST)
        batch = [pickle.MARK]
        for row in rows:
            batch.append(self._row(row))
            if len(batch) > _BATCH:
                self._file.write(b"".join((*batch, pickle.APPENDS)))
                batch = [pickle.MARK]
        self._file.write(b"".join((*batch, pickle.APPENDS)))

    def _row(self, row: Mapping[str, Any]) -> bytes:
        places, parts = self._places, [_OPEN]
        for name, value in row.items():
            parts.append(places.get(name) or self._text(name))
            kind = type(value)
            if kind is int:
                parts.append(_SMALL(pickle.BININT, value) if 0 <= value < 1 << 31 else _long(value))
            elif kind is str:
                parts.append(places.get(value) or self._text(value))
            else:
                parts.append(places.get(id(value)) or self._once(value))
        parts.append(pickle.SETITEMS)
        return b"".join(parts)

    def _text(self, text: str) -> bytes:
        return self._places.get(text) or self._memoized(text, _whole(text))

    def _once(self, value: Any) -> bytes:
        """Return an object that lives until the end, and may come again."""
        return self._memoized(id(value), _whole(value))

    def _memoized(self, key: Any, written: bytes) -> bytes:
        place = len(self._places)
        self._places[key] = (
            pickle.BINGET + bytes([place])
            if place < 256
            else pickle.LONG_BINGET + struct.pack("<I", place)
        )
        return written + pickle.MEMOIZE


def _long(number: int) -> bytes:
    written = pickle.encode_long(number)
    return pickle.LONG1 + bytes([len(written)]) + written


def _whole(value: Any) -> bytes:
    """Return the opcodes of a value, which leave the reader's memo as it is."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(value)
    written = file.getvalue()[2:-1]  # without protocol and end
    if written[:1] == pickle.FRAME:
        return written[9:]
    return written
