"""Kernels in Python that are registered with torch's dispatcher once in a process.

They stay there. No thread reaches them but those that include their keys: nothing else in torch
does. What they run changes with the trace (``OnKey.run``). To register a kernel makes the
dispatcher write tables anew, which other threads may be reading, and to take one back frees what
another thread may be about to call.
"""

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias

import torch

from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private import keys, patches
from pytest_torchmem.torch_private.kernels import give_shards_back, kernel_for, run_torch_dispatch
from pytest_torchmem.torch_private.names import TORCH_VERSION, dispatch_key, listed, private

_new_library: Callable[..., Any] = private("torch._C._dispatch_library")
_has_fallback: Callable[[Any], bool] = private("torch._C._dispatch_has_backend_fallback")
_COMPOSITE, _AUTOCAST = keys.OWN_KEYS
#: Excluded with all others of autograd (c10/core/DispatchKeySet.h, ``autograd_dispatch_keyset``).
_AUTOGRAD = dispatch_key("AutogradOther")
#: The kernel that lets an operator pass on to the next key.
passes_by: Any = private("torch.library.fallthrough_kernel")
_defined_in_python: set[str] = private("torch.library._defs")
_PLACE = "pytest_torchmem_kernels"
_Run: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator, by its name."""


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


class OnKey:
    """What this process has registered for a key."""

    def __init__(self, key: str, fallback: Callable[..., Any]) -> None:
        if _has_fallback(dispatch_key(key)):
            raise UnsupportedTorchError(
                "pytest-torchmem cannot trace in this process: something else has registered a "
                f"fallback for dispatch key {key}"
            )
        self.fallback = fallback
        self.registrations = Registrations(key)
        self.registrations.fallback(fallback)
        self.names: set[str] = set()
        """Operators that have a kernel of their own."""
        self.run: Callable[..., Any] | None = None
        """What kernels run while a trace does, with the operator's name first."""
        self.found_past_modes = False
        """Whether a trace has let a look-up find the fallback already."""
        self.registered: Any = None
        """What had registered operators when the last trace began."""

    def pass_by(self, names: Iterable[str]) -> None:
        """Let operators go on to the next key from now on, as if the key were not there."""
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self.registrations.add(name, passes_by)

    def call_back(self, names: Iterable[str]) -> None:
        """Let operators call ``run``."""
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self.registrations.add(name, self._kernel(name))

    def _kernel(self, name: str) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self.run is None:
                leave_all()
                return overload_of(name)(*args, **kwargs)
            return self.run(name, args, kwargs)

        return kernel


def _on_key(key: str, fallback: Callable[..., Any]) -> OnKey:
    """Return what is registered for a key, whichever copy of this package did it. The package may
    be imported anew in a process (``pytester``); the dispatcher has one fallback.
    """
    everywhere: dict[str, OnKey] = vars(torch).setdefault(_PLACE, {})
    if key not in everywhere:
        everywhere[key] = OnKey(key, fallback)
    return everywhere[key]


