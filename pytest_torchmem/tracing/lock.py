"""One trace at a time in a process, and none in a process that is forked in the course of one.

A forked process is a program of its own, such as a worker of a ``torch.utils.data.DataLoader``: it
has all that a trace switched on and replaced, its hollow tensors, and, where the trace's thread
forked, that thread's state. What it computes has to be real.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from pytest_torchmem.errors import UsageError
from pytest_torchmem.tracing.signals import undisturbed

_Result = TypeVar("_Result")


class _Running:
    """The trace that is running in this process."""

    lock = threading.Lock()
    layers: ExitStack | None = None
    """What it switched on, to be switched off."""


def run_alone(switch_on: Callable[[ExitStack], None], body: Callable[[], _Result]) -> _Result:
    """Run ``body`` with what ``switch_on`` puts onto a stack, which is switched off at the end.

    A process that is forked meanwhile switches it off at once. Neither way does a signal come in
    between. Raises ``UsageError`` where a trace is running already.
    """
    __tracebackhide__ = True
    taken: list[Any] = []
    layers = ExitStack()
    try:
        with undisturbed():
            _take(taken)
            _Running.layers = layers
            switch_on(layers)
        return body()
    finally:
        try:
            _switch_off(taken, layers)
        finally:
            if taken:  # a signal kept the first from beginning
                _switch_off(taken, layers)


def _take(taken: list[Any]) -> None:
    lock = _Running.lock
    if not lock.acquire(blocking=False):
        raise UsageError(
            "a trace is already running in this process: a traced program cannot trace, and two "
            "threads cannot trace at once"
        )
    taken.append(lock)


def _switch_off(taken: list[Any], layers: ExitStack) -> None:
    with undisturbed():
        if not taken:
            return
        try:
            layers.close()
        finally:
            lock = taken.pop()
            if _Running.lock is lock:  # not in a forked process that goes on to here
                _Running.layers = None
            lock.release()


def _end_in_forked_process() -> None:
    layers, _Running.layers, _Running.lock = _Running.layers, None, threading.Lock()
    if layers is not None:
        layers.close()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_end_in_forked_process)
