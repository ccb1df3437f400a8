"""Why an operator refuses its arguments, in the words of torch's own kernel.

``meta`` is written in Python for many operators. It refuses what kernels refuse, often with another
sentence (``torch.Size([5, 4])`` for ``[5, 4]``), and at times with another type of exception, for
which programs have no ``except``. So the kernel is asked, once it is known that there is no result.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.errors import TorchmemError, UnsupportedOperatorError
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step import trees
from pytest_torchmem.torch_private import keys, settings
from pytest_torchmem.torch_private.tensors import storage_address, tensor_on

#: ``torch.linalg.LinAlgError``, which its module does not export.
LinAlgError: type[RuntimeError] = cast(Any, torch.linalg).LinAlgError
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
"""What operators raise for arguments that they do not accept."""
_MOST = 256 << 20
"""Bytes of arguments that are made. They are zero and pages that nobody reads take no memory; but a
kernel that does not refuse after all computes something."""
_OF_THE_CPU = ("cpu", "CPU", "ZeroDivisionError", "Unsupported dtype Half")
"""What is in the sentence of a kernel for the CPU where that for a GPU has another, or none; the
last is promote_type_fft's (native/SpectralOps.cpp).
"""
_NO_KERNEL = re.compile(r"not implemented for '(\w+)'")
"""Ends the sentence of AT_DISPATCH (ATen/Dispatch.h), whose beginning names the kernel."""
_EVERYWHERE = frozenset(["Float", "Double", "Bool", "Byte", "Char", "Short", "Int", "Long"])
"""Types that no kernel for a GPU knows where the one for the CPU does not."""
_MORE_ON_GPU = frozenset({"abs", "histc", "trace"})
"""Operators of which a GPU's kernel knows more of these; native/cuda/, AbsKernel.cu, SummaryOps.cu
and TriangularOps.cu.
"""
_FEW = 1 << 18
"""Elements up to which a kernel is asked about types, which may be a moment's work."""
_OF_NUMBERS = frozenset({torch.float32, torch.float64, torch.bfloat16})
_COMMON = _OF_NUMBERS | {torch.int64, torch.bool}
"""Types of which every kernel that has tensors of one of the former takes some."""
_ABOUT_TYPES = ("not implemented for", "type", "Boolean", "complex", "Complex", "integral")
"""What is in a sentence about types."""
_SMALL = 127
"""The largest number that every type holds but that of truth values."""
_REFUSE_VALUES = frozenset({"mvlgamma"})
"""Pointwise operators that look at their values first."""
_LISTS = "_foreach_"
"""Begins the names of what runs a pointwise operator on each tensor of a list."""


def in_words_of_kernel(
    operator: OperatorSpec,
    args: trees.Args,
    kwargs: trees.Kwargs,
    error: Exception,
    *,
    on_gpu: bool,
) -> Exception:
    """Return what torch's kernel raises for a call that was refused with ``error``, or ``error``.
    That is the CPU's kernel; those for a GPU share the functions that look at arguments.
    """
    without_meta = isinstance(error, UnsupportedOperatorError)  # or one that said so by refusing
    if isinstance(error, (TorchmemError, torch.OutOfMemoryError, LinAlgError)) and not without_meta:
        return error
    if operator.overload.namespace != "aten":
        return error
    found = _asked(operator, args, kwargs)
    if found is not None and on_gpu:
        found = _of_gpu(operator, found)
    return error if found is None else found


def _asked(operator: OperatorSpec, args: trees.Args, kwargs: trees.Kwargs) -> Exception | None:
    """Run an operator on zeros, and return what it raises."""
    tensors, made = trees.argument_tensors((args, kwargs)), dict[int, torch.UntypedStorage]()
    if not tensors or any(one.layout is not torch.strided or one.is_meta for one in tensors):
        return None
    sizes = {storage_address(one): one.untyped_storage().nbytes() for one in tensors}
    if sum(sizes.values()) > _MOST:
        return None

    def zeros(tensor: Tensor) -> Tensor:
        address = storage_address(tensor)
        if address not in made:
            nbytes = tensor.untyped_storage().nbytes()
            made[address] = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return tensor_on(made[address], tensor.dtype, *place)

    default = torch.default_generator  # which the kernel draws from, whatever the trace does
    random_numbers = default.get_state()
    real = {id(tensor): zeros(tensor) for tensor in tensors}
    args, kwargs = operator.placed(args, kwargs, torch.device("cpu"))
    args, kwargs = trees.replace_tensors((args, kwargs), lambda tensor: real[id(tensor)])
    if "generator" in kwargs:
        kwargs["generator"] = None
    try:
        return _refusal(operator, args, kwargs)
    finally:
        default.set_state(random_numbers)


def _refusal(operator: OperatorSpec, args: trees.Args, kwargs: trees.Kwargs) -> Exception | None:
    """Run the kernel on real arguments, and return what it raises."""
    try:
        with settings.OneThread(), keys.at_kernels():
            operator.overload(*operator.with_numbers_as_tensors(args, "cpu"), **kwargs)
    except REFUSALS as error:
        return error.with_traceback(None)  # whose frames hold the arguments, and it them
    return None


