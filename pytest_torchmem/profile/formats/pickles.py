"""Pickles written piece by piece: a list of millions of dictionaries is never in memory.

The opcodes are those of Lib/pickle.py, protocol 4. What comes more than once is written once, and
fetched from the reader's memo after that.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

_BATCH = 1000
"""Elements of a list that a reader holds before it adds them; as in ``pickle.Pickler``."""
_REMEMBERED = 100_000
"""Beginnings of rows that are kept as they are written."""
_LARGE = 1 << 31
_OPEN = pickle.EMPTY_DICT + pickle.MARK
_SMALL = pickle.BININT
"""Before the four bytes of a number that has no sign."""
_FOUR_BYTES = struct.Struct("<I")


class Rows(NamedTuple):
    """Dictionaries of the same names, in the order of ``names``, as what they are made of.

    A row is the values of the names before ``changing``, its value, and those of the names after
    it: what differs from row to row stands between what comes again and again. Rows that follow
    each other come together, as a key for what each has before it (``before`` returns that), the
    first one's value, which counts up, and what all have after it. That is one object wherever it
    comes again, which lives until the end.
    """

    names: Sequence[str]
    changing: str
    before: Callable[[Any], tuple[tuple[Any, ...], ...]]
    rows: Iterable[tuple[Any, int, tuple[Any, ...]]]

    def dictionaries(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as what a reader of the pickle gets."""
        for key, first, after in self.rows:
            for changing, before in enumerate(self.before(key), first):
                yield dict(zip(self.names, (*before, changing, *after), strict=True))


class PickleWriter:
    """Writes a dictionary, of which some values are rows that are made as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[Any, bytes] = {}
        """What fetches a text, or an object by its id, from the memo."""

    def dictionary(self, values: Iterable[tuple[str, Any]]) -> None:
        """Write a dictionary; ``Rows`` become a list of dictionaries in a list."""
        write = self._file.write
        write(pickle.PROTO + bytes([4]) + pickle.EMPTY_DICT + pickle.MARK)
        for name, value in values:
            write(self._text(name))
            if isinstance(value, Rows):
                write(pickle.EMPTY_LIST)
                self._list(value)
                write(pickle.APPEND)
            else:
                write(_whole(value))
        write(pickle.SETITEMS + pickle.STOP)

    def _list(self, table: Rows) -> None:
        heads: dict[Any, list[bytes]] = {}
        tails: dict[int, bytes] = {}
        self._file.write(pickle.EMPTY_LIST)
        batch, rows, four_bytes = [pickle.MARK], 0, _FOUR_BYTES.pack
        for key, changing, last in table.rows:
            beginnings, end = heads.get(key), tails.get(id(last))
            if beginnings is None or end is None or changing > _LARGE - len(beginnings):
                several = table.before(key)
                for number, first in enumerate(several, changing):
                    batch += self._head(table, first), _number(number), self._tail(table, last)
                # As they are written when they come again.
                tails[id(last)] = self._tail(table, last)
                if len(heads) < _REMEMBERED:
                    heads[key] = [self._head(table, first) + _SMALL for first in several]
                rows += len(several)
            elif len(beginnings) == 1:
                batch += beginnings[0], four_bytes(changing), end
                rows += 1
            else:
                for beginning in beginnings:
                    batch += beginning, four_bytes(changing), end
                    changing += 1
                rows += len(beginnings)
            if rows >= _BATCH:
                batch.append(pickle.APPENDS)
                self._file.write(b"".join(batch))
                batch, rows = [pickle.MARK], 0
        batch.append(pickle.APPENDS)
        self._file.write(b"".join(batch))

    def _head(self, table: Rows, values: Iterable[Any]) -> bytes:
        """Return a row up to the value that changes."""
        names = table.names[: table.names.index(table.changing)]
        return _OPEN + self._items(names, values) + self._text(table.changing)

    def _tail(self, table: Rows, values: Iterable[Any]) -> bytes:
        names = table.names[table.names.index(table.changing) + 1 :]
        return self._items(names, values) + pickle.SETITEMS

    def _items(self, names: Iterable[str], values: Iterable[Any]) -> bytes:
        return b"".join(
            [
                part
                for name, value in zip(names, values, strict=True)
                for part in (self._text(name), self._value(value))
            ]
        )

    def _value(self, value: Any) -> bytes:
        if type(value) is int:
            return _number(value)
        if type(value) is str:
            return self._text(value)
        return self._places.get(id(value)) or self._once(value)

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


def _number(number: int) -> bytes:
    if 0 <= number < _LARGE:
        return _SMALL + number.to_bytes(4, "little")
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
