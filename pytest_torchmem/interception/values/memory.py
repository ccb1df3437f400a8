"""How large a tensor may be whose values are always kept, and the real memory that holds them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

#: Elements up to which values are kept. Integers and booleans decide control flow and shapes; of
#: floating values only small tables (drop path rates, optimizer steps) are ever asked for, and
#: of random ones a row, one for each sample of a batch.
LIMIT_INTEGER = 1 << 18
LIMIT_FLOATING = 1 << 10
LIMIT_RANDOM = 1 << 7

#: The same for the masks that kernels of nested tensors make of their sizes: a boolean for every
#: element, by which they select.
LIMIT_NESTED = 1 << 26

#: What makes tensors of which C++ may fill floating ones without an operator.
EMPTY = "aten::empty.memory_format"

_zeros = torch.zeros  # not what stands there in a trace, which tells devices apart

#: Of an operator whose outputs' values are not known.
NO_MEMORIES: Mapping[int, Tensor] = {}


def worth_knowing(
    dtype: torch.dtype, elements: int, largest: int = 0, limit: int = LIMIT_INTEGER
) -> bool:
    """Return whether the values of a tensor of that size are kept.

    ``largest``: the elements of the largest known tensor that it is computed from. A mask made
    floating (``-inf`` where nothing is attended to) is as large as the boolean one. ``limit`` is
    that of integers and booleans.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    return elements <= (max(LIMIT_FLOATING, largest) if floating else limit)


def is_count(dtype: torch.dtype) -> bool:
    """Return whether values of a type may be how many there are of something."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def memory_for(dtype: torch.dtype, nbytes: int, operator: str = "") -> Tensor | None:
    """Return real memory for a small integer or boolean storage, else None.

    C++ reads and writes such tensors without an operator: lengths, batch sizes, splits. Of floating
    ones it fills what it has just made empty (``at::tensor``, in the CTC loss).
    """
    if nbytes == 0:
        return None
    floating = dtype.is_floating_point or dtype.is_complex
    if floating and operator != EMPTY:
        return None
    if nbytes > (LIMIT_FLOATING if floating else LIMIT_INTEGER) * dtype.itemsize:
        return None
    return zeros(nbytes)


def zeros(nbytes: int) -> Tensor:
    """Return bytes that are all zero.

    From 32,768 on ``fill_`` runs on threads (``at::internal::GRAIN_SIZE``), which a process without
    them would start for this.
    """
    if nbytes < 32_768:
        return _zeros(nbytes, dtype=torch.uint8)
    made = torch.empty(nbytes, dtype=torch.uint8)
    ctypes.memset(made.data_ptr(), 0, nbytes)
    return made
