"""What CUDA takes where algorithms have to be deterministic: a sort of the indices."""

from __future__ import annotations

from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.targets.gpus import Gpu

_LONG = 8


def sort_of_indices(gpu: Gpu, number: int, bits: int | None = None) -> tuple[int, ...]:
    """Return what is alive while indices are sorted: the linear index, the sorted ones, where they
    stood, their range, and the sort by so many bits; Indexing.cu, ``index_put_with_sort_kernel``.
    """
    sort = cub.radix_sort_pairs(gpu, number, _LONG, _LONG, bits)
    return (*[number * _LONG] * 4, sort)
