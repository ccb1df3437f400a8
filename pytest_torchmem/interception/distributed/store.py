"""The store that processes share, in a world of which one process is there.

Files that another process of a world writes, and that the traced one looks or waits for.

After a collective a program takes it that what another process wrote before is there. The traced
process alone has not seen it written, so the other is traced up to that collective
(``interception/values/messages.py``) before it is told that a file is not there.
"""

import errno
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from stat import S_ISREG
from types import FrameType
from typing import Any, cast

import torch.distributed

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.values.messages import AWAITED_CHANGE, AWAITED_FILE, Mailbox
from pytest_torchmem.torch_private.patches import Replacements

_Store: Any = getattr(torch.distributed, "Store", object)


class SharedStore(_Store):  # type: ignore[misc]
    """A store to which every process has added what this one adds.

    What only another process would have written is asked of the first one. Where that is this one,
    to wait raises ``UnknownValueError`` at once.
    torch/csrc/distributed/c10d/init.cpp, ``PythonStore``.
    """

    def __init__(
        self, processes: int, alive: "list[SharedStore]", mailbox: Mailbox | None = None
    ) -> None:
        """``alive`` holds it: C++ that does, in a group or a ``PrefixStore``, holds no more than
        the part of it that is in C++.
        """
        super().__init__()
        alive.append(self)
        self._processes, self._mailbox = processes, mailbox
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(seconds=300)

    def clone(self) -> "SharedStore":
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


_HELPERS = frozenset({"genericpath", "glob", "ntpath", "os", "pathlib", "posixpath", "shutil"})
"""Modules through which a program looks for a file."""
_OWN_FILES = frozenset({"torch", "triton", "sympy"}) | sys.stdlib_module_names
"""Those that look for files of their own: caches of compiled code, sources."""
_OF_PROGRAM = "torch.distributed.checkpoint"
_WAITS = 3
"""A program that looks so often, and sleeps in between, waits."""
_SPINS = 1000
"""So does one that looks so often without."""
_MOMENT, _LONGER = 0.001, 0.1
"""Seconds that it sleeps, until others were asked, and then: another of its threads may do it."""
_MOST_LOOKS = {True: 100, False: 100_000}
"""What ends a wait for a file that nobody writes, with and without sleep."""


_OF_PATHS = getattr(pathlib, "_NormalAccessor", None)
"""Where the paths of Python 3.10 keep functions of ``os`` that they found as they were imported."""
_PATHS_HAVE = ("listdir", "scandir", "stat", "unlink")
_MAKING = frozenset({"makedirs", "mkdir", "rmtree"})
_IMPORTING = "<frozen importlib._bootstrap>"


@dataclass(slots=True)
class _Looks:
    """How often a program has looked for a file that is not there, or into a directory."""

    times: int = 0
    sleeps: int = 0
    listed: frozenset[str] = frozenset()
    """What was in it, of a directory."""

    @property
    def waits(self) -> bool:
        """Whether the program waits for it."""
        return self.times >= _WAITS and (self.sleeps >= _WAITS - 1 or self.times >= _SPINS)


