"""What is registered with torch's dispatcher for the length of a trace, and gone after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private.kernels import run_torch_dispatch
from pytest_torchmem.torch_private.keys import FAKE, set_excluded, set_included
from pytest_torchmem.torch_private.names import dispatch_key, private
from pytest_torchmem.torch_private.operators import OpOverload, all_operators, find_operator
from pytest_torchmem.torch_private.version import TORCH_VERSION

_new_library: Callable[..., Any] = private("torch._C._dispatch_library")
_has_fallback: Callable[[Any], bool] = private("torch._C._dispatch_has_backend_fallback")
#: Where composite operators are given kernels: the CPU's, with or without gradients.
COMPOSITE_KEY = "AutogradCPU"
dispatch_key(COMPOSITE_KEY)
#: The kernel that lets an operator pass on to the next key.
passes_by: Any = private("torch.library.fallthrough_kernel")


class Registrations:
    """Kernels of operators for one dispatch key; those of Python are kept alive by torch.

    What ``torch.library.Library`` stands on, without what it writes down in Python about every
    kernel, which takes as long as to register it.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._libraries: dict[str, Any] = {}

    def add(self, name: str, kernel: Callable[..., Any]) -> None:
        """Register a kernel for an operator (``"aten::add.Tensor"``)."""
        namespace, _, bare = name.partition("::")
        self._of(namespace).impl(bare, self._key, kernel, False)

    def fallback(self, kernel: Callable[..., Any]) -> None:
        """Register what runs where an operator has no kernel."""
        self._of("_").fallback(self._key, kernel, False)

    def _of(self, namespace: str) -> Any:
        if namespace not in self._libraries:
            self._libraries[namespace] = _new_library("IMPL", namespace, "", __file__, 0)
        return self._libraries[namespace]

    def __enter__(self) -> Registrations:
        return self

    def __exit__(self, *exception: object) -> None:
        for library in self._libraries.values():
            library.reset()


@contextmanager
def interception(fallback: Callable[..., Any]) -> Iterator[Callable[[OpOverload], None]]:
    """Route every operator of this thread that would reach a kernel to ``fallback(op, *args)``.

    The usual view operators pass by and stay in C++. What this yields lets another one pass from
    its next call on. The dispatcher writes the table of every operator anew, twice (Dispatcher.cpp,
    ``registerFallback``): a millisecond, or more where the tables are not in the processor's caches
    (benchmarks/registration_time.py); every view operator let pass is another 4 µs.
    """
    if _has_fallback(FAKE):
        raise UnsupportedTorchError(
            "pytest-torchmem cannot trace now: another fallback is already registered for dispatch "
            "key Fake (nested trace?)"
        )
    if TORCH_VERSION < (2, 13):
        _keep_for_lookup()
    with Registrations("Fake") as registrations:
        registrations.fallback(fallback)
        for name in _usual_views():
            registrations.add(name, passes_by)
        set_included(FAKE, True)
        try:
            yield lambda view: registrations.add(view.name(), passes_by)
        finally:
            set_included(FAKE, False)
            set_excluded(FAKE, False)


_KEPT: set[str] = set()


def _keep_for_lookup() -> None:
    """Let modes and tensor subclasses be asked before the fallback, as they are from torch 2.13 on.

    In 2.11 and 2.12 the key Fake comes before the key Python (c10/core/DispatchKey.h), and where
    there is a mode or a subclass not the fallback is called, but what the operator and the key have
    in a map (torch/csrc/utils/python_dispatch.cpp, ``python_op_registration_trampoline_impl``).
    Fallbacks are not written to it. Kernels of operators are, and stay there when they are taken
    back: so every operator has one for a moment, once in a process, which takes 25 ms.
    """
    with Registrations("Fake") as registrations:
        for name in set(all_operators()) - _KEPT:
            registrations.add(name, run_torch_dispatch)
            _KEPT.add(name)


#: View operators that never arrive at the fallback. ``detach`` must not: ``_make_subclass`` wants a
#: tensor that Python has not seen. Nor may those that C++ applies to a Python number wrapped in a
#: tensor: the fallback is handed the number. The others are the most frequent.
_USUAL_VIEWS = (
    "_conj",
    "_neg_view",
    "_reshape_alias",
    "alias",
    "detach",
    "expand",
    "permute",
    "select.int",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "set_.source_Tensor_storage_offset",
    "slice.Tensor",
    "squeeze.dim",
    "t",
    "transpose.int",
    "unsqueeze",
    "view",
)


@cache
def _usual_views() -> tuple[str, ...]:
    """Return those that this torch has."""
    found = (find_operator(name) for name in _USUAL_VIEWS)
    return tuple(operator.name() for operator in found if operator is not None)


@contextmanager
def composite_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let composite operators (``"aten::dropout"``) run Python kernels on CPU tensors.

    Every thread of the process sees them while they stand.
    """
    with Registrations(COMPOSITE_KEY) as registrations:
        for name, kernel in kernels.items():
            registrations.add(name, kernel)
        yield
