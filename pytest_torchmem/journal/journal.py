"""The journal of a process: what a trace switches on, and off again in reverse order, once.

There is one at a time, and none in a process that is forked in the course of one: that is a program
of its own, such as a worker of a ``torch.utils.data.DataLoader``. It has all that a trace switched
on and replaced, its hollow tensors, and, where the trace's thread forked, that thread's state. What
it computes has to be real.

Signals are held back while a trace is switched on or off. A handler of Python's runs between any
two of its instructions, and raises there (``Ctrl-C``, or a timeout's ``SIGALRM``): halfway through,
some of what a trace replaces would stay replaced.

What a traced program may change of the interpreter and of its thread is put back as well.
"""

import _signal  # type: ignore[import-not-found]
import atexit
import os
import random
import signal
import sys
import threading
import time
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import compress
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.timeline import without_collections
from pytest_torchmem.step.generators import current_draws, is_alone
from pytest_torchmem.step.imports import imports_apart
from pytest_torchmem.torch_private import settings as torch_settings
from pytest_torchmem.torch_private.dispatcher import turns

_Result = TypeVar("_Result")
_PATIENCE = 10.0
"""Seconds that a signal, a fork or the end of the process waits for a trace, which may wait, too.
"""


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
        """Take the place of the one journal of a process, and note what ``switch_on`` does. Raises
        ``UsageError`` where another has it.
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
            self.enter_context(_turns_ended())
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
def _turns_ended() -> Iterator[None]:
    """Let this thread hold ``turns`` no longer than it did: a signal raises between any two
    instructions, also between those that take the lock and those that see to its release.
    """
    lock, held = turns(), turns()._is_owned()
    try:
        yield
    finally:
        while not held and lock._is_owned():
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
    if torch_settings.is_within_transform():
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
    """Wait until a daemon thread is in no trace, and stopped before its next. Python ends threads
    where they are, and one that is in C++ then ends the process.
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
_signals: Any = signal
_begin_thread = start_new_thread


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run handlers of signals that arrive meanwhile afterwards, on the main thread. No other thread
    runs any.
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


