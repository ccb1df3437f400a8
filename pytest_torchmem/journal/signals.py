"""Signals held back while a trace is switched on or off.

A handler of Python's runs between any two of its instructions, and raises there (``Ctrl-C``, or a
timeout's ``SIGALRM``): halfway through, some of what a trace replaces would stay replaced.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]
_SIGNALS: tuple[int, ...] = tuple(sorted(map(int, signal.valid_signals())))
_handler_of: Callable[[int], Any] = _signal.getsignal
"""``signal.getsignal`` without a search for the name of what it returns, which takes ten times as
long (Lib/signal.py)."""
_set: Callable[[int, _Handler], object] = _signal.signal


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run handlers of signals that arrive meanwhile afterwards, on the main thread.

    No other thread runs any.
    """
    arrived: list[tuple[_Handler, int, FrameType | None]] = []
    held: list[tuple[int, _Handler]] = []
    try:
        if threading.current_thread() is threading.main_thread():
            for number in compress(_SIGNALS, map(callable, map(_handler_of, _SIGNALS))):
                _hold(number, held, arrived)
        yield
    finally:
        try:
            _give_back(held)
        finally:
            _give_back(held)  # what a signal kept the first from giving back
        for handler, number, frame in arrived:
            handler(number, frame)


def _hold(
    number: int,
    held: list[tuple[int, _Handler]],
    arrived: list[tuple[_Handler, int, FrameType | None]],
) -> None:
    handler = _handler_of(number)
    if callable(handler):
        held.append((number, handler))
        _set(number, lambda number, frame: arrived.append((handler, number, frame)))


def _give_back(held: list[tuple[int, _Handler]]) -> None:
    while held:
        _set(*held[-1])
        held.pop()
