"""Threads of a trace: the thread that runs the step, and all threads started from it.

They take turns: an operator runs from beginning to end before one of another thread does, so that
the ledger, and the plan of an operator that is made of others, have one order. What belongs to a
thread while it has its turn is put aside for the next.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

from pytest_torchmem.torch_private import dispatcher
from pytest_torchmem.torch_private.keys import FAKE, is_included

_PATIENCE = 10.0
"""Seconds that the end of a trace waits for an operator that another thread is at."""
_OUTLIVED: set[int] = set()
"""Threads that outlived their trace and have not run an operator since."""


class PerThread(Protocol):
    """A part of a trace that is in another state for each thread."""

    @property
    def per_thread(self) -> Mapping[str, Callable[[], Any]]:
        """The attributes that make up the state, with what makes those of a new thread."""


class TraceThreads:
    """Which threads are in a trace, and whose turn it is."""

    def __init__(self) -> None:
        self.last = get_ident()
        """The thread that had the last turn."""
        self.locks: dict[int, Any] = {self.last: dispatcher.turns()}
        """What each thread of the trace holds during its turn.

        It is the same for all but for those that were started within an operator, which may be
        waited for there.
        """
        self.were_one = True
        """Whether no other thread was ever in the trace."""
        self.when_leaving: list[Callable[[], object]] = []
        """Called by a thread at its end, in a turn of its own."""
        self._joined: dict[int, Any] = {}
        """The same of those that were started in it and have not ended, whether or not it is on."""
        self._parts: list[PerThread] = []
        self._states: dict[int, list[list[Any]]] = {}
        self._process = os.getpid()
        self._over = False
        self._held: Any = None

    # -- who is in the trace -----------------------------------------------------------------------

    def on_thread(self) -> bool:
        """Return whether the caller is on a thread of the trace."""
        thread = get_ident()
        return thread in self.locks or self.adopt(thread) is not None

    def adopt(self, thread: int) -> Any:
        """Take a thread of C++ in that torch handed its own state on to; return its lock, or None.

        The autograd engine runs deeply nested backwards on one (torch/csrc/autograd/engine.cpp,
        ``ReadyQueue``, ``MAX_DEPTH``).
        """
        if not self._over and thread in self._joined:  # it was there when this was last on
            _OUTLIVED.discard(thread)
            dispatcher.join_all()
            self.were_one = False
            return self.locks.setdefault(thread, self._joined[thread])
        if self._over or thread in _OUTLIVED or not is_included(FAKE):
            return None
        self.were_one = False
        return self.locks.setdefault(thread, dispatcher.turns())

    def lock_for_new(self) -> Any:
        """Return the lock of a thread that the present one starts."""
        own = self.locks[get_ident()]
        return threading.RLock() if own._is_owned() else own

    @contextmanager
    def joined(self, lock: Any) -> Iterator[None]:
        """Let the present thread be in the trace, unless it is already."""
        thread = get_ident()
        if self._over or thread in self.locks:
            yield
            return
        self.were_one = False
        self.locks[thread] = self._joined[thread] = lock
        _OUTLIVED.discard(thread)
        dispatcher.join_all()
        try:
            yield
        finally:
            self._leave(thread)

    def _leave(self, thread: int) -> None:
        with self.turn():
            if thread in self.locks:
                for call in self.when_leaving:
                    call()
            for kept in (self.locks, self._joined, self._states):
                kept.pop(thread, None)
        _OUTLIVED.discard(thread)
        dispatcher.leave_all()

    # -- whose turn it is --------------------------------------------------------------------------

    def swap(self, *parts: PerThread) -> None:
        """Let the state of parts be put aside when another thread has its turn."""
        self._parts.extend(parts)

    def begin_turn(self) -> Any:
        """Wait until no other thread of the trace is at an operator, and let none begin one.

        Returns the lock whose release ends the turn.
        """
        thread = get_ident()
        lock = self.locks.get(thread) or self.adopt(thread) or threading.RLock()
        lock.acquire()
        if thread != self.last and thread in self.locks:
            self.switch(thread)
        return lock

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the turn."""
        lock = self.begin_turn()
        try:
            yield
        finally:
            lock.release()

    def switch(self, thread: int) -> bool:
        """Put the state of the last thread aside for that of ``thread``; False: there is no trace
        any more.
        """
        if self._over:
            return False
        self._states[self.last] = [
            [getattr(part, name) for name in part.per_thread] for part in self._parts
        ]
        states = self._states.get(thread)
        for position, part in enumerate(self._parts):
            fresh = part.per_thread
            values = states[position] if states else [make() for make in fresh.values()]
            for name, value in zip(fresh, values, strict=True):
                setattr(part, name, value)
        self.last = thread
        return True

    # -- the beginning and the end -----------------------------------------------------------------

    def begin(self) -> None:
        """Let the present thread be in the trace; those that were started in it come back."""
        self.last = get_ident()
        self.locks = {self.last: dispatcher.turns()}
        self._over = False

    def close(self) -> None:
        """Let no other thread book anything any more: what was booked is about to be read."""
        with self.turn():
            self._over = True

    def end(self) -> None:
        """Let no thread be in the trace any more; those that go on wait until ``released``."""
        if os.getpid() == self._process:
            held = dispatcher.turns()
            self._held = held if held.acquire(timeout=_PATIENCE) else None
            if self._held is not None and self.last != get_ident():
                self.switch(get_ident())  # what begins again goes on with its own state
            _OUTLIVED.update(thread for thread in self.locks if thread != get_ident())
        self._over, self.last = True, -1
        self.locks.clear()

    def released(self) -> None:
        """Let threads that outlived the trace go on."""
        if self._held is not None:
            self._held.release()
            self._held = None
