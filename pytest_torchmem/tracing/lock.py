"""One trace at a time in a process, and none in a process that is forked in the course of one.

A forked process is a program of its own, such as a worker of a ``torch.utils.data.DataLoader``: it
has all that a trace switched on and replaced, its hollow tensors, and, where the trace's thread
forked, that thread's state. What it computes has to be real.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from pytest_torchmem.errors import UsageError
from pytest_torchmem.step.signals import undisturbed
from pytest_torchmem.torch_private.state.entered import is_within_transform

_Result = TypeVar("_Result")
_PATIENCE = 10.0
"""Seconds that the end of the process waits for a trace."""


class Standing(Protocol):
    """What is on between traces, and off while one runs."""

    def pause(self) -> None:
        """Switch off what is on, for a trace."""

    def resume(self) -> None:
        """Switch it on again."""


class Running:
    """The trace that is running in this process, or what is on between traces."""

    lock = threading.Lock()
    layers: ExitStack | None = None
    """What it switched on, to be switched off."""
    standing: tuple[Standing, int] | None = None
    """What is on between traces, and its thread."""


def run_alone(switch_on: Callable[[ExitStack], None], body: Callable[[], _Result]) -> _Result:
    """Run ``body`` with what ``switch_on`` puts onto a stack, which is switched off at the end.

    A process that is forked meanwhile switches it off at once. Neither way does a signal come in
    between. Raises ``UsageError`` where a trace is running already, or a transform of functions.
    """
    __tracebackhide__ = True
    if is_within_transform():
        raise UsageError(
            "a trace cannot run inside of torch.vmap, torch.func.grad, jvp or another transform of "
            "functions: call it outside, and transform within what is traced. (If this is outside "
            "of all, what ran before on this thread began one and never ended it.)"
        )
    taken: list[Any] = []
    layers = ExitStack()
    with standing_paused():
        try:
            with undisturbed():
                take(taken)
                Running.layers = layers
                switch_on(layers)
            return body()
        finally:
            try:
                release(taken, layers)
            finally:
                if taken:  # a signal kept the first from beginning
                    release(taken, layers)


@contextmanager
def standing_paused() -> Iterator[None]:
    """Switch off what is on between traces, if it is on this thread; then on again."""
    standing, thread = Running.standing or (None, 0)
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


def a_fake_gpu_is_seen() -> bool:
    """Return whether a fake GPU is on between traces, so that ``torch.cuda`` tells of that."""
    return Running.standing is not None


def take(taken: list[Any]) -> None:
    """Take the place of the one trace that runs in a process, and note it in ``taken``."""
    lock = Running.lock
    if not lock.acquire(blocking=False):
        raise UsageError(
            "a trace is already running in this process: a traced program cannot trace, and two "
            "threads cannot trace at once"
        )
    taken.append(lock)


def release(taken: list[Any], layers: ExitStack) -> None:
    """Switch off what was switched on, and give the place back."""
    with undisturbed():
        if not taken:
            return
        try:
            layers.close()
        finally:
            lock = taken.pop()
            if Running.lock is lock:  # not in a forked process that goes on to here
                Running.layers = None
            lock.release()


def _end_in_forked_process() -> None:
    layers, Running.layers, Running.lock = Running.layers, None, threading.Lock()
    Running.standing = None
    if layers is not None:
        layers.close()


def _end_with_process() -> None:
    """Wait for the trace of a daemon thread: one that Python ends within C++ ends the process."""
    Running.lock.acquire(timeout=_PATIENCE)


atexit.register(_end_with_process)
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_end_in_forked_process)
