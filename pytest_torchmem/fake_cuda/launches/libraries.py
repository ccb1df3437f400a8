"""Libraries that launch kernels themselves, followed from when the program has imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from pytest_torchmem.fake_cuda.launches.bitsandbytes import bitsandbytes_library
from pytest_torchmem.fake_cuda.launches.flex_attention import flex_attention, flex_attention_on_cpu
from pytest_torchmem.fake_cuda.launches.raw import compiled_extensions
from pytest_torchmem.fake_cuda.launches.triton import (
    triton_autotuned,
    triton_interpreted,
    triton_launches,
    triton_refused,
)
from pytest_torchmem.fake_cuda.launches.triton_driver import triton_driver
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.compilers.flex_attention import MASKS

Libraries = Mapping[str, Callable[[TraceContext, Any], AbstractContextManager[None]]]
"""What is entered for a module, by its name, as soon as it is imported."""

ON_GPU: Libraries = {
    "bitsandbytes": bitsandbytes_library,
    MASKS: flex_attention,
    "torch.utils.cpp_extension": compiled_extensions,
    "triton.runtime.jit": triton_launches,
    "triton.runtime.interpreter": triton_interpreted,
    "triton.runtime.autotuner": triton_autotuned,
    "triton.runtime.driver": triton_driver,
}
ON_CPU: Libraries = {MASKS: flex_attention_on_cpu, "triton.runtime.jit": triton_refused}


@contextmanager
def launching_libraries(trace: TraceContext, libraries: Libraries) -> Iterator[None]:
    """Follow the libraries that are imported, and those that the program imports in the trace.

    Nothing is imported here: a library that the program does not use costs nothing.
    """
    with ExitStack() as entered:
        waiting = dict(libraries)

        def follow(_: str = "") -> None:
            for name in [name for name in waiting if _is_imported(name)]:
                entered.enter_context(waiting.pop(name)(trace, sys.modules[name]))

        follow()
        with trace.after_imports(follow):
            yield


def _is_imported(name: str) -> bool:
    """Return whether a module is there, and not only begun."""
    module = sys.modules.get(name)
    return module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    )