class HandlersDeferred(AbstractContextManager[None]):
    """Runs handlers of signals, those that the program sets too, when the profiler is not at work.
    Its books would stay half-written, and what a handler raises could be lost: Python drops what
    the callback of a weak reference raises. One that has waited too long runs anyway.
    """

    def __init__(self, arrived: dict[int, Any], is_at_work: Callable[[Any], bool]) -> None:
        self._arrived, self._is_at_work = arrived, is_at_work
        self._sent_again: set[int] = set()
        self._functions = _signals.signal, _signals.getsignal

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # all handlers run there
        set_to, get = self._functions
        for number in compress(_SIGNALS, map(callable, map(_handler_of, _SIGNALS))):
            _set(number, self._deferring(_handler_of(number)))
        _signals.signal = lambda number, one: _given(set_to(number, self._deferring(one)))
        _signals.getsignal = lambda number: _given(get(number))

    def __exit__(self, *_: object) -> None:
        _signals.signal, _signals.getsignal = self._functions
        now = zip(_SIGNALS, map(_handler_of, _SIGNALS), strict=True)
        held = [(number, one.args[0]) for number, one in now if type(one) is _Deferring]
        try:
            _give_back(held)
        finally:
            _give_back(held)  # what a signal kept the first from giving back

    def _deferring(self, handler: Any) -> Any:
        return _Deferring(self._handle, handler) if callable(handler) else handler

    def _handle(self, handler: _Handler, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self._sent_again:
            self._sent_again.discard(number)
            if number not in self._arrived:
                return
        _, first = self._arrived.pop(number, (None, now))
        if not self._is_at_work(frame) or now - first > _PATIENCE:
            handler(number, frame)
            return
        self._arrived[number] = handler, first  # without the frame, which would be in a cycle
        _begin_thread(self._send_again, (number,))  # where no operator runs any more

    def _send_again(self, number: Any) -> None:
        time.sleep(0.01)
        if number in self._arrived:
            self._sent_again.add(number)
            interrupt_main(number)


class _Deferring(partial[Any]):
    """Stands for a handler."""


def _given(handler: Any) -> Any:
    return handler.args[0] if type(handler) is _Deferring else handler


_NUMPY = "numpy.random"


@contextmanager
def process_kept(
    compiling: AbstractContextManager[object], on_thread: Callable[[], bool]
) -> Iterator[None]:
    """Put back random generators, torch's settings, the garbage collector.

    What of torch is imported meanwhile keeps nothing of the program. ``compiling`` decides about
    what ``torch.compile`` wraps.
    """
    settings = (*torch_settings.all_settings(), _OF_ACCELERATE)
    program = program_kept(compiling, on_thread)
    with generators_kept(seeded=True), settings_kept(settings), program:
        yield


@contextmanager
def settings_kept(
    settings: Sequence[torch_settings.Setting], of_thread: bool = False
) -> Iterator[None]:
    """Undo what a program sets: its trace on the next device begins as this one. In a process that
    another thread forked there are no settings ``of_thread`` any more.
    """
    thread, before = threading.get_ident(), torch_settings.answers(settings)
    try:
        yield
    finally:
        is_there = not of_thread or threading.get_ident() == thread
        if is_there and torch_settings.answers(settings) != before:
            # In order: one that is put back may change what another says.
            for setting, value in zip(settings, before, strict=True):
                if value is not torch_settings.NOT_SAID and torch_settings.answer(setting) != value:
                    setting.set_to(value)


def _shared_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    if module is None:
        return []
    found = [getattr(one, "_shared_state", None) for one in vars(module).values()]
    return [state for state in found if isinstance(state, dict)]


def _share(before: list[dict[str, Any]]) -> None:
    known = before or [{}] * len(_shared_states())
    for state, contents in zip(_shared_states(), known, strict=True):
        state.clear()
        state.update(contents)


#: What accelerate knows of the process: its rank, device and precision. It is asked once in a
#: process (accelerate/state.py, ``PartialState``), and the next trace may be of another rank.
_OF_ACCELERATE = torch_settings.Setting(lambda: [dict(state) for state in _shared_states()], _share)


@contextmanager
def program_kept(
    compiling: AbstractContextManager[object] | None = None,
    on_thread: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Put back what is no choice of the program, and would be in the way of following it.

    ``from_pretrained`` of transformers reads weights on the program's thread meanwhile, which is
    followed, rather than in a pool (core_model_loading.py of transformers 5). Calls of modules that
    are followed are half as deep again in Python: so is what it allows.
    """
    limit = sys.getrecursionlimit()
    read_here = variables({"HF_DEACTIVATE_ASYNC_LOAD": "1"}, all_of_them=False)
    with without_collections(), imports_apart(on_thread), read_here, compiling or nullcontext():
        sys.setrecursionlimit(limit * 3 // 2)
        try:
            yield
        finally:
            if sys.getrecursionlimit() == limit * 3 // 2:  # and not what the program has set
                sys.setrecursionlimit(limit)


@contextmanager
def variables(values: Mapping[str, str], *, all_of_them: bool = True) -> Iterator[None]:
    """Set variables of the environment, and put back these and all that the program sets, or leave
    that alone. Launchers tell their processes by variables what to do, and libraries tell
    themselves (``ACCELERATE_USE_FSDP``); the next trace may be of another program.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        still = {name for name, value in values.items() if os.environ.get(name) == value}
        for name in {*os.environ, *before} if all_of_them else still:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


@contextmanager
def generators_kept(seeded: bool = False) -> Iterator[None]:
    """Leave the host's random generators as they were; ``seeded``: they begin as in every trace.

    Other threads may be drawing from them, and would draw the same again: beside others they are
    neither seeded nor put back, and a trace's threads have their own (``own_generators``).
    """
    if seeded and not is_alone():
        yield
        return
    default = torch.default_generator
    state, python_state = default.get_state(), random.getstate()
    # numpy imports it when it is first used, which takes longer than a small trace.
    numpy_state = sys.modules[_NUMPY].get_state() if _NUMPY in sys.modules else None
    draws, start = current_draws(), None
    if seeded:
        default.manual_seed(0)
        start = draws.seed_python(random)
        seed_what_is_imported(_NUMPY)
    try:
        yield
    finally:
        if seeded:
            draws.note(random, start)
        torch.set_rng_state(state)
        random.setstate(python_state)
        if numpy_state is not None:
            sys.modules[_NUMPY].set_state(numpy_state)
        elif _NUMPY in sys.modules:
            sys.modules[_NUMPY].seed()


def seed_what_is_imported(name: str) -> None:
    """Give numpy's generator the seed of a trace, when it is imported or where it is already."""
    if name == _NUMPY and name in sys.modules:
        current_draws().seed_numpy(sys.modules[name])