class Refusals:
    """What kernels refuse and ``meta`` takes, by types and numbers; one of these for each trace."""

    def __init__(self) -> None:
        self._asked: set[tuple[Any, ...]] = set()
        """The operators, types and kinds of numbers that torch's kernels were asked about."""

    def check(
        self, operator: OperatorSpec, args: trees.Args, kwargs: trees.Kwargs, *, on_gpu: bool
    ) -> None:
        """Raise what the kernel raises for numbers and types of a call that is new. ``meta`` does
        not convert a number (``masked_fill(mask, 1e300)``), and takes all types (``softmax`` of
        integers, a weight in half precision).
        """
        if operator.overload.namespace != "aten":
            return
        tensors = trees.argument_tensors((args, kwargs))
        if not tensors or any(one.layout is not torch.strided or one.is_meta for one in tensors):
            return
        types = tuple([tensor.dtype for tensor in tensors])
        key: tuple[Any, ...] = operator.name, types
        error = None
        if _takes_any_size(operator):
            numbers = trees.argument_leaves((args, kwargs), (int, float, complex, str))
            sizes = [(tensor.dim(), tensor.numel() > 0) for tensor in tensors]
            key = (*key, *sizes, *map(_kind_of_number, numbers))
            if (scalars := _tensor_of_host(operator, args, kwargs)) is not None:
                key = (*key, scalars.shape)
            if key not in self._asked:
                self._asked.add(key)
                error = _asked_in_small(operator, args, kwargs)
                if error is not None:  # whose words may be about sizes
                    error = _asked(operator, args, kwargs) or error
        elif key not in self._asked and _are_uncommon(types, on_gpu):
            # Where it is not refused, it is computed.
            if sum([tensor.numel() for tensor in tensors]) <= _FEW:
                self._asked.add(key)
                error = _asked(operator, args, kwargs)
            about = _ABOUT_TYPES[:1] if on_gpu else _ABOUT_TYPES
            if error is not None and not any(word in str(error) for word in about):
                return
        if error is None:
            return
        self._asked.discard(key)  # the next such call is as wrong
        error = _of_gpu(operator, error) if on_gpu else error
        if error is not None:
            try:
                raise error
            finally:
                del error  # a frame that holds what it raised is a cycle, and holds the tensors


def _tensor_of_host(
    operator: OperatorSpec, args: trees.Args, kwargs: trees.Kwargs
) -> Tensor | None:
    name = operator.record.of_host
    if not name:
        return None
    place = operator.argument_names.index(name)
    found: Tensor | None = args[place] if place < len(args) else kwargs.get(name)
    return found


def _kind_of_number(number: Any) -> tuple[Any, ...]:
    """Return what kernels may refuse a number or text for: small numbers all types hold alike."""
    if isinstance(number, (bool, complex, str)) or not abs(number) <= _SMALL:
        return type(number), number
    return number > 0, number < 0, number == int(number)


def _are_uncommon(types: Sequence[torch.dtype], on_gpu: bool) -> bool:
    """Return whether there may be kernels that refuse ``types``. Which types a GPU's kernels mix is
    their own affair: the CPU is asked about integers alone.
    """
    if on_gpu:
        return not (types[0].is_floating_point or types[0].is_complex)
    one_of_numbers = types[0] in _OF_NUMBERS and len(_OF_NUMBERS.intersection(types)) == 1
    return not (one_of_numbers and _COMMON.issuperset(types))


def _of_gpu(operator: OperatorSpec, error: Exception) -> Exception | None:
    """Return what a GPU's kernel raises where the CPU's raises ``error``, if it does."""
    text = str(error)
    found = _NO_KERNEL.search(text)
    if found is None:
        return None if any(word in text for word in _OF_THE_CPU) else error
    name = _family(operator).removeprefix(_LISTS).rstrip("_")
    known = found[1] in _EVERYWHERE and name not in _MORE_ON_GPU
    return type(error)(text.replace("_cpu", "_cuda")) if known else None


def _family(operator: OperatorSpec) -> str:
    return operator.name.removeprefix("aten::").partition(".")[0]


def _asked_in_small(
    operator: OperatorSpec, args: trees.Args, kwargs: trees.Kwargs
) -> Exception | None:
    """Run an operator on one element of each tensor, and return what it raises."""
    scalars = _tensor_of_host(operator, args, kwargs)  # as many as there are tensors in a list
    number = 0 if operator.record.refuses_types else 1  # a position, or what is divided by

    def one(tensor: Tensor) -> Tensor:
        shape = tensor.shape if tensor is scalars else [min(size, 1) for size in tensor.shape]
        return torch.full(shape, number, dtype=tensor.dtype)

    def none(tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=tensor.dtype)  # which it gives the size that it has

    small = trees.replace_tensors(args, one)
    options = {
        name: trees.replace_tensors(value, none if name in operator.mutated_names else one)
        for name, value in kwargs.items()
    }
    return _refusal(operator, small, options)


@cache
def _takes_any_size(operator: OperatorSpec) -> bool:
    """Return whether a kernel refuses of one element what it refuses of many: that of an operator
    that is pointwise, also on lists, and refuses no values, or whose record says so.
    """
    family = _family(operator)
    functional = family.rstrip("_")
    if operator.random or functional in _REFUSE_VALUES:
        return False
    if (
        operator.record.refuses_types
        or family.startswith(_LISTS)
        or torch.Tag.pointwise in operator.overload.tags
    ):
        return True
    packet = getattr(torch.ops.aten, functional, operator.overload.overloadpacket)
    overloads = (getattr(packet, name) for name in packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
