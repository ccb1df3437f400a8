"""Packed sequences: the steps of padded ones, without their padding; native/PackedSequence.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.geometry import contiguous_copy
from pytest_torchmem.operators.registry import Kind, operator

# Registered for every backend, and reading and writing data all the same. Lengths and the number of
# sequences for each step are on the host, and decide how many rows there are.
_pack = operator(
    "aten::_pack_padded_sequence",
    kind=Kind.LEAF,
    across_devices=True,
    data_dependent=True,
    decided_by=(1,),
    host_outputs={"cpu": (1,), "cuda": (1,)},
    of_host="lengths",
    elsewhere="'lengths' argument should be a 1D CPU int64 tensor, but got 1D {device} Long tensor",
)
operator("aten::_pack_padded_sequence_backward", across_devices=True)


@_pack.workspace("cpu")
def parts_and_lengths(
    outputs: tuple[Tensor, Tensor], input: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[int, ...]:
    """Dense copies of the parts, and of the lengths."""
    parts = _copies(input, outputs[1].tolist(), batch_first)
    return (contiguous_copy(lengths), *parts)


@_pack.workspace("cuda")
def parts(outputs: tuple[Tensor, Tensor], input: Tensor, batch_first: bool) -> tuple[int, ...]:
    """Dense copies of the parts; the lengths are the host's. Exact."""
    return _copies(input, outputs[1].tolist(), batch_first)


def _copies(input: Tensor, batch_sizes: Sequence[int], batch_first: bool) -> tuple[int, ...]:
    """Bytes of the dense copies of the parts that a padded sequence is packed from.

    The steps of one batch size are one part, and all parts are kept until they are joined.
    ``input`` is (steps, batch, ...), or (batch, steps, ...) where the batch is first;
    ``batch_sizes`` has a number of sequences for every step.
    """
    steps = input.transpose(0, 1) if batch_first else input
    copies, begin = [], 0
    for size, run in groupby(batch_sizes):
        end = begin + sum(1 for _ in run)
        copies.append(contiguous_copy(steps[begin:end, :size]))
        begin = end
    return tuple(copies)


@operator("aten::_pad_packed_sequence").path("cuda")
def pad_packed_sequence(call: CompositeCall) -> Any:
    """The lengths it returns are on the host."""
    padded, lengths = call()
    return padded, lengths.cpu()
