"""What a program imports while it runs, kept apart from its step, and what it compiles.

Modules make their constants for good: those are real, as if the module had been imported before.
Parts of torch are imported on a thread of their own, where they cannot keep what a program runs on.
An exception that a module caught as it was imported, and keeps, has the frames that were running
then with all their variables: the tensors of the step would outlive it in that process's first step
alone.

What it compiles is run eagerly, or followed from the first use of the compiler on.
"""

import _frozen_importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.torch_private import compiler
from pytest_torchmem.torch_private.patches import nothing_replaced, replaced, replaced_all

_KEEPS_EXCEPTIONS = frozenset({"bitsandbytes"})
"""Packages beside torch that are imported apart: they see the machine as it is, too."""
_listening: list[Callable[[str], None]] = []
"""What is told of modules that were imported, also on another thread."""
_followed: list[Callable[[str], AbstractContextManager[None]]] = []
"""What a trace's threads import modules in."""
_OWN = f"{__name__.partition('.')[0]}."
_PATIENCE = 15.0
"""Seconds after which an import that has not moved is taken to wait for this thread."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Folders of what is installed, which may lie in the standard library's."""
_IMPORTING = "<frozen importlib._bootstrap>", "_find_and_load"
"""The file and name of the function that holds the lock of a module."""


@lru_cache(maxsize=4096)
def is_installed(filename: str) -> bool:
    return any(map(filename.count, _INSTALLED))


