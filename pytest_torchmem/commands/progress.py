"""How far a command has come, or for how long it works, on a terminal, after the first second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

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
        """Clear the line."""
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
