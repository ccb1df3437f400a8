"""What a traced program may change of the interpreter and of its thread, put back afterwards."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from pytest_torchmem.profile.garbage import without_collections
from pytest_torchmem.step.generators import current_draws, is_alone
from pytest_torchmem.step.imports import imports_apart, told_of_imports
from pytest_torchmem.torch_private.compilers.compiler import compiled_calls, tables_of_originals
from pytest_torchmem.torch_private.compilers.not_needed import COMPILER
from pytest_torchmem.torch_private.dispatch.modes import global_device_context
from pytest_torchmem.torch_private.patching.patches import replaced
from pytest_torchmem.torch_private.state.all_settings import (
    NOT_SAID,
    Setting,
    all_settings,
    answer,
    answers,
)

_NUMPY = "numpy.random"
_AUTOCAST_DEVICES = (
    "cpu",
    "cuda",
    "xpu",
    "mps",
    "hpu",
    "ipu",
    "mtia",
    "maia",
    "xla",
    "privateuseone",
)


@contextmanager
def process_kept(compiling: AbstractContextManager[object]) -> Iterator[None]:
    """Put back random generators, torch's settings, the garbage collector.

    What of torch is imported meanwhile keeps nothing of the program. ``compiling`` decides about
    what ``torch.compile`` wraps.
    """
    with generators_kept(seeded=True), settings_kept(), program_kept(compiling), _process_kept():
        yield


@contextmanager
def _process_kept() -> Iterator[None]:
    """Put back what accelerate knows of the process: its rank, device and precision.

    It is asked once in a process (accelerate/state.py, ``PartialState``), and the next trace may be
    of another rank or device.
    """
    before = {id(state): dict(state) for state in _shared_states()}
    try:
        yield
    finally:
        for state in _shared_states():
            state.clear()
            state.update(before.get(id(state), {}))


def _shared_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    if module is None:
        return []
    found = [getattr(one, "_shared_state", None) for one in vars(module).values()]
    return [state for state in found if isinstance(state, dict)]


@contextmanager
def program_kept(compiling: AbstractContextManager[object]) -> Iterator[None]:
    """Put back what is no choice of the program, and would be in the way of following it."""
    with without_collections(), imports_apart(), weights_read_here(), compiling:
        yield


def weights_read_here() -> AbstractContextManager[None]:
    """Have ``from_pretrained`` of transformers read weights on the program's thread, which is the
    only one that is seen, rather than in a pool (core_model_loading.py of transformers 5).
    """
    return environment("HF_DEACTIVATE_ASYNC_LOAD", "1")


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Have an environment variable be ``value``."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def thread_kept() -> Iterator[None]:
    """Put back the thread's default device, autocast and gradient mode.

    In a process that another thread forked there is no such thread any more.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:
        stack.enter_context(_default_device_kept())
        stack.enter_context(_autocast_kept())
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        try:
            yield
        finally:
            if threading.get_ident() != thread:
                stack.pop_all()


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


@contextmanager
def settings_kept() -> Iterator[None]:
    """Undo what a program sets for the process: its trace on the next device begins as this one."""
    settings = all_settings()
    before = answers(settings)
    try:
        yield
    finally:
        if answers(settings) != before:
            _put_back(settings, before)


def _put_back(settings: Sequence[Setting], before: Sequence[Any]) -> None:
    # In order: one that is put back may change what another says.
    for setting, value in zip(settings, before, strict=True):
        if value is not NOT_SAID and answer(setting) != value:
            setting.set_to(value)


@contextmanager
def eager(when_called: Callable[[bool], None] = lambda _: None) -> Iterator[None]:
    """Run what is compiled eagerly, and report each of its calls.

    ``when_called`` is told whether that is ``flex_attention``.
    """
    with ExitStack() as stack:

        def force_eager() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(compiled_calls(lambda _, flexes: when_called(flexes)))

        with when_compiler_is_used(force_eager):
            yield


@contextmanager
def when_compiler_is_used(start: Callable[[], None]) -> Iterator[None]:
    """Call ``start`` once the compiler is imported: now, or when the program first compiles.

    Programs import it themselves, too (``torch._dynamo.explain``, ``torch.compiler.reset``). What
    it lists of torch's functions from then on are torch's own.
    """
    if COMPILER in sys.modules:
        with tables_of_originals():
            start()
            yield
        return
    original, started = torch.compile, False

    def start_once() -> None:
        nonlocal started
        if not started:
            started = True
            start()
            stack.enter_context(tables_of_originals())

    def compile(*args: Any, **kwargs: Any) -> Any:
        start_once()
        return original(*args, **kwargs)

    def imported(name: str) -> None:
        if name.startswith(COMPILER) and _is_imported(COMPILER):
            start_once()

    with ExitStack() as stack, replaced(torch, compile=compile), told_of_imports(imported):
        yield


def _is_imported(name: str) -> bool:
    """Return whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


@contextmanager
def _default_device_kept() -> Iterator[None]:
    """Undo what ``torch.set_default_device`` did in the course of a trace."""
    before = global_device_context()
    try:
        yield
    finally:
        if global_device_context() is not before:
            torch.set_default_device(before.device if before is not None else None)


@contextmanager
def _autocast_kept() -> Iterator[None]:
    """Leave the regions that a program entered and did not leave itself."""
    nesting = _nesting()
    before = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
    ]
    caches = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caches)
        for _ in range(_nesting() - nesting):
            torch.autocast_decrement_nesting()


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