class _Fallback:
    """What is registered for the Fake key.

    A trace lends the class another ``__call__``, which runs without a frame between: where an
    operator was issued from is found by counting frames.
    """

    def __call__(self, operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run an operator of a thread that outlived its trace: no other can change its keys."""
        return run_outside(operator, args, kwargs)


def run_outside(operator: keys.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of a thread that is in no trace any more."""
    with turns():  # its trace may be ending just now
        leave_all()
    return operator(*args, **kwargs)


class _Process:
    """State of this process, which a forked child does not inherit."""

    turns = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    # Another lock: that one may be held by a thread that is not there.
    os.register_at_fork(after_in_child=lambda: setattr(_Process, "turns", threading.RLock()))


def turns() -> Any:
    """Return the lock that a thread of a trace holds while it is at an operator."""
    return _Process.turns


def join_all() -> None:
    """Let this thread reach what is registered for the trace that is running."""
    keys.set_included(keys.FAKE, True)
    composites = vars(torch)[_PLACE].get(keys.COMPOSITE_KEY)
    if composites is not None and composites.run is not None:
        key_included(_COMPOSITE, True)


def leave_all() -> None:
    """Let nothing that is registered here be reached by this thread any more."""
    keys.set_included(keys.FAKE, False)
    keys.set_excluded(keys.FAKE, False)
    for key in (_COMPOSITE, _AUTOCAST):
        key_included(key, False)


@contextmanager
def interception(fallback: Callable[..., Any]) -> Iterator[Callable[[keys.OpOverload], None]]:
    """Route every operator of this thread that would reach a kernel to ``fallback(op, *args)``.

    The usual view operators pass by and stay in C++. What this yields lets another one pass from
    its next call on.
    """
    if TORCH_VERSION < (2, 13):
        # The key Fake comes before the key Python then (c10/core/DispatchKey.h), and where there is
        # a mode or a subclass not the fallback is called, but what is kept for the operator.
        _keep(run_torch_dispatch, ())
    on_key = _on_key("Fake", _Fallback())
    if on_key.run is not None:
        raise UnsupportedTorchError(
            "pytest-torchmem cannot trace now: operators are intercepted already (nested trace?)"
        )
    on_key.pass_by(_passing_by())
    place: Any = type(on_key.fallback)
    outside = place.__call__
    place.__call__, on_key.run = staticmethod(fallback), fallback
    # Another one where there may be operators that were not there before. Those of Python are
    # listed (torch/library.py, ``Library.define``); C++ registers its own when a library is loaded,
    # most often by an import. To ask for all of them takes a millisecond.
    libraries = len(torch.ops.loaded_libraries)
    registered = frozenset(_defined_in_python), libraries, len(sys.modules)
    if registered != on_key.registered:
        on_key.registered, on_key.found_past_modes = registered, False
    keys.set_included(keys.FAKE, True)
    try:
        yield lambda view: on_key.pass_by((view.name(),))
    finally:
        place.__call__, on_key.run = outside, None
        keys.set_included(keys.FAKE, False)
        keys.set_excluded(keys.FAKE, False)
        give_shards_back()


_KEPT: set[str] = set()


def reach_past_modes() -> None:
    """Let the fallback be called where there are modes or tensor subclasses that are not asked.

    So it is in ``torch._C._DisableTorchDispatch``, and where functionalization runs an operator on
    ``meta`` (``exclude_keys_for_meta_dispatch`` in ATen/templates/RegisterFunctionalization.cpp):
    the key Python is excluded, and the mode is on its stack. Before torch 2.13 these are asked.
    """
    on_key = _on_key("Fake", _Fallback())
    if TORCH_VERSION >= (2, 13) and not on_key.found_past_modes:
        _keep(on_key.fallback, on_key.names)
        on_key.found_past_modes = True


def _keep(kernel: Callable[..., Any], but: Collection[str]) -> None:
    """Let ``kernel`` be what a look-up finds for operators, ``but`` those that never arrive.

    Where there is a mode or a subclass, not the fallback is called, but what the operator and the
    key have in a map (torch/csrc/utils/python_dispatch.cpp,
    ``python_op_registration_trampoline_impl``). Fallbacks are not written to it. Kernels of
    operators are, and stay there when they are taken back: so every operator has one for a moment,
    once in a process, which takes 25 ms. Nobody else looks at the key.
    """
    names = set(keys.all_operators()) - _KEPT - set(but)
    if not names:
        return
    registrations = Registrations("Fake")
    for name in names:
        registrations.add(name, kernel)
    _KEPT.update(names)
    for library in registrations._libraries.values():
        library.reset()


#: View operators that never arrive at the fallback. ``detach`` must not: ``_make_subclass`` wants a
#: tensor that Python has not seen. Nor may those that C++ applies to a Python number wrapped in a
#: tensor: the fallback is handed the number. The others are the most frequent.
_USUAL_VIEWS = listed("""
    _conj _neg_view _reshape_alias alias detach expand permute select.int set_
    set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor
    set_.source_Tensor_storage_offset slice.Tensor squeeze.dim t transpose.int unsqueeze view
""")

#: What a profiler is told of: on the way through Python, its records would lose their class of C++.
_OF_PROFILERS = listed("""
    profiler::_record_function_enter profiler::_record_function_enter_new
    profiler::_record_function_exit profiler::_record_function_exit._RecordFunction
""")


@cache
def _passing_by() -> tuple[str, ...]:
    """Return those operators that never arrive, as far as this torch has them."""
    found = (keys.find_operator(name) for name in _USUAL_VIEWS)
    views = [operator.name() for operator in found if operator is not None]
    return (*views, *filter(keys.is_dispatched, _OF_PROFILERS))


@contextmanager
def composite_kernels(names: Iterable[str], run: _Run) -> Iterator[None]:
    """Let composite operators (``"aten::dropout"``) of this thread call ``run`` before autograd.

    Below autograd, in inference mode, and where ``run`` returns ``NotImplemented``, they go on as
    if they had no such kernel.
    """

    def before_autograd(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not keys.is_excluded(_AUTOGRAD):
            result = run(name, args, kwargs)
            if result is not NotImplemented:
                return result
        with keys.excluded(_COMPOSITE):
            return overload_of(name)(*args, **kwargs)

    on_key = _on_key(keys.COMPOSITE_KEY, passes_by)
    on_key.call_back(names)
    on_key.run = before_autograd
    key_included(_COMPOSITE, True)
    try:
        yield
    finally:
        on_key.run = None
        key_included(_COMPOSITE, False)


def key_included(key: Any, included: bool) -> None:
    """Let the operators of this thread pass the kernels of an autocast key, or no longer. Such keys
    are excluded by default (c10/core/impl/LocalDispatchKeySet.h).
    """
    keys.set_included(key, included)
    keys.set_excluded(key, not included)


@cache
def overload_of(name: str) -> keys.OpOverload:
    """Return the overload of a name as the dispatcher writes it (``"aten::add.Tensor"``)."""
    namespace, _, bare = name.partition("::")
    base, _, overload = bare.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), base)
    return getattr(packet, overload or "default")  # type: ignore[no-any-return]


