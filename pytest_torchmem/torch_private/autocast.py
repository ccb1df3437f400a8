"""Autocast by kernels in Python, on a key that no build of torch has kernels or tensors for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.torch_private.dispatcher import Registrations, passes_by
from pytest_torchmem.torch_private.kernels import kernel_for
from pytest_torchmem.torch_private.keys import set_excluded, set_included
from pytest_torchmem.torch_private.names import dispatch_key, private
from pytest_torchmem.torch_private.operators import OpOverload

KEY = "AutocastIPU"
_AUTOCAST = dispatch_key(KEY)
_AUTOCAST_CUDA = dispatch_key("AutocastCUDA")
_registered_for: Callable[[str], list[str]] = private(
    "torch._C._dispatch_get_registrations_for_dispatch_key"
)


@contextmanager
def autocast_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Register casting kernels, by the operators' names (``"aten::mm"``).

    They run where ``autocast_key_included(True)`` is.
    """
    with Registrations(KEY) as registrations:
        registrations.fallback(passes_by)
        for name, kernel in kernels.items():
            registrations.add(name, kernel)
        yield


def own_autocast_kernels() -> dict[str, Callable[..., Any]]:
    """Return the casting kernels that users registered for their operators on cuda, by operator.

    As ``torch.library.register_autocast`` does; those of C++ look at the device that C++ sees.
    """

    def calling(overload: OpOverload) -> Callable[..., Any]:
        return lambda *args, **kwargs: kernel_for(overload)(_AUTOCAST_CUDA, *args, **kwargs)

    found = {}
    for name in _registered_for("AutocastCUDA"):
        namespace, _, bare = name.partition("::")
        if namespace == "aten":
            continue
        base, _, overload = bare.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base)
        found[name] = calling(getattr(packet, overload or "default"))
    return found


def autocast_key_included(included: bool) -> None:
    """Let the operators of this thread pass the casting kernels, or no longer.

    Autocast keys are excluded by default (c10/core/impl/LocalDispatchKeySet.h).
    """
    set_included(_AUTOCAST, included)
    set_excluded(_AUTOCAST, not included)


class outside_autocast:
    """Let operators pass by the casting kernels (``ExcludeDispatchKeyGuard no_autocast``)."""

    __slots__ = ()

    def __enter__(self) -> None:
        set_excluded(_AUTOCAST, True)

    def __exit__(self, *exception: object) -> None:
        set_excluded(_AUTOCAST, False)
