"""Files that runs read and write: replaced whole or not at all, by one run at a time.

What is no ordinary file (``/dev/null``, a pipe) is written into and stays what it is, and is never
waited for. The JSON of files that people review is strict to read, and has one value a line.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.units import MOST, format_size, parse_size

PATIENCE = 120.0
"""Seconds to wait for another run that writes into the same directory."""
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
"""The signals by which people and CI systems end a run."""
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Where paths lead to what a process has open, which another file cannot take the place of."""
_LONGEST = 50
"""Characters of a name that a temporary one has: in bytes, names may have 255 (NAME_MAX)."""
_TEMPORARY = re.compile(r"\.[^/]+\.json\.[a-z0-9_]{8}\.tmp")


def read_text(path: Path) -> str | None:
    """Return the text of the file at ``path``, ``None`` if there is none.

    Raises ``OSError`` where it cannot be read, and ``UnicodeDecodeError`` where it is not UTF-8.
    """
    with _real_files():
        try:
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(errno.EINVAL, "it is not a regular file")  # reading a pipe would wait
            return path.read_bytes().decode("utf-8-sig")  # editors on Windows put a mark at the top
        except FileNotFoundError:
            return None


def _real_files() -> AbstractContextManager[object]:
    """Return a context in which files are those of the machine, also where a test has put the file
    system of pyfakefs in their place, as that does for reports (pyfakefs/pytest_plugin.py).
    """
    patching: Any = sys.modules.get("pyfakefs.fake_filesystem_unittest")
    patcher = getattr(getattr(patching, "Patcher", None), "PATCHER", None)
    if patcher is None or not patcher.is_patching:
        return nullcontext()
    paused: AbstractContextManager[object] = patching.Pause(patcher)
    return paused


