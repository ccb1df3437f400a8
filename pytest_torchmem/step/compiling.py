"""What a program compiles: run eagerly, or followed from the first use of the compiler on."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_torchmem.step.imports import told_of_imports
from pytest_torchmem.torch_private.compilers.compiler import compiled_calls, tables_of_originals
from pytest_torchmem.torch_private.compilers.not_needed import COMPILER
from pytest_torchmem.torch_private.patching.patches import replaced


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
    if _is_imported(COMPILER):  # not while another thread imports it
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
