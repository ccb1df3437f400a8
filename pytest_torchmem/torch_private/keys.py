"""Dispatch keys, those of a thread, and what torch says of an operator: schema and kernels."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from pytest_torchmem.torch_private.names import dispatch_key, private, private_attribute

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
else:
    HigherOrderOperator = private("torch._ops.HigherOrderOperator")
    OpOverload = private("torch._ops.OpOverload")
    OpOverloadPacket = private("torch._ops.OpOverloadPacket")


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


def at_kernels(*, lowers: bool = False) -> Any:
    """Return a context in which operators go to their kernels: no autograd, autocast or trace.
    ``lowers`` leaves them the CPU's autocast, which is on for what a kernel calls.
    """
    return ExcludeKeys(_above_kernels().remove(_AUTOCAST[0]) if lowers else _above_kernels())


def with_autograd() -> Any:
    """Return a context in which operators run as on a thread without trace, mode and autocast."""
    return _ForceKeys(*_of_plain_thread())


@cache
def keys_above_kernels() -> Any:
    """Return the keys that come before those of backends, ``FAKE`` included."""
    return _all_keys() - _keys_after(FAKE)


@cache
def own_key_set() -> Any:
    """Return the keys that a trace includes above autograd."""
    composite, autocast = OWN_KEYS
    return _KeySet(composite).add(autocast)


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


#: The ``FunctionSchema`` of an overload.
schema: Callable[[OpOverload], torch.FunctionSchema] = private_attribute(
    "torch._ops.OpOverload._schema"
)
has_kernel: Callable[[str, Any], bool] = private("torch._C._dispatch_has_kernel_for_dispatch_key")
#: Whether an operator is dispatched at all, and not TorchScript's alone.
is_dispatched: Callable[[str], bool] = private("torch._C._dispatch_has_kernel")
takes_numbers: Callable[[str], bool] = private("torch._C._should_allow_numbers_as_tensors")
all_operators: Callable[[], list[str]] = private("torch._C._dispatch_get_all_op_names")

_DEFINITION = "torch._library.custom_ops.CustomOpDef"
_CustomOpDef: Any = private(_DEFINITION)
_overload_of: Callable[[Any], OpOverload] = private_attribute(f"{_DEFINITION}._opoverload")
_fake_kernel_of: Callable[[Any], Any] = private_attribute(f"{_DEFINITION}._abstract_fn")
_find_definition: Callable[[str], Any] = private("torch._library.custom_ops._maybe_get_opdef")
_returns_nothing: Callable[[OpOverload], bool] = private(
    "torch._library.utils.can_generate_trivial_fake_impl"
)
_triton_operators: dict[str, Any] = private("torch._library.triton.triton_ops_to_kernels")
_kernels_in_python: set[str] = private("torch.library._impls")
_custom: Any = private("torch._library.simple_registry.singleton")


def is_composite_implicit(operator: OpOverload) -> bool:
    """Return whether ``operator`` is made of other operators that carry its gradient. Some
    (``silu_backward``) have a kernel for the CPU as well, which is what the CPU runs.
    """
    name = operator.name()
    return has_kernel(name, COMPOSITE_IMPLICIT) and not has_kernel(name, "CPU")


@cache
def first_key(operator: OpOverload, *keys: Any) -> Any:
    """Return the first of some keys that an operator has a kernel for, or None."""
    return next((key for key in keys if has_kernel(operator.name(), key)), None)


@cache
def composite_key(operator: OpOverload) -> Any:
    """Return the key for the body of an operator that the CPU runs as others, or None."""
    found = first_key(operator, CPU, COMPOSITE_EXPLICIT, COMPOSITE_NON_FUNCTIONAL)
    return None if found == CPU else found


def has_kernel_on(operator: OpOverload, device: str) -> bool:
    """Return whether ``operator`` has a kernel of its own for ``"cpu"`` or ``"cuda"``."""
    return has_kernel(operator.name(), device.upper())


@cache
def is_structured(operator: OpOverload) -> bool:
    """Return whether the geometry of an operator's outputs is set in C++ for all devices.

    Such an operator has a kernel for the CPU, and one on top of all kernels that makes the outputs
    and calls the ``out=`` overload (torchgen/dest/register_dispatch_key.py, StructuredRegister).
    """
    name = operator.name()
    return has_kernel(name, COMPOSITE_NON_FUNCTIONAL) and has_kernel(name, "CPU")


def custom_operator(definition: Any) -> OpOverload | None:
    """Return the operator that ``torch.library.custom_op`` made, or None for anything else."""
    return _overload_of(definition) if isinstance(definition, _CustomOpDef) else None


def is_opaque(operator: OpOverload) -> bool:
    """Return whether somebody registered how to find an operator's outputs without running it.

    Every ``custom_op`` has: the body of one is no place to look into, since it may hand addresses
    to a kernel. Those of ``torch.nn.functional`` itself are made of operators.
    """
    if operator.namespace == "torch_nn":
        return False
    # ``get`` came with torch 2.13; ``find`` makes an entry of what has none.
    entry = getattr(_custom, "get", _custom.find)(operator.name())
    return entry is not None and entry.fake_impl.kernel is not None


def is_triton_operator(operator: OpOverload) -> bool:
    """Return whether ``torch.library.triton_op`` made an operator, of operators and launches."""
    return operator.name() in _triton_operators


def lacks_geometry(operator: OpOverload) -> bool:
    """Return whether ``operator`` is a ``custom_op`` whose outputs nobody has described."""
    if operator.namespace == "aten":
        return False
    definition = _find_definition(operator.name())
    described = definition is None or _fake_kernel_of(definition) is not None
    return not (described or _returns_nothing(operator))


def undescribed_in_python(operator: OpOverload, device: str) -> Any:
    """Return the key of an operator's kernel for a device, if that is a function in Python that
    nobody has described: what it makes is known by calling it. Else None.
    """
    name = operator.name()
    definition = None if operator.namespace == "aten" else _find_definition(name)
    if definition is None:
        described = is_opaque(operator) or has_kernel(name, "Meta")
    else:  # it has a kernel for ``meta`` in any case, which raises
        described = _fake_kernel_of(definition) is not None or is_triton_operator(operator)
    if described:
        return None
    for key in ({"cpu": "CPU", "cuda": "CUDA"}[device], "CompositeExplicitAutograd"):
        # As ``Library.impl`` names them (torch/library.py).
        if f"{operator.namespace}/{name.partition('::')[2]}/{key}" in _kernels_in_python:
            return dispatch_key(key)
    return None


@cache
def is_view(operator: OpOverload) -> bool:
    """Return whether ``operator`` is of ATen and makes neither a storage nor data. ``lift_fresh``
    does not count: by it a tensor that C++ made of Python numbers enters a trace.
    """
    described = schema(operator)
    base = described.name.removeprefix("aten::")
    if operator.namespace != "aten" or base == "lift_fresh":
        return False
    if base == "set_":
        return True
    return (operator.is_view or base in ("detach", "alias")) and any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in described.arguments
    )


def is_only_python(operator: OpOverload) -> bool:
    """Return whether ``operator`` is somebody's ``custom_op`` that takes and returns no tensor.

    Those that the compiler puts in the place of calls of streams and events are
    (torch/_dynamo/variables/streams.py): their bodies make the calls.
    """
    return _find_definition(operator.name()) is not None and "Tensor" not in str(schema(operator))


@cache
def find_operator(name: str) -> OpOverload | None:
    """Return ``torch.ops.aten.<name>`` (``"add.Tensor"``, ``"relu"``), or ``None``."""
    base, _, overload = name.partition(".")
    try:
        return cast(OpOverload, getattr(getattr(torch.ops.aten, base), overload or "default"))
    except (AttributeError, RuntimeError):
        return None
