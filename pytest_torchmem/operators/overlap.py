"""Writing to memory that several elements share: what kernels refuse, and ``meta`` takes.

``meta`` asks structured operators alone, and every tensor there has a storage of its own. The lists
below were found by running each operator of ``torch.testing``'s database on such tensors.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import is_dense
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.keys import schema


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_WRITE_TWICE = _names(
    "addmv_ all amax amin any argmax argmin avg_pool3d baddbmm_ bmm conj_physical_ copy_ cummax "
    "cummin embedding_renorm_ fill_ fill_diagonal_ histc index_fill_ index_put_ linalg_vector_norm "
    "linear masked_fill_ mv nansum narrow_copy norm prod std sum threshold_ topk tril tril_ triu "
    "triu_ var zero_"
)
"""Operators whose kernels write to one place more than once: they ask nothing, or it is the same
(``set_check_mem_overlap(false)`` in ATen/native, as in ``TensorIterator::reduce_op``). What
``copy_`` refuses, its record checks."""
_APART = _names(
    "_logcumsumexp addbmm addmm addmv addr baddbmm bernoulli cat copy_ cumprod cumsum floor_divide "
    "gather gelu hardshrink index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ "
    "index_select kthvalue linalg_cross logcumsumexp normal renorm scatter scatter_ scatter_add "
    "scatter_add_ scatter_reduce scatter_reduce_ softplus softshrink sort where"
)
"""Operators that are not pointwise and ask whether an operand overlaps with what is written."""
_WHOLLY_APART = _names(
    "cat gather index_add_ index_copy_ index_reduce_ index_select kthvalue linalg_cross scatter_ "
    "scatter_add_ scatter_reduce_"
)
"""Those that refuse an operand which is the written tensor itself (``assert_no_overlap``)."""
_NOT_ASKED = frozenset({"mvlgamma"})


@cache
def keeps_apart(operator: OperatorSpec) -> bool:
    """Return whether a kernel refuses operands that overlap with what it writes to."""
    name = _family(operator)
    if name is None or name in _NOT_ASKED:
        return False
    return name in _APART or torch.Tag.pointwise in operator.overload.tags


def check_written_once(operator: OperatorSpec, args: Sequence[Any], kwargs: Any) -> None:
    """Raise what a kernel raises for an expanded tensor that it would write to.

    A kernel whose ``out`` is its first argument too is the one in place: ``mv`` with ``out`` is
    such a call of ``addmv`` (native/Blas.cpp, mv_out), which copies nothing first.
    """
    name = _family(operator)
    if name is None or name in _WRITE_TWICE:
        return
    for tensor in argument_tensors(operator.written(tuple(args), kwargs)):
        if not (f"{name}_" in _WRITE_TWICE and args and args[0] is tensor):
            written_once(tensor)


def written_once(tensor: Tensor) -> None:
    """Raise for an expanded tensor; ATen/MemoryOverlap.cpp, assert_no_internal_overlap."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and stride == 0 for size, stride in sides):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            "single memory location. Please clone() the tensor before performing the operation."
        )


def check_apart(
    operator: OperatorSpec,
    args: tuple[Any, ...],
    kwargs: Any,
    tensors: Sequence[Tensor],
    storages: Sequence[object],
) -> None:
    """Raise the kernel's error where one of ``tensors`` overlaps with its output.

    ``storages`` has one object for each storage, in the order of the tensors on them.
    (ATen/MemoryOverlap.cpp, assert_no_partial_overlap and assert_no_overlap.)
    """
    wholly = _family(operator) in _WHOLLY_APART
    for written in argument_tensors(operator.written(args, kwargs)):
        own = next((on for one, on in zip(tensors, storages, strict=True) if one is written), None)
        beside = [one for one, on in zip(tensors, storages, strict=True) if on is own]
        others = [one for one in beside if one is not written]
        given_too = wholly and len(beside) - len(others) > 1
        if given_too or any(_overlap(written, other, wholly) for other in others):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to "
                "tensor refer to a single memory location. Please clone() the tensor before "
                "performing the operation."
            )


def _overlap(written: Tensor, other: Tensor, wholly: bool) -> bool:
    """Return whether two tensors without gaps on one storage overlap; get_overlap_status."""
    if not (written.numel() and other.numel() and is_dense(written) and is_dense(other)):
        return False
    (begin, end), (first, last) = _reach(written), _reach(other)
    if (begin, end) == (first, last):
        return wholly or written.stride() != other.stride()
    return begin < last and first < end


def _reach(tensor: Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + tensor.numel() * tensor.element_size()


@cache
def _family(operator: OperatorSpec) -> str | None:
    """Return the name of one of torch's own operators that writes to an argument, else None."""
    namespace, _, name = operator.name.partition(".")[0].partition("::")
    written = any(argument.is_out for argument in schema(operator.overload).arguments) or (
        operator.mutated == (0,) and name.endswith("_") and not name.startswith("_")
    )
    return name if namespace == "aten" and written else None
