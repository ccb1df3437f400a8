"""Sparse COO tensors: their own kernels are put together from operators on indices and values."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchmem.operators.sparse.parts import unsupported_layout
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors


def has_sparse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a sparse COO tensor is among the arguments of an operator."""
    return any(tensor.layout is torch.sparse_coo for tensor in argument_tensors((args, kwargs)))


def run_sparse(operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with a sparse tensor among its arguments; inner operators are intercepted.

    Raises ``UnsupportedOperatorError`` for one that is not known.
    """
    kernel = operator.cpu.sparse
    result = None if kernel is None else kernel(args, kwargs)
    if result is None:
        raise unsupported_layout(operator.overload, "its arguments are sparse tensors")
    return result
