"""The journal of a process: what a trace switches on, and off again in reverse order, once.

There is one at a time, and none in a process that is forked in the course of one: that is a program
of its own, such as a worker of a ``torch.utils.data.DataLoader``. It has all that a trace switched
on and replaced, its hollow tensors, and, where the trace's thread forked, that thread's state. What
it computes has to be real.

Signals are held back while a trace is switched on or off. A handler of Python's runs between any
two of its instructions, and raises there (``Ctrl-C``, or a timeout's ``SIGALRM``): halfway through,
some of what a trace replaces would stay replaced.
"""

import _signal  # type: ignore[import-not-found]
import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import compress
from types import FrameType
from typing import Any, Protocol, TypeVar

from pytest_torchmem.errors import UsageError
from pytest_torchmem.torch_private.state.entered import is_within_transform

_Result = TypeVar("_Result")
_PATIENCE = 10.0
"""Seconds that a fork, or the end of the process, waits for a trace, which may wait for it."""


class Standing(Protocol):
    """What is on between traces, and off while one runs."""

    def pause(self) -> None:
        """Switch off what is on, for a trace."""

    def resume(self) -> None:
        """Switch it on again."""


class _Process:
    """The journal that is open in this process, and what is on between traces."""

    lock = threading.Lock()
    switching = threading.RLock()
    """Held while something is switched on or off, for which a fork waits."""
    open: "Journal | None" = None
    standing: tuple[Standing, int] | None = None
    """What is on between traces, and its thread."""
    tracer: threading.Thread | None = None
    """The thread of the last trace."""
    ending = False
    """Whether this process ends: a trace of another thread is not begun any more."""
    parked = threading.Event()
    """Set when such a thread waits for the end."""


class Journal(ExitStack):
    """What was switched on, and is switched off when this ends."""

    _lock: Any = None

    def begin(self, switch_on: Callable[[ExitStack], None]) -> None:
        """Take the place of the one journal of a process, and note what ``switch_on`` does.

        Raises ``UsageError`` where another has it.
        """
        thread = threading.current_thread()
        if _Process.ending and thread is not threading.main_thread():
            _Process.parked.set()
            threading.Event().wait()  # for the end of the process
        with _switching():
            lock = _Process.lock
            if not lock.acquire(blocking=False):
                raise UsageError(
                    "a trace is already running in this process: a traced program cannot trace, "
                    "and two threads cannot trace at once"
                )
            self._lock, _Process.open, _Process.tracer = lock, self, thread
            switch_on(self)

    def end(self) -> None:
        """Undo what was noted, and give the place back; twice is once."""
        if self._lock is None:
            return
        with _switching():
            try:
                self.close()
            finally:
                lock, self._lock = self._lock, None
                if _Process.lock is lock:  # not in a forked process that goes on to here
                    _Process.open = None
                lock.release()


@contextmanager
def _switching() -> Iterator[None]:
    """Let neither a signal nor a fork come in between."""
    with undisturbed(), _Process.switching:
        yield


def run_alone(switch_on: Callable[[ExitStack], None], body: Callable[[], _Result]) -> _Result:
    """Run ``body`` with what ``switch_on`` puts onto a stack, which is switched off at the end.

    Raises ``UsageError`` where a trace is running already, or a transform of functions.
    """
    if is_within_transform():
        raise UsageError(
            "a trace cannot run inside of torch.vmap, torch.func.grad, jvp or another transform of "
            "functions: call it outside, and transform within what is traced. (If this is outside "
            "of all, what ran before on this thread began one and never ended it.)"
        )
    journal = Journal()
    with standing_paused():
        try:
            journal.begin(switch_on)
            return body()
        finally:
            try:
                journal.end()
            finally:
                journal.end()  # where a signal kept the first from beginning


def stand(standing: Standing, switch_on: Callable[[ExitStack], None]) -> Journal:
    """Switch on what is on between traces, until ``no_longer_stand``."""
    journal = Journal()
    _Process.standing = standing, threading.get_ident()
    try:
        journal.begin(switch_on)
    except BaseException:
        no_longer_stand(journal)
        raise
    return journal


def no_longer_stand(journal: Journal) -> None:
    """Switch it off."""
    _Process.standing = None
    journal.end()


@contextmanager
def standing_paused() -> Iterator[None]:
    """Switch off what is on between traces, if it is on this thread; then on again."""
    standing, thread = _Process.standing or (None, 0)
    if standing is None or thread != threading.get_ident():
        yield
        return
    process = os.getpid()
    with undisturbed():
        standing.pause()
    try:
        yield
    finally:
        if os.getpid() == process:  # not in a forked process that goes on to here
            with undisturbed():
                standing.resume()


def what_stands() -> Standing | None:
    """Return what is on between traces: a fake GPU, of which ``torch.cuda`` tells then."""
    return _Process.standing[0] if _Process.standing is not None else None


def _begin_fork() -> None:
    _FORKS[threading.get_ident()] = _Process.switching.acquire(timeout=_PATIENCE)


def _end_fork() -> None:
    if _FORKS.pop(threading.get_ident()):
        _Process.switching.release()


def _end_in_forked_process() -> None:
    journal, _Process.open, _Process.lock = _Process.open, None, threading.Lock()
    _Process.switching, _Process.standing = threading.RLock(), None
    _FORKS.clear()
    if journal is not None:
        journal.close()


def _end_with_process() -> None:
    """Wait until a daemon thread is in no trace, and stopped before its next.

    Python ends threads where they are, and one that is in C++ then ends the process.
    """
    _Process.ending, tracer = True, _Process.tracer
    if tracer is not None and tracer.is_alive() and tracer is not threading.current_thread():
        _Process.lock.acquire(timeout=_PATIENCE)
        _Process.parked.wait(1)


_FORKS: dict[int, bool] = {}
"""Threads that fork, and whether each has waited to the end."""
atexit.register(_end_with_process)
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(
        before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_in_forked_process
    )


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
    arrived: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, _Handler] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in compress(_SIGNALS, map(callable, map(_handler_of, _SIGNALS))):
                handlers[number] = _handler_of(number)
                _set(number, lambda *signal: arrived.append(signal))
        yield
    finally:
        held = [*handlers.items()]
        try:
            _give_back(held)
        finally:
            _give_back(held)  # what a signal kept the first from giving back
        for number, frame in arrived:
            handlers[number](number, frame)


def _give_back(held: list[tuple[int, _Handler]]) -> None:
    while held:
        _set(*held[-1])
        held.pop()
