"""Copies between host and GPU that go through temporaries on either side.

native/cuda/Copy.cu: bytes travel between contiguous tensors of one type (``cudaMemcpyAsync``).
Where the two ends of a copy are not that (``copy_requires_temporaries``), ``copy_kernel_cuda``
makes contiguous ones beside them: the type is converted on the host, or for a ``non_blocking`` copy
on the GPU. Between GPUs, which can reach each other's memory, a kernel copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.ledger import DeviceLedger
from pytest_torchmem.operators.geometry import is_dense

_aten: Any = torch.ops.aten


def staged_pairs(
    call: Call, result: Any, device: DeviceLedger
) -> Iterator[tuple[Tensor, Tensor, DeviceLedger]]:
    """Yield what a call copies from another device by way of temporaries.

    That is: destination, source, and the device of the source.
    """
    tensors, records = call.tensors, call.records
    half = len(tensors) // 2 if call.operator.name != "aten::_to_copy" else 0
    destinations = tensors[:half] if half else [result]
    for destination, source, record in zip(
        destinations, tensors[half:], records[half:], strict=False
    ):
        both_on_gpus = "cpu" not in (record.ledger.device.type, device.device.type)
        if record.ledger is not device and not both_on_gpus and needs_staging(destination, source):
            yield destination, source, record.ledger


def needs_staging(destination: Tensor, source: Tensor) -> bool:
    """Return whether a copy between devices needs temporaries; ``copy_requires_temporaries``."""
    if not destination.numel():
        return False
    if destination.dtype is not source.dtype:
        return True
    if destination.numel() == 1:
        return False
    strides = zip(
        destination.shape, destination.stride(), source.expand_as(destination).stride(), strict=True
    )
    return not is_dense(destination) or any(
        size > 1 and one != other for size, one, other in strides
    )


def stage(
    destination: Tensor,
    source: Tensor,
    onto: torch.device,
    origin: torch.device,
    non_blocking: bool,
    placing_on: Callable[[torch.device], AbstractContextManager[None]],
) -> None:
    """Issue the operators by which ``copy_kernel_cuda`` makes its temporaries.

    The copies into and out of them take nothing more on a GPU, and are left to the values known.
    """
    same_type = destination.dtype is source.dtype
    converts_source = origin.type == ("cuda" if non_blocking else "cpu")
    target = None
    dtype = destination.dtype if converts_source else source.dtype
    if not destination.is_contiguous() or not (same_type or converts_source):
        with placing_on(onto):
            target = torch.empty(destination.shape, dtype=dtype, device="cpu")
    with placing_on(origin):
        if converts_source and not same_type:
            source = _aten._to_copy.default(source, dtype=dtype)
        source = source.expand_as(destination)
        if not source.is_contiguous():
            source = _aten.clone.default(source, memory_format=torch.contiguous_format)
    del target, source  # together, when the copy is done
