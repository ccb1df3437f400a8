"""Libraries that launch kernels themselves, followed from when the program has imported them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.flex_attention import MASKS

Follow = Callable[[TraceContext, Any], AbstractContextManager[None]]
Libraries = Mapping[str, Follow]
"""What is entered for a module, by its name, as soon as it is imported."""


def _by(module: str, function: str, *given: str) -> Follow:
    """Return a function of a module of this folder, which is imported when it is called."""

    def follow(trace: TraceContext, library: Any) -> AbstractContextManager[None]:
        found: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
        entered: AbstractContextManager[None] = found(trace, library, *given)
        return entered

    return follow


ON_GPU: Libraries = {
    "bitsandbytes": _by("bitsandbytes", "bitsandbytes_library"),
    MASKS: _by("flex_attention", "flex_attention"),
    "torch.utils.cpp_extension": _by("raw", "compiled_extensions"),
    "triton.runtime.jit": _by("triton", "triton_launches", "JITFunction"),
    "triton.runtime.interpreter": _by("triton", "triton_launches", "InterpretedFunction"),
    "triton.runtime.autotuner": _by("triton", "triton_autotuned"),
    "triton.runtime.driver": _by("triton", "triton_driver"),
}
ON_CPU: Libraries = {
    MASKS: _by("flex_attention", "flex_attention_on_cpu"),
    "triton.runtime.jit": _by("triton", "triton_refused"),
}


@contextmanager
def launching_libraries(trace: TraceContext, libraries: Libraries) -> Iterator[None]:
    """Follow the libraries that are imported, and those that the program imports in the trace.

    Nothing is imported here: a library that the program does not use costs nothing.
    """
    with ExitStack() as entered:
        waiting, following = dict(libraries), False

        def follow(_: str = "") -> None:
            nonlocal following
            if following:  # what is called below imports others
                return
            following = True
            try:
                while names := [name for name in waiting if _is_imported(name)]:
                    for name in names:
                        entered.enter_context(waiting.pop(name)(trace, sys.modules[name]))
            finally:
                following = False

        follow()
        with trace.after_imports(follow):
            yield


def _is_imported(name: str) -> bool:
    """Return whether a module is there, and not only begun."""
    module = sys.modules.get(name)
    return module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    )