_AUTOCAST_CUDA = dispatch_key("AutocastCUDA")
_AUTOCAST_CPU = dispatch_key("AutocastCPU")
registered_for: Callable[[str], list[str]] = private(
    "torch._C._dispatch_get_registrations_for_dispatch_key"
)


@contextmanager
def autocast_kernels(run: _Run) -> Iterator[Callable[[Iterable[str]], None]]:
    """Let operators be cast by ``run``, by their names (``"aten::mm"``).

    What this yields registers those names for good. They are cast where
    ``autocast_key_included(True)`` is.
    """
    on_key = _on_key(keys.AUTOCAST_KEY, passes_by)
    with patches.having(on_key, run=run):
        yield on_key.call_back


def own_autocast_kernels() -> dict[str, Callable[..., Any]]:
    """Return the casting kernels that users registered for their operators on cuda, by operator. As
    ``torch.library.register_autocast`` does; those of C++ look at the device that C++ sees.
    """
    names = [one for one in registered_for("AutocastCUDA") if not one.startswith("aten::")]
    return {name: partial(kernel_for(overload_of(name)), _AUTOCAST_CUDA) for name in names}


def autocast_key_included(included: bool) -> None:
    """Let the operators of this thread pass the casting kernels, or no longer."""
    key_included(_AUTOCAST, included)


def outside_autocast() -> keys.excluded:
    """Let operators pass by the casting kernels (``ExcludeDispatchKeyGuard no_autocast``)."""
    return keys.excluded(_AUTOCAST)


def outside_autocast_of_cpu() -> keys.excluded:
    """Let operators pass ``torch.autocast("cpu")`` by: to C++ all tensors are on the CPU."""
    return keys.excluded(_AUTOCAST_CPU)


def run_uncast(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that is not cast itself; what a composite one is made of may be."""
    name = operator.name()
    for key in (_COMPOSITE, keys.COMPOSITE_IMPLICIT):
        if keys.has_kernel(name, key):
            return kernel_for(operator)(key, *args, **kwargs)
    with outside_autocast(), outside_autocast_of_cpu():
        return operator(*args, **kwargs)
