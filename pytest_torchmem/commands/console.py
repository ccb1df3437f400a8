"""A command on a terminal: how far it has come, its exit status, and what it says of errors."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

from pytest_torchmem.errors import TorchmemError
from pytest_torchmem.printable import printable_lines

USAGE = 2
_INTERRUPTED, _PIPE = 130, 141
"""What a shell reports of a program that SIGINT, or SIGPIPE, has ended."""
_OWN = str(Path(__file__).parent.parent)


def prepare_streams() -> None:
    """Let everything be printed, and to nowhere where a stream was closed (``>&-``).

    A name may have letters that a terminal has not.
    """
    if sys.stdout is None:  # Python's answer to a closed descriptor
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def status_of(run: Callable[[], int]) -> int:
    """Return the exit status of a command; report the error that ended it."""
    output = sys.stdout
    try:
        status = run()
        output.flush()
    except BrokenPipeError:  # whoever reads has read enough, as ``head`` does
        _abandon(output)
        return _PIPE
    except KeyboardInterrupt:
        _tell("torchmem: interrupted")
        return _INTERRUPTED
    except (TorchmemError, OSError) as error:
        _abandon(output)  # it may be what cannot be written
        _tell(f"torchmem: error: {_told(error)}")
        return USAGE
    except (Exception, SystemExit) as error:
        if output.closed:
            _tell(
                "torchmem: error: the program has closed the standard output, so nothing is shown"
            )
            return USAGE
        if not (lines := _raised_by_program(error)):
            raise
        _tell(f"torchmem: error: the program raised\n{''.join(lines).rstrip()}")
        return USAGE
    return status


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _abandon(stream: TextIO) -> None:
    """Let what was printed and cannot be written go nowhere, of which Python would tell at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # no stream of the process, or a closed one
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(text: str) -> None:
    """Print an error; the exit status tells of it where that cannot be."""
    try:
        print(printable_lines(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _abandon(sys.stderr)


def _told(error: TorchmemError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _raised_by_program(error: BaseException) -> list[str]:
    """Return the traceback of what a function of the user's raised, without our part of it; nothing
    where something here failed. An operator that refuses its arguments is refused by a ``raise``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return []
    last = frames[-1]
    if last.filename.startswith(_OWN) and not (last.line or "").startswith("raise "):
        return []
    theirs = [one for one in frames if not one.filename.startswith(_OWN)]
    return [*traceback.format_list(theirs), *traceback.format_exception_only(error)]


_PATIENCE = 1.0
"""Seconds of which nobody needs to be told."""


class Progress:
    """Counts what is done of a number of things, on standard error, if that is a terminal."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._done = 0
        self._begun = time.monotonic()
        self._line = _Line()

    def step(self) -> None:
        """Take note that one more is about to be done."""
        self._done += 1
        if time.monotonic() - self._begun > _PATIENCE and sys.stderr.isatty():
            self._line.show(f"{self._done} of {self._total} {self._what}")

    def done(self) -> None:
        self._line.show("")


@contextmanager
def elapsed(what: str) -> Iterator[None]:
    """Show ``what`` is being done, and for how long, on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    over, line, begun = Event(), _Line(), time.monotonic()

    def show() -> None:
        while not over.wait(_PATIENCE):
            line.show(f"{what}: {time.monotonic() - begun:.0f} s")

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        line.show("")


class _Line:
    """The last line of the terminal, which is written anew in its place."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._shown = ""

    def show(self, text: str) -> None:
        """Show another text, or none."""
        padding = " " * (len(self._shown) - len(text))
        if text or self._shown:
            end = "" if text else "\r"
            print(f"\r{text}{padding}", end=end, file=self._stream, flush=True)
        self._shown = text
