"""Dispatch keys, and those that a thread includes and excludes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_torchmem.torch_private.names import dispatch_key, private

#: ``DispatchKey::Fake`` sits below autograd and above every backend (c10/core/DispatchKey.h), and
#: no kernel of torch 2.11 to 2.15 is registered for it.
FAKE = dispatch_key("Fake")
COMPOSITE_IMPLICIT = dispatch_key("CompositeImplicitAutograd")
COMPOSITE_EXPLICIT = dispatch_key("CompositeExplicitAutograd")
COMPOSITE_NON_FUNCTIONAL = dispatch_key("CompositeExplicitAutogradNonFunctional")
COMPOSITE_NESTED = dispatch_key("CompositeImplicitAutogradNestedTensor")
CPU = dispatch_key("CPU")
NESTED_CPU = dispatch_key("NestedTensorCPU")
COMPRESSED_CPU = dispatch_key("SparseCsrCPU")

set_included: Callable[[Any, bool], None] = private(
    "torch._C._dispatch_tls_set_dispatch_key_included"
)
set_excluded: Callable[[Any, bool], None] = private(
    "torch._C._dispatch_tls_set_dispatch_key_excluded"
)

#: A context in which operators pass autograd by.
below_autograd: Callable[[], Any] = private("torch._C._AutoDispatchBelowAutograd")


@contextmanager
def outside_interception() -> Iterator[None]:
    """Let operators reach their kernels while those around them are intercepted."""
    set_excluded(FAKE, True)
    try:
        yield
    finally:
        set_excluded(FAKE, False)
