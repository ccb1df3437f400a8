"""How far a command has come, on a terminal, where it takes longer than a second."""

from __future__ import annotations

import sys
import time

_PATIENCE = 1.0
"""Seconds of which nobody needs to be told."""


class Progress:
    """Counts what is done of a number of things, on standard error, if that is a terminal."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._done = 0
        self._begun = time.monotonic()
        self._shown = ""

    def step(self) -> None:
        """Take note that one more is about to be done."""
        self._done += 1
        if time.monotonic() - self._begun > _PATIENCE and sys.stderr.isatty():
            self._show(f"{self._done} of {self._total} {self._what}")

    def done(self) -> None:
        """Clear the line."""
        if self._shown:
            self._show("")

    def _show(self, text: str) -> None:
        padding = " " * (len(self._shown) - len(text))
        print(f"\r{text}{padding}", end="" if text else "\r", file=sys.stderr, flush=True)
        self._shown = text