def write(path: Path, text: str) -> None:
    """Replace the file at ``path`` by ``text``, at once: a reader sees the old or the new one.

    A file that is a symbolic link stays one, and permissions stay as they are. A signal that ends
    the process does so when all is written, and no temporary file is left.
    """
    if _is_stream(path):
        append(path, text)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with _uninterrupted():
        short = target.name
        if len(short) > _LONGEST:
            short = short[:_LONGEST] + (".json" if target.suffix == ".json" else "")
        name = target.parent / f".{short}.{secrets.token_hex(4)}.tmp"
        try:
            # A new file has the permissions of any other; the umask, which other threads share, is
            # for that not asked for, since only a change tells it.
            with open(name, "x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.chmod(name, target.stat().st_mode & 0o7777)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    with contextlib.suppress(OSError):  # where the platform lets a directory be synchronised
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def append(path: Path, text: str) -> None:
    """Write ``text`` at a file's end, to a device or into a pipe, which somebody has to read."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nothing reads from this pipe", str(path)) from None
        raise
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
        if stat.S_ISBLK(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is a disk, not a file", str(path))
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        file.write(text)


def remove(path: Path) -> None:
    """Remove the file at ``path``, and its directory if that was the last one.

    Of a symbolic link, what it leads to stays.
    """
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other runs from changing files beside ``path`` while the body reads, merges and writes.

    The directory itself is locked, so that no lock file is left for people to wonder about, and
    that of the file that a symbolic link leads to as well. Where a platform cannot lock directories
    (Windows), a file among the user's temporary ones is. Raises ``OSError`` where another run does
    not come to its end.
    """
    directories = {os.path.realpath(path.parent), os.path.dirname(os.path.realpath(path))}
    with contextlib.ExitStack() as stack:
        for directory in sorted(directories):  # in the same order in every run
            stack.enter_context(_directory_locked(Path(directory)))
        yield


@contextlib.contextmanager
def _directory_locked(directory: Path) -> Iterator[None]:
    if find_spec("fcntl") is None:
        from filelock import FileLock

        directory.mkdir(parents=True, exist_ok=True)
        name = os.path.normcase(os.path.realpath(directory))
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        with FileLock(Path(tempfile.gettempdir()) / f"torchmem-{digest}.lock"):
            yield
        return
    until, descriptor = time.monotonic() + PATIENCE, None
    while descriptor is None:
        with contextlib.suppress(FileNotFoundError):
            descriptor = _lock(directory)
        if descriptor is None:
            if time.monotonic() > until:
                why = f"another run has been writing there for more than {PATIENCE:.0f} s"
                raise OSError(errno.ETIMEDOUT, why, str(directory))
            time.sleep(0.01)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(directory: Path) -> int | None:
    """Return the directory, open and locked, or ``None`` where another run has it.

    Raises ``FileNotFoundError`` where another run removes it meanwhile.
    """
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise
        return None  # removed between two looks of ``mkdir``, and made anew by a third run
    with contextlib.ExitStack() as on_failure:
        descriptor = os.open(directory, os.O_RDONLY)
        on_failure.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:
            pass  # some network file systems refuse to lock; a write is then still atomic
        else:
            # Where another run removed the directory with its last file, and a third one made it
            # anew, a lock on the old one keeps nobody away.
            if not os.path.samestat(os.fstat(descriptor), os.stat(directory)):
                return None
            # The leftovers of killed runs: the lock of a writer keeps others away.
            for name in filter(_TEMPORARY.fullmatch, os.listdir(directory)):
                with contextlib.suppress(OSError):
                    os.unlink(directory / name)
        on_failure.pop_all()
        return descriptor


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off signals that end the process until the body has ended.

    Only the main thread can, and it is the one that signals are handled on.
    """
    arrived: list[int] = []
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _ENDING if hasattr(signal, name)):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    handler = signal.signal(number, lambda signum, _: arrived.append(signum))
                    before[number] = handler
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def _is_stream(path: Path) -> bool:
    """Tell whether there is something at ``path`` that must not be replaced by a file."""
    if os.path.abspath(path).startswith(_STREAMS):
        return True
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


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
    entries: Mapping[K, V] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of their own that people wrote at the top."""


def parse_file(text: str, what: str, schema: int, blocks: str) -> dict[str, Any]:
    """Return the object in a file's ``text``, whose list ``blocks`` holds ``what``."""
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
    return _KINDS.get(type(value), "a number")


def git(directory: Path, *arguments: str, timeout: float | None = None) -> str:
    """Return what git prints; raises ``UsageError`` where it fails, takes long or is not there."""
    import subprocess

    try:
        command = ["git", *arguments]
        result = subprocess.run(
            command, cwd=directory, capture_output=True, check=False, timeout=timeout
        )
    except FileNotFoundError:
        raise UsageError("git is not installed, so revisions cannot be compared") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]}: it took more than {timeout} seconds") from None
    if result.returncode:
        message = result.stderr.decode("utf-8", "replace").strip() or "git failed"
        raise UsageError(f"git {arguments[0]}: {message}")
    return result.stdout.decode("utf-8", "surrogateescape")


_MOST_VERSIONS = 4
"""Those of a file in which a failure looks for the lines that were there."""


@lru_cache(maxsize=64)
def former_texts(path: str) -> list[str]:
    """Return the texts of a file that git has committed, the last first; none where it is in no
    repository, or git takes long.
    """
    folder, name = Path(path).parent, Path(path).name
    with contextlib.suppress(UsageError, OSError):
        committed = git(folder, "log", f"-{_MOST_VERSIONS}", "--format=%H", "--", name, timeout=5)
        return [committed_text(path, one) for one in committed.split()]
    return []


@lru_cache(maxsize=256)
def committed_text(path: str, revision: str) -> str:
    """Return the text of a file as git has it in a revision, "" where it is not there."""
    with contextlib.suppress(UsageError, OSError):
        return git(Path(path).parent, "show", f"{revision}:./{Path(path).name}", timeout=5)
    return ""
