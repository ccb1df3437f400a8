"""The store that processes share, in a world of which one process is there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.values.messages import Mailbox

_Store: Any = getattr(torch.distributed, "Store", object)


class SharedStore(_Store):  # type: ignore[misc]
    """A store to which every process has added what this one adds.

    What only another process would have written is asked of the first one. Where that is this one,
    to wait raises ``UnknownValueError`` at once.
    torch/csrc/distributed/c10d/init.cpp, ``PythonStore``.
    """

    def __init__(
        self, processes: int, alive: list[SharedStore], mailbox: Mailbox | None = None
    ) -> None:
        """``alive`` holds it: C++ that does, in a group or a ``PrefixStore``, holds no more than
        the part of it that is in C++.
        """
        super().__init__()
        alive.append(self)
        self._processes, self._mailbox = processes, mailbox
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(seconds=300)

    def clone(self) -> SharedStore:
        """Return the store: it has no connection that another would need."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        if self._mailbox is not None:
            self._mailbox.write(key, self._values[key])

    def get(self, key: str) -> bytes:
        """Return a value that this process has written."""
        self.wait([key])
        return self._values[key]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write a value where the expected one is there, or nothing; return what is there then."""
        expected = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, b"") in (expected, b""):
            self.set(key, desired)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, once for each process; return it."""
        number = int(self._values.get(key, b"0")) + amount * self._processes
        self._values[key] = str(number).encode()
        return number

    def append(self, key: str, value: bytes | str) -> None:
        """Append to a value."""
        added = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = self._values.get(key, b"") + added

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values that this process has written."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return that ``append`` and the functions of several keys are there."""
        return True

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether this process has written all of the values."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return if the values are there; raise ``UnknownValueError`` if they are not."""
        missing = [key for key in keys if key not in self._values]
        if self._mailbox is not None:
            for key in tuple(missing):
                value = self._mailbox.read(key)
                if value is not None:
                    self._values[key] = value
                    missing.remove(key)
        if missing:
            raise UnknownValueError(
                f"the program waits for what another process writes to the store "
                f"({', '.join(missing)}), and a trace has one process. Skip this line while tracing"
            )

    def delete_key(self, key: str) -> bool:
        """Forget a value; return whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many values there are."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Take note of how long others would be waited for."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long others would be waited for."""
        return self._timeout
