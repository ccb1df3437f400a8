"""What a phase of a step is; a trace and a measurement both go by it."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.imports import when_compiler_is_used
from pytest_torchmem.torch_private.compiler import own_module_calls_followed, run_uncompiled
from pytest_torchmem.torch_private.module_calls import step_tables
from pytest_torchmem.torch_private.patches import engine, replaced, replaced_all

_Within = Callable[[], AbstractContextManager[object]]
_Around = Callable[[Callable[..., Any]], Callable[..., Any]]


class StepPhases:
    """Which phase it is, from what begins and ends.

    Backward is while the autograd engine runs, and optimizer while a ``step`` does; of one in the
    other, such as a closure's backward, the inner one counts. Outside of both it is forward at
    first, and between from a backward on until a module is called that no other module calls.
    """

    def __init__(self) -> None:
        self._outside = Phase.FORWARD
        self._running: list[Phase] = []

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._running[-1] if self._running else self._outside

    def begin(self, phase: Phase) -> None:
        """Begin a backward or an optimizer's step."""
        self._running.append(phase)
        if phase is Phase.BACKWARD:
            self._outside = Phase.BETWEEN

    def end(self, phase: Phase | None = None) -> None:
        """End what began last, of phases of that name."""
        if phase is None:
            self._running.pop()
            return
        last = len(self._running) - 1 - self._running[::-1].index(phase)
        del self._running[last]

    def module_called(self) -> None:
        """Take note of a call of a module that no other module makes."""
        if not self._running:
            self._outside = Phase.FORWARD


class _Engine:
    """The autograd engine, of which Python asks ``run_backward`` for every run that it starts."""

    def __init__(self, engine: Any, around: _Around, is_here: Callable[[], bool]) -> None:
        self._engine, self._around, self._is_here = engine, around, is_here

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return self._around(found) if name == "run_backward" and self._is_here() else found


def asked_engine(around: _Around, is_here: Callable[[], bool]) -> tuple[Any, Mapping[str, Any]]:
    """Return what calls ``around(run)`` before each run of the autograd engine where ``is_here()``
    is true, one of ``Replacements``; the engine is run by what it returns.

    Every run that Python starts goes through ``Variable._execution_engine`` (autograd/graph.py,
    ``_engine_run_backward``).
    """
    return engine.by(_Engine(engine.original, around, is_here))


def engine_runs(within: _Within) -> AbstractContextManager[None]:
    """Run the autograd engine within ``within()`` where this thread starts it."""

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_within(*args: Any, **kwargs: Any) -> Any:
            with within():
                return run(*args, **kwargs)

        return run_within

    return replaced_all([asked_engine(around, _on_this_thread())])


def _on_this_thread() -> Callable[[], bool]:
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread


@contextmanager
def outermost_module_calls(within: _Within) -> Iterator[None]:
    """Run this thread's calls of modules that no other module makes within ``within()``."""
    original = nn.Module.__call__
    thread, depth = threading.get_ident(), 0

    # torch's Python tracer reads this frame's module as its local ``self``, and ends the process
    # where there is none (torch/csrc/autograd/profiler_python.cpp, recordPyCall).
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        # Where Dynamo follows a program it takes this for true: its graph is what it would be.
        if torch.compiler.is_compiling() or depth or threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        depth += 1
        try:
            with within():
                return original(self, *args, **kwargs)
        finally:
            depth -= 1

    run_uncompiled(call.__code__)
    with ExitStack() as stack, replaced(nn.Module, __call__=call):

        def follow() -> None:
            stack.enter_context(own_module_calls_followed())

        with when_compiler_is_used(follow):
            yield


def steps_seen(
    begin: Callable[[Optimizer], object],
    end: Callable[[Optimizer], object],
    is_here: Callable[[], bool],
) -> tuple[Any, Mapping[str, Any]]:
    """Return what calls ``begin`` and ``end`` with each optimizer around its steps, where
    ``is_here()`` is true: one of ``Replacements``.
    """

    def before(optimizer: Optimizer, *_: Any) -> None:
        if is_here():
            begin(optimizer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        if is_here():
            end(optimizer)

    return step_tables(before, after)


def optimizer_steps(
    begin: Callable[[Optimizer], object], end: Callable[[Optimizer], object]
) -> AbstractContextManager[None]:
    """Call ``begin`` and ``end`` with each optimizer around its steps on this thread."""
    return replaced_all([steps_seen(begin, end, _on_this_thread())])
