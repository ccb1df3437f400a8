"""What kernels of nested tensors are handed: how such tensors are made in the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host


class NestedTensors(Protocol):
    """Makes nested tensors of tensors without data, while operators are intercepted."""

    @property
    def host(self) -> Host:
        """The host that kernels for the CPU run on."""

    @property
    def gpu(self) -> Gpu:
        """The GPU that kernels for cuda run on."""

    def wrap(self, buffer: Tensor, sizes: Tensor) -> Tensor:
        """Return the nested tensor of the parts that lie one behind the other in ``buffer``."""

    def table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the sizes of parts as the tensor that a nested one holds."""

    def launch(
        self, name: str, kernel: Callable[..., object], written: Tensor, *read: Tensor
    ) -> None:
        """Compute what a kernel writes to a new tensor, ``kernel(written, *read)`` on values."""

    def with_last_size(self, sizes: Tensor, size: int) -> Tensor:
        """Return a copy of ``sizes`` with another last column."""


def sizes_on_gpu(beside: Tensor, count: int) -> Tensor:
    """Return sizes and offsets for a kernel: one array of 32-bit integers on the GPU."""
    return beside.new_empty((count,), dtype=torch.int32)
