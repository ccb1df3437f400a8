"""Dispatch keys, and those that a thread includes and excludes."""

from collections.abc import Callable
from functools import cache
from typing import Any

from pytest_torchmem.torch_private.names import dispatch_key, private

#: ``DispatchKey::Fake`` sits below autograd and above every backend (c10/core/DispatchKey.h), and
#: no kernel of torch 2.11 to 2.15 is registered for it.
FAKE = dispatch_key("Fake")
#: The key of kernels for composite operators. No build of torch has kernels or tensors for it; it
#: comes after the casts of autocast, after functorch, and before autograd (c10/core/DispatchKey.h).
COMPOSITE_KEY = "AutocastIPU"
#: The key of casts, of which the same holds.
AUTOCAST_KEY = "AutocastHPU"
OWN_KEYS = dispatch_key(COMPOSITE_KEY), dispatch_key(AUTOCAST_KEY)
COMPOSITE_IMPLICIT = dispatch_key("CompositeImplicitAutograd")
COMPOSITE_EXPLICIT = dispatch_key("CompositeExplicitAutograd")
COMPOSITE_NON_FUNCTIONAL = dispatch_key("CompositeExplicitAutogradNonFunctional")
COMPOSITE_NESTED = dispatch_key("CompositeImplicitAutogradNestedTensor")
CPU = dispatch_key("CPU")
CUDA = dispatch_key("CUDA")
NESTED_CPU = dispatch_key("NestedTensorCPU")
SPARSE_CPU = dispatch_key("SparseCPU")
COMPRESSED_CPU = dispatch_key("SparseCsrCPU")
#: The key of what ``torch.jit.trace`` writes operators down with.
TRACER = dispatch_key("Tracer")

set_included: Callable[[Any, bool], None] = private(
    "torch._C._dispatch_tls_set_dispatch_key_included"
)
set_excluded: Callable[[Any, bool], None] = private(
    "torch._C._dispatch_tls_set_dispatch_key_excluded"
)
is_included: Callable[[Any], bool] = private("torch._C._dispatch_tls_is_dispatch_key_included")
is_excluded: Callable[[Any], bool] = private("torch._C._dispatch_tls_is_dispatch_key_excluded")

#: A context in which operators pass autograd by.
below_autograd: Callable[[], Any] = private("torch._C._AutoDispatchBelowAutograd")

#: A context in which a thread excludes a set of keys.
ExcludeKeys: Callable[[Any], Any] = private("torch._C._ExcludeDispatchKeyGuard")
_ForceKeys: Callable[[Any, Any], Any] = private("torch._C._ForceDispatchKeyGuard")
_KeySet: Callable[[Any], Any] = private("torch._C.DispatchKeySet")
_all_keys: Callable[[], Any] = private("torch._C._dispatch_keyset_full")
_keys_after: Callable[[Any], Any] = private("torch._C._dispatch_keyset_full_after")
#: What kernels do not do for themselves: lazy conjugation and negation, tensors that are all zero.
_LAZY = tuple(map(dispatch_key, ("Conjugate", "Negative", "ZeroTensor")))
#: The first and the last of the keys that a thread excludes, and all that it includes, unless it
#: was told otherwise (c10/core/impl/LocalDispatchKeySet.h).
_AUTOCAST = tuple(map(dispatch_key, ("AutocastCPU", "AutocastPrivateUse1")))
_INCLUDED = tuple(map(dispatch_key, ("BackendSelect", "ADInplaceOrView")))


def at_kernels() -> Any:
    """Return a context in which operators go to their kernels: no autograd, autocast or trace."""
    return ExcludeKeys(_above_kernels())


def with_autograd() -> Any:
    """Return a context in which operators run as on a thread without trace, mode and autocast."""
    return _ForceKeys(*_of_plain_thread())


@cache
def keys_above_kernels() -> Any:
    """Return the keys that come before those of backends, ``FAKE`` included."""
    return _all_keys() - _keys_after(FAKE)


@cache
def _own_keys() -> Any:
    composite, autocast = OWN_KEYS
    return _KeySet(composite).add(autocast)


def past_own_keys() -> Any:
    """Return a context in which operators pass the keys by that a trace includes above autograd."""
    return ExcludeKeys(_own_keys())


@cache
def _above_kernels() -> Any:
    above = keys_above_kernels()
    for key in _LAZY:
        above = above.remove(key)
    return above


@cache
def _of_plain_thread() -> tuple[Any, Any]:
    included = _KeySet(_INCLUDED[0]).add(_INCLUDED[1])
    first, last = _AUTOCAST
    return included, (_keys_after(last).add(last) - _keys_after(first)).add(FAKE)


class excluded:
    """A context in which operators pass a key by, or do not, and which leaves that as it was."""

    __slots__ = ("_before", "_key", "_now")

    def __init__(self, key: Any, now: bool = True) -> None:
        self._key, self._now = key, now

    def __enter__(self) -> None:
        self._before = is_excluded(self._key)
        set_excluded(self._key, self._now)

    def __exit__(self, *_: object) -> None:
        set_excluded(self._key, self._before)


def outside_interception() -> excluded:
    """Let operators reach their kernels while those around them are intercepted."""
    return excluded(FAKE)
