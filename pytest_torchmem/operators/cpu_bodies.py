"""Kernels that are themselves written as a sequence of operators.

A CPU kernel such as ``_linalg_slogdet_out`` is one operator to the dispatcher, and yet it calls
others: what it takes beyond its outputs is theirs. Here such a body is told again, as far as it
allocates::

    @body("aten::lu_unpack")
    def lu_unpack(machine, LU, pivots, unpack_data=True, unpack_pivots=True):
        '''native/BatchLinearAlgebra.cpp, TORCH_IMPL_FUNC(lu_unpack_out).'''

It is run on hollow tensors while operators are intercepted, so that every operator in it brings its
own workspace, and returns the operator's outputs. ``machine`` is the host. Buffers that a kernel
asks for itself are ``torch.empty``. What is alive together in the kernel has to be so in the
function: a variable that C++ keeps to the end of a block is kept here, and deleted where C++ lets
go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pytest_torchmem.operators.families import load
from pytest_torchmem.torch_private.patches import is_another

Body = Callable[..., Any]
_F = TypeVar("_F", bound=Body)

_BODIES: dict[str, Body] = {}
_ON_CUDA: set[str] = set()


def body(*operators: str, on_cuda: bool = False) -> Callable[[_F], _F]:
    """Register what the CPU kernel of ``operators`` does; names with their overload, if any.

    ``on_cuda``: the kernel for CUDA does the same, operator by operator.

    Raises ``ValueError`` where an operator already has a body.
    """

    def register(function: _F) -> _F:
        for operator in operators:
            if is_another(_BODIES.get(operator), function):
                raise ValueError(f"{operator} already has a body")
            _BODIES[operator] = function
            if on_cuda:
                _ON_CUDA.add(operator)
        return function

    return register


def find_body(operator: str, device: str = "cpu") -> Body | None:
    """Return the body of an operator's kernel (``"aten::median.dim"``), or ``None``."""
    load()
    return _BODIES.get(operator) if device == "cpu" or operator in _ON_CUDA else None