class FilesOfOthers:
    """What looks for files and waits for them, in the trace of one process."""

    def __init__(self, mailbox: Mailbox, processes: int, on_thread: Callable[[], bool]) -> None:
        self._mailbox, self._processes, self._on_thread = mailbox, processes, on_thread
        self._stat, self._unlink, self._sleep = os.stat, os.unlink, time.sleep
        self._access, self._listdir, self._scandir = os.access, os.listdir, os.scandir
        self._looks: dict[str, _Looks] = {}

    def replacements(self) -> Replacements:
        """Return what takes the place of functions of Python."""
        lists = {"listdir": self.listdir, "scandir": self.scandir}
        removes = {"unlink": self.unlink, "remove": self.unlink}
        of_os = {"stat": self.stat, "access": self.access, **lists, **removes}
        of_paths: dict[str, Any] = {
            name: staticmethod(cast(Any, of_os[name])) for name in _PATHS_HAVE
        }
        return [
            (os, of_os),
            (time, {"sleep": self.sleep}),
            *([(_OF_PATHS, of_paths)] if _OF_PATHS is not None else ()),
        ]

    def stat(self, path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        """Return what is known of a file, as soon as the process that writes it has done so."""
        try:
            found = self._stat(path, *args, **kwargs)
        except FileNotFoundError:
            if self._looks_itself(path, sys._getframe(1)):
                self._look_for(os.path.abspath(path))
            raise
        if not isinstance(path, (str, os.PathLike)) or not self._on_thread():
            return found
        whole = os.path.abspath(path)
        self._looks.pop(whole, None)
        if S_ISREG(found.st_mode) and self._mailbox.hides(whole):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def access(self, path: Any, mode: int, **kwargs: Any) -> bool:
        """Return whether a file may be used; to ask for one that is not there is to look for it."""
        if not kwargs and self._looks_itself(path, sys._getframe(1)):
            try:
                self.stat(path)
            except OSError:
                return False
        return self._access(path, mode, **kwargs)

    def listdir(self, path: Any = ".") -> list[Any]:
        """Return what is in a directory, and note that the program has looked."""
        if self._looks_itself(path, sys._getframe(1)):
            self._list(path)
        return self._listdir(path)

    def scandir(self, path: Any = ".") -> Any:
        """Return an iterator over what is in a directory, and note that the program has looked."""
        if self._looks_itself(path, sys._getframe(1)):
            self._list(path)
        return self._scandir(path)

    def unlink(self, path: Any, **kwargs: Any) -> None:
        """Remove a file, unless another process, which is traced after this one, reads it."""
        is_path = isinstance(path, (str, os.PathLike)) and not kwargs and self._on_thread()
        if not is_path or not self._mailbox.is_read_by_other(os.path.abspath(path)):
            self._unlink(path, **kwargs)

    def _looks_itself(self, path: Any, frame: FrameType) -> bool:
        return self._on_thread() and _is_of_program(path, frame)

    def _look_for(self, path: str) -> None:
        self._mailbox.look_for(path)
        self._look(path, self._looks.setdefault(path, _Looks()), AWAITED_FILE)

    def _list(self, path: Any) -> None:
        """Note that a program lists a directory: for a file of another process, if it waits."""
        whole = os.path.join(os.path.abspath(path), "")  # apart from looks for the directory itself
        with suppress(OSError):
            listed = frozenset(self._listdir(whole))
            looks = self._looks.setdefault(whole, _Looks())
            if listed != looks.listed:
                looks = self._looks[whole] = _Looks(listed=listed)
            self._look(whole, looks, AWAITED_CHANGE)

    def _look(self, path: str, looks: _Looks, kind: str) -> None:
        looks.times += 1
        if looks.waits:
            self._mailbox.wait_for(path, self._processes, kind)
        if looks.times > _MOST_LOOKS[looks.sleeps >= looks.times // 2]:
            what = "a file" if kind == AWAITED_FILE else "a file in a directory"
            raise UnknownValueError(
                f"the program waits for {what} ({path}) that no process writes, as far as they "
                "are traced. Have it there before the trace, or skip this line while tracing"
            )

    def sleep(self, seconds: float) -> None:
        """Sleep; hardly, where the program looks for a file in between: no other process runs."""
        if self._looks and self._on_thread():
            for looks in self._looks.values():
                if looks.times >= looks.sleeps:  # it has looked since it slept
                    seconds = min(seconds, _MOMENT if looks.sleeps <= _WAITS else _LONGER)
                looks.sleeps += 1
        self._sleep(seconds)


def _is_of_program(path: Any, frame: FrameType | None) -> bool:
    """Return whether it is the program that looks for a file, and no library for its own.

    What a module looks for as it is imported belongs to it: to end that pass would leave the module
    half imported. ``os.makedirs`` looks for what it is about to make.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        return False
    name = ""
    while frame is not None:
        if not name and _module(frame).partition(".")[0] not in _HELPERS:
            name = _module(frame)
            if name.partition(".")[0] in _OWN_FILES and not name.startswith(_OF_PROGRAM):
                return False
        code = frame.f_code
        if (not name and code.co_name in _MAKING) or code.co_filename == _IMPORTING:
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
