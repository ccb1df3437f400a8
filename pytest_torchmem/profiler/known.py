"""Values that are known: token ids, masks, lengths, counters, computed for real beside the trace.

A storage whose content is known carries it as real memory. An operator all of whose inputs are
known is run for real as well, so that ``mask.any()``, ``lengths.max().item()`` and boolean indexing
give what they would; everything large, random or computed from parameters stays unknown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.profiler.ledger import Record

#: Elements up to which values are kept. Integers and booleans decide control flow and shapes; of
#: floating values only small tables (drop path rates, optimizer steps) are ever asked for.
LIMIT_INTEGER = 1 << 18
LIMIT_FLOATING = 1 << 10


def worth_knowing(dtype: torch.dtype, elements: int) -> bool:
    """Return whether the values of a tensor of that size are kept."""
    floating = dtype.is_floating_point or dtype.is_complex
    return elements <= (LIMIT_FLOATING if floating else LIMIT_INTEGER)


def remember(record: Record, tensor: Tensor) -> None:
    """Keep a copy of the whole storage of the real ``tensor`` as the content of ``record``."""
    content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    record.known = content.clone()


def adopt(record: Record, tensor: Tensor) -> None:
    """Take the storage of ``tensor``, which nobody else holds, as the content of ``record``."""
    record.known = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def value_of(record: Record, tensor: Tensor) -> Tensor:
    """Return the real values of ``tensor``, a view of the known content of its storage."""
    assert record.known is not None
    return torch.empty(0, dtype=tensor.dtype).set_(
        record.known.untyped_storage(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
