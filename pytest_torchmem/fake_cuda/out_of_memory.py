"""The error of a fake GPU that is out of memory: torch's message, and what took the memory."""

from __future__ import annotations

import torch
from tabulate import tabulate

from pytest_torchmem.allocator.caching import OutOfMemory
from pytest_torchmem.interception.ledger import DeviceLedger
from pytest_torchmem.printable import printable
from pytest_torchmem.profile.tables import describe
from pytest_torchmem.profile.timeline import Allocation, Origin
from pytest_torchmem.targets.gpus import Gpu

_LARGEST = 10


class OutOfMemoryError(torch.OutOfMemoryError):
    """The GPU that a trace models has no memory left.

    A program catches it as it does on the GPU. Its message is torch's, followed by what requested
    how much, and what was alive.
    """

    # As torch's own: a traceback shows "torch.OutOfMemoryError: CUDA out of memory. …".
    __module__ = "torch"

    gpu: Gpu
    nbytes: int
    """The bytes that were asked for."""
    origin: Origin
    """Who asked for them."""
    what: str
    """The operator that asked for them, or what they are for."""
    live: tuple[Allocation, ...]
    """What was alive on the GPU, largest first."""

    @property
    def request(self) -> str:
        """The request that failed, as one clause: what, how much, and where."""
        origin = self.origin
        where = [f"in the {origin.phase.value}"]
        where += [f"in module {origin.module}"] if origin.module else []
        where += [f"at {origin.line}"] if origin.line else []
        return f"{self.what} requested {format_size(self.nbytes)} {', '.join(where)}"


def out_of_memory_error(
    on: tuple[Gpu, int],
    free: int,
    allowed: int | None,
    failure: OutOfMemory,
    entry: Allocation,
    ledger: DeviceLedger,
) -> OutOfMemoryError:
    """Return the error of a request that failed ``on`` a GPU, which has an index.

    ``free`` is what the device has left, ``allowed`` what the process may have where it limited
    itself, ``entry`` what the request was for.
    """
    gpu, index = on
    message = (
        f"CUDA out of memory. Tried to allocate {format_size(failure.segment)}. GPU {index} has a "
        f"total capacity of {format_size(gpu.memory)} of which {format_size(free)} is free. "
        f"Including non-PyTorch memory, this process has "
        f"{format_size(failure.reserved + gpu.context)} memory in use. "
        + (f"{format_size(allowed)} allowed; " if allowed is not None else "")
        + f"Of the allocated memory {format_size(failure.allocated)} is allocated by PyTorch, and "
        f"{format_size(failure.reserved - failure.allocated)} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    error = OutOfMemoryError()
    error.gpu, error.nbytes, error.origin = gpu, entry.nbytes, entry.origin
    error.what = entry.origin.operator or entry.label or entry.kind.value
    error.live = ledger.live_allocations()
    # One argument, as torch's has: programs that tell it by its text look for that.
    error.args = (f"{message}\n\n{_explanation(error)}",)
    return error


def _explanation(error: OutOfMemoryError) -> str:
    request = f"Trace on fake cuda ({error.gpu.name}): {error.request}."
    rows = [
        (
            format_size(found.nbytes),
            found.kind.value,
            *map(printable, (describe(found), found.origin.operator, found.origin.line)),
        )
        for found in error.live[:_LARGEST]
    ]
    if not rows:
        return request
    table = tabulate(
        rows,
        headers=("live", "kind", "what", "operator", "line"),
        colalign=("right", "left", "left", "left", "left"),
    )
    return f"{request}\n\n{table}"


def format_size(nbytes: int) -> str:
    """Return bytes as torch's own messages do (c10/cuda/CUDACachingAllocator.cpp, format_size)."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if nbytes <= 1024 ** (power + 1):
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes / 1024**3:.2f} GiB"
