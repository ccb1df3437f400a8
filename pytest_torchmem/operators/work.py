"""The work of one call: floating-point operations, and the bytes that its kernel moves.

``torch.utils.flop_counter`` has formulas for matrix products, convolutions and attention on cuda.
The operators of that kind that it lacks, what multiplies and adds along a dimension, have one in
their record (``flops``). As there, pointwise operators, reductions and normalisations count no
operations: they take the time that their bytes need, which are counted for every operator.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.profile.operator_calls import KnownWork
from pytest_torchmem.step.trees import argument_tensors, replace_leaves, replace_tensors
from pytest_torchmem.torch_private.dispatch.operators import OpOverload

_WRITTEN_ONLY = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)
"""Operators that do not read what they write to."""
_NOTHING_WRITTEN = ("aten::empty", "aten::new_empty", "aten::_efficientzerotensor")


class CallWork:
    """The work of calls of one operator and geometry; operations are counted when first read."""

    def __init__(self, spec: OperatorSpec, args: Any, kwargs: Any, result: Any) -> None:
        self.spec = spec
        self._geometries = replace_tensors((args, dict(kwargs), result), Geometry)
        self.read, self.written = _moved(spec, args, kwargs, result)
        self.inner: tuple[CallWork, ...] | None = None
        """The calls that the operator's body made."""

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with a ``Geometry`` in the place of each tensor."""
        args, kwargs, _ = self._geometries
        return args, kwargs

    @cached_property
    def flops(self) -> int:
        """Return the floating-point operations; of a body without formula, those of its calls."""
        own = self.spec.flops
        of_torch = None if own is not None else _formula_of_torch(self.spec.overload)
        if own is None and of_torch is None:
            return sum(work.flops for work in self.inner or ())
        args, kwargs, result = replace_leaves(self._geometries, Geometry, Geometry.on_meta)
        if own is not None:
            return int(own(args, kwargs, outputs=result))
        try:
            return int(of_torch(*args, **kwargs, out_val=result)) if of_torch is not None else 0
        except (AssertionError, TypeError, ValueError, IndexError):
            return 0  # called with what torch's formula does not know

    @property
    def has_formula(self) -> bool:
        """Whether a formula counts the operations, of the operator or of one that it is made of."""
        if "flops" in vars(self) or self.spec.flops is not None:
            return True
        if _formula_of_torch(self.spec.overload) is not None:
            return True
        return any(work.has_formula for work in self.inner or ())

    def of_entries(self, flops: int, read: int) -> None:
        """Count what goes by the entries of sparse tensors, which a ``Geometry`` does not tell."""
        self.flops, self.read = flops, read

    def of_body(self, inner: "tuple[CallWork, ...]") -> None:
        """Move the bytes that the calls of the operator's body moved."""
        self.inner = inner
        self.read = sum(work.read for work in inner)
        self.written = sum(work.written for work in inner)

    def __reduce__(self) -> Any:
        return KnownWork, (self.flops, self.read, self.written)


class Geometry:
    """What a formula may ask of a tensor."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.stride = tensor.stride() if tensor.layout is torch.strided else None
        """None where the tensor has no strides (sparse)."""

    def on_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _formula_of_torch(overload: OpOverload) -> Callable[..., Any] | None:
    """Return torch's own formula of an operator, which is called as the operator is, or None."""
    # Imported when first asked: it imports triton, where there is one.
    from torch.utils.flop_counter import flop_registry

    found: Callable[..., Any] | None = flop_registry.get(overload.overloadpacket)
    return found


def _moved(spec: OperatorSpec, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes, each tensor once."""
    written = {id(one): one for one in argument_tensors(spec.written(args, kwargs))}
    given = {id(one): one for one in argument_tensors((args, kwargs))}
    made = {id(one): one for one in argument_tensors(result) if id(one) not in given}
    family = spec.name.partition(".")[0]
    if family.startswith(_NOTHING_WRITTEN):
        return 0, 0
    unread = set(written) if family in _WRITTEN_ONLY or spec.name.endswith("out") else set()
    read = sum(_bytes(tensor) for name, tensor in given.items() if name not in unread)
    return read, sum(map(_bytes, {**written, **made}.values()))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded one has each but once."""
    try:
        return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no storage of its own
        return 0