@contextmanager
def imports_apart(on_thread: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Import what is not yet imported of torch on another thread, for which this one waits, and
    those where ``on_thread()`` is true.

    Both ``import`` and ``importlib.import_module``, by which attributes of ``torch`` import their
    modules (torch/__init__.py, ``__getattr__``), look ``_find_and_load`` up for each module that is
    not there yet (Python/import.c, Lib/importlib/_bootstrap.py). What torch's functions import of
    its compiler, and do not need, is not imported.
    """
    bootstrap: Any = _frozen_importlib
    original: Callable[[str, Any], Any] = bootstrap._find_and_load
    thread, not_needed = threading.get_ident(), compiler.NotNeeded()

    def is_here() -> bool:
        return threading.get_ident() == thread or on_thread()

    def find_and_load(name: str, import_: Any) -> Any:
        if name in sys.modules:
            return original(name, import_)
        followed = _followed[-1] if _followed and on_thread() else None
        here = followed is not None or is_here()
        with nullcontext() if followed is None else followed(name):
            if here and _is_apart(name, followed is not None, sys._getframe(1)):
                _on_another_thread(partial(_import, original, import_), name)
                _tell(name)
            module = _import(original, import_, name)
        if followed is not None and not name.startswith(_OWN):  # imported by what is called then
            _tell(name)
        return module

    apart = bootstrap, {"_find_and_load": find_and_load}
    try:
        with replaced_all([apart, *not_needed.replacements(is_here)]):
            yield
    finally:
        not_needed.forget()


def _is_apart(name: str, followed: bool, frame: FrameType) -> bool:
    """Return whether a module is imported on another thread first."""
    # Parts of torch that belong to tests keep whether there is a GPU (``TEST_CUDA``,
    # torch/testing/_internal/common_utils.py): the importing thread says so.
    of_torch = name.startswith("torch.") and not name.startswith("torch.testing._internal")
    if not of_torch and not (followed and name in _KEEPS_EXCEPTIONS):
        return False
    # A thread that is importing already holds the lock of a module. The other would wait for that
    # lock as soon as it imports the same, and for ever. Inductor holds since torch 2.15 a lock of
    # its own while it imports what takes that lock (``_compile_fx_inner``,
    # torch/_inductor/compile_fx.py).
    above: FrameType | None = frame
    while above is not None:
        code = above.f_code
        if (code.co_filename, code.co_name) == _IMPORTING:
            return False
        if of_torch and compiler.INDUCTOR in code.co_filename:
            return False
        above = above.f_back
    return True


def _import(original: Callable[[str, Any], Any], import_: Any, name: str) -> Any:
    # The compiler lists torch's own functions as it is imported (``constant_fold_functions``,
    # torch/_dynamo/variables/torch.py; ``lowerings``, torch/_inductor/lowering.py).
    lists = name.startswith((compiler.COMPILER, compiler.LOWERING)) and name not in sys.modules
    with nothing_replaced() if lists else nullcontext():
        return original(name, import_)


def _tell(name: str) -> None:
    for then in tuple(_listening):
        then(name)


@contextmanager
def imports_within(
    context: Callable[[str], AbstractContextManager[None]], then: Callable[[str], None]
) -> Iterator[None]:
    """Run the modules that threads of ``imports_apart`` import for the first time within
    ``context(name)``, and then ``then(name)`` with the name of each.
    """
    _followed.append(context)
    try:
        with told_of_imports(then):
            yield
    finally:
        _followed.remove(context)


@contextmanager
def told_of_imports(then: Callable[[str], None]) -> Iterator[None]:
    """Call ``then`` with the name of each module that a program imports for the first time, or of
    one that brought others with it; within ``imports_within`` and ``imports_apart``.
    """
    _listening.append(then)
    try:
        yield
    finally:
        _listening.remove(then)


class ThreadApart(threading.Thread):
    """A thread of the profiler's own, which is in no trace."""


def _on_another_thread(import_: Callable[..., Any], name: str) -> None:
    """Import a module; what goes wrong is raised again by who imports it afterwards."""
    known = {*sys.modules}
    made: list[tuple[threading.local, dict[str, Any]]] = []

    def run() -> None:
        try:
            import_(name)
        except Exception:
            return
        made.extend(_of_this_thread({*sys.modules} - known))
        for _, values in made:
            compiler.keep_stashed(values)

    worker = ThreadApart(target=run, name=f"import of {name}")
    worker.start()
    stands: Any = None
    while worker.is_alive():
        worker.join(_PATIENCE)
        stood, stands = stands, _place_of(worker)
        if stands is not None and stands == stood:
            raise UsageError(
                f"{name} cannot be imported in the course of the step: its import waits for a lock "
                "that the step holds. Import it before, at the top of the test's module"
            )
    for local, values in made:
        local.__dict__.update(values | local.__dict__)


def _of_this_thread(modules: Iterable[str]) -> Iterator[tuple[threading.local, dict[str, Any]]]:
    """Yield what modules have made, as they were imported, for the thread that imports them alone.
    It stands in the module (``local``, torch/_inductor/cudagraph_trees.py), or in a class or an
    object of it (``DeviceTypeTestBase._tls``, torch/testing/_internal/common_device_type.py).
    """
    for name in modules:
        for value in list(getattr(sys.modules.get(name), "__dict__", {}).values()):
            for held in (value, *_attributes_of(value, name)):
                if issubclass(type(held), threading.local) and held.__dict__:
                    yield held, dict(held.__dict__)


def _attributes_of(value: object, module: str) -> list[object]:
    """Return the attributes of a class that a module defines, or of an object of such a class."""
    kind = value if isinstance(value, type) else type(value)
    if kind.__dict__.get("__module__") != module or issubclass(kind, threading.local):
        return []
    try:
        return list(vars(value).values())
    except TypeError:  # it has __slots__, or a __getattribute__ of its own
        return []


def _place_of(thread: threading.Thread) -> tuple[int, int, float] | None:
    """Return where a thread is, and how long it has run; None where that is not known."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or not thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
        return None
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    return id(frame), frame.f_lasti, time.clock_gettime(clock)


@contextmanager
def eager(when_called: Callable[[bool], None] = lambda _: None) -> Iterator[None]:
    """Run what is compiled eagerly, and report each of its calls. ``when_called`` is told whether
    that is ``flex_attention``.
    """
    with ExitStack() as stack:

        def force_eager() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(compiler.compiled_calls(lambda _, flexes: when_called(flexes)))

        with when_compiler_is_used(force_eager):
            yield


@contextmanager
def when_compiler_is_used(start: Callable[[], object]) -> Iterator[None]:
    """Call ``start`` once the compiler is imported: now, or when the program first compiles.

    Programs import it themselves, too (``torch._dynamo.explain``, ``torch.compiler.reset``). What
    it lists of torch's functions from then on are torch's own.
    """
    if is_imported(compiler.COMPILER):  # not while another thread imports it
        with compiler.tables_of_originals():
            start()
            yield
        return
    original, started = torch.compile, False

    def start_once() -> None:
        nonlocal started
        if not started:
            started = True
            start()
            stack.enter_context(compiler.tables_of_originals())

    def compile(*args: Any, **kwargs: Any) -> Any:
        compiler.import_compiler()
        start_once()
        return original(*args, **kwargs)

    def imported(name: str) -> None:
        if name.startswith(compiler.COMPILER) and is_imported(compiler.COMPILER):
            start_once()

    with ExitStack() as stack, replaced(torch, compile=compile), told_of_imports(imported):
        yield


def is_imported(name: str) -> bool:
    """Return whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    )
