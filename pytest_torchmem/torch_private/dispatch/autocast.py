"""Autocast by kernels in Python, on a key that no build of torch has kernels or tensors for."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.torch_private.dispatch.dispatcher import casting_kernels, key_included
from pytest_torchmem.torch_private.dispatch.kernels import kernel_for
from pytest_torchmem.torch_private.dispatch.keys import COMPOSITE_IMPLICIT, OWN_KEYS, excluded
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, has_kernel
from pytest_torchmem.torch_private.names import dispatch_key, private

_PATH, _AUTOCAST = OWN_KEYS
_AUTOCAST_CUDA = dispatch_key("AutocastCUDA")
_AUTOCAST_CPU = dispatch_key("AutocastCPU")
_registered_for: Callable[[str], list[str]] = private(
    "torch._C._dispatch_get_registrations_for_dispatch_key"
)


@contextmanager
def autocast_kernels(
    run: Callable[[str, tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[Callable[[Iterable[str]], None]]:
    """Let operators be cast by ``run``, by their names (``"aten::mm"``).

    What this yields registers those names for good. They are cast where
    ``autocast_key_included(True)`` is.
    """
    on_key = casting_kernels()
    on_key.run = run
    try:
        yield on_key.call_back
    finally:
        on_key.run = None


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


def autocast_operators_of_cpu() -> list[str]:
    """Return the names of the operators that ``torch.autocast("cpu")`` has kernels for."""
    return _registered_for("AutocastCPU")


def autocast_key_included(included: bool) -> None:
    """Let the operators of this thread pass the casting kernels, or no longer."""
    key_included(_AUTOCAST, included)


def outside_autocast() -> excluded:
    """Let operators pass by the casting kernels (``ExcludeDispatchKeyGuard no_autocast``)."""
    return excluded(_AUTOCAST)


def outside_autocast_of_cpu() -> excluded:
    """Let operators pass by the kernels of ``torch.autocast("cpu")``, too.

    To C++ all tensors are on the CPU, and excluding the key is what switches it off there.
    """
    return excluded(_AUTOCAST_CPU)


def run_uncast(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that is not cast itself; what a composite one is made of may be."""
    name = operator.name()
    for key in (_PATH, COMPOSITE_IMPLICIT):
        if has_kernel(name, key):
            return kernel_for(operator)(key, *args, **kwargs)
    with outside_autocast(), outside_autocast_of_cpu():
        return operator(*args, **kwargs)
