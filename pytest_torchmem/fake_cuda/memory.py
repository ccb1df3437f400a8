"""The fake device's memory as the caching allocator counts it: the ledger's requests, replayed; the
error where one does not fit, in torch's words and with what took the memory; its properties.

The replay catches up with the ledger when a figure is read. With a limit it also does before a
request that might not fit: one that is larger than what the device had left, less the most that the
requests since then can have taken.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from pytest_torchmem.allocator import caching
from pytest_torchmem.allocator.device_memory import AllocatorOptions, Block, PoolId
from pytest_torchmem.cudnn.driver import device_properties
from pytest_torchmem.interception.ledger import DeviceLedger
from pytest_torchmem.profile.profile import PEAK_FIELDS
from pytest_torchmem.profile.timeline import Allocation, Origin, Phase, without_collections
from pytest_torchmem.targets.gpus import Gpu


class DeviceMemory:
    """One fake GPU's memory in the course of a trace."""

    def __init__(
        self, ledger: DeviceLedger, gpu: Gpu, options: AllocatorOptions, limited: bool
    ) -> None:
        self.gpu = gpu
        self.allocator = caching.CachingAllocator(
            options, gpu.memory - gpu.context if limited else None, gpu.memory
        )
        self._ledger = ledger
        self._blocks: dict[int, Block] = {}
        """Blocks in use by their index in the ledger."""
        self._asked: set[int] = set()
        """Requests that the allocator served before the ledger booked them."""
        self._earlier = self._position = self._phase = 0
        self._peaks: dict[Phase, caching.RunningPeaks] = {}
        self._room = 0
        self._end: tuple[int, int] | None = None
        self._settle()

    @property
    def free(self) -> int:
        """What the device has left: neither reserved nor taken by CUDA itself; never below 0."""
        return max(0, self.gpu.memory - self.gpu.context - self.allocator.reserved)

    def free_and_total(self) -> tuple[int, int]:
        """Return what ``torch.cuda.mem_get_info`` does."""
        self.follow()
        return self.free, self.gpu.memory

    def follow(self) -> caching.CachingAllocator:
        """Catch up with the ledger; return the allocator as it then is."""
        ledger = self._ledger
        earlier, last = self._end or (len(ledger.earlier), len(ledger.events))
        for index in ledger.earlier[self._earlier : earlier]:
            self._make(index)
        self._earlier, phases = earlier, ledger.phases
        peaks = self._enter(phases[self._phase][1])
        while True:
            following = self._phase + 1
            stop = phases[following][0] if following < len(phases) else last
            self._replay(stop, peaks)
            if following >= len(phases):
                return self.allocator
            self._phase = following
            peaks = self._enter(phases[following][1])

    def cut(self) -> None:
        """Catch up with the ledger, let it forget what has been freed, and go on from there."""
        self.follow()
        self._ledger.cut()
        self._earlier, self._position, self._phase = 0, len(self._ledger.events), 0

    def close(self) -> None:
        """Stop following: what the ledger books from now on is no part of the trace."""
        self._end = len(self._ledger.earlier), len(self._ledger.events)
        self._ledger.before_adding = None

    def peaks(self) -> Mapping[str, caching.Peaks]:
        """Return the peaks by name (``"forward_peak"``, …, ``"peak"``)."""
        with without_collections():
            self.follow()
        found = {phase: peaks.found() for phase, peaks in self._peaks.items()}
        result = {name: found[phase] for name, phase in PEAK_FIELDS.items() if phase in found}
        result["peak"] = max(found.values(), key=lambda of: of.reserved)._replace(
            requested=max(of.requested for of in found.values()),
            allocated=max(of.allocated for of in found.values()),
        )
        return MappingProxyType(result)

    def forget_peaks(self) -> None:
        self.follow()
        self._peaks.clear()

    def empty_cache(self, pool: PoolId | None = None) -> None:
        self.follow().empty_cache(pool)
        self._settle()

    def release_workspaces(self, stream: int) -> None:
        """Free the buffers that libraries keep for a stream."""
        kept = self._ledger.kept
        for key in [key for key in kept if key[2] == stream]:
            self._ledger.remove(kept.pop(key))

    def serve(
        self, pool: PoolId, streams: Callable[[int], bool], *, graph: bool
    ) -> Callable[[], None]:
        """Let a private pool serve requests on streams, for a ``graph``. Returns what ends that."""
        private, route = self.follow().private, (pool, streams)
        private.retain(pool)
        private.capturing += graph
        self._ledger.routes.append(route)

        def end() -> None:
            self.follow()
            private.capturing -= graph
            self._ledger.routes.remove(route)

        return end

    def record_stream(self, index: int, stream: int) -> None:
        """Let the block of entry ``index`` wait, once freed, for another stream's work."""
        self.follow()
        block = self._blocks.get(index)
        if block is not None:
            self.allocator.record_stream(block, stream)

    def set_options(self, options: AllocatorOptions) -> None:
        self.follow().options = options
        self._settle()

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the process to a part of the device's memory from now on."""
        self.follow().set_memory_fraction(fraction)
        self._settle()

    def statistics(self) -> dict[str, Any]:
        return self.follow().statistics.as_dict(self.allocator.options.max_split_size)

    def _replay(self, stop: int, peaks: caching.RunningPeaks) -> None:
        blocks, free = self._blocks, self.allocator.free
        for event in self._ledger.events[self._position : stop]:
            if event > 0:
                self._make(event)
                peaks.note(self.allocator)
            else:
                block = blocks.pop(-event, None)
                if block is not None:
                    free(block)
        self._position = max(self._position, stop)

    def _make(self, index: int) -> None:
        if index in self._asked:
            self._asked.discard(index)
            return
        ledger = self._ledger
        nbytes, stream = ledger.entries[index - 1].nbytes, ledger.streams.get(index, 0)
        block = self.allocator.allocate(nbytes, stream, ledger.private.get(index))
        if block is not None:
            self._blocks[index] = block

    def _enter(self, phase: Phase) -> caching.RunningPeaks:
        peaks = self._peaks.setdefault(phase, caching.RunningPeaks())
        peaks.note(self.allocator)
        return peaks

    def _settle(self) -> None:
        """Compute anew what is left, and check requests in advance where memory is limited."""
        allocator = self.allocator
        limits = [limit for limit in (allocator.capacity, allocator.allowed) if limit is not None]
        self._room = min(limits, default=0) - allocator.reserved
        self._ledger.before_adding = self._before_adding if limits else None

    def _before_adding(self, entry: Allocation, stream: int) -> None:
        """Serve a request that might not fit at once; raise ``torch.OutOfMemoryError``."""
        nbytes = entry.nbytes
        if nbytes <= caching.SMALL:
            self._room -= caching.SMALL_SEGMENT
        else:
            # Rounding up to a power of two can double it, and a page more may be mapped.
            self._room -= 2 * nbytes + 2 * self.allocator.options.large_segment_size
        if self._room >= 0 or not nbytes:
            return
        self.follow()
        try:
            pool = self._ledger.private_pool(stream)
            block = self.allocator.allocate(nbytes, stream, pool)
        except caching.OutOfMemory as failure:
            raise self._out_of_memory(failure, entry) from None
        finally:
            self._settle()
        assert block is not None
        index = self._ledger.booked + 1
        self._blocks[index] = block
        self._asked.add(index)

    def _out_of_memory(self, failure: caching.OutOfMemory, entry: Allocation) -> Exception:
        gpu, allowed = self.gpu, self.allocator.allowed
        message = (
            f"CUDA out of memory. Tried to allocate {format_size(failure.segment)}. GPU "
            f"{self._ledger.device.index} has a total capacity of {format_size(gpu.memory)} of "
            f"which {format_size(self.free)} is free. "
            f"Including non-PyTorch memory, this process has "
            f"{format_size(failure.reserved + gpu.context)} memory in use. "
            + (f"{format_size(allowed)} allowed; " if allowed is not None else "")
            + f"Of the allocated memory {format_size(failure.allocated)} is allocated by PyTorch, "
            f"and {format_size(failure.reserved - failure.allocated)} is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
            "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )
        error = OutOfMemoryError()
        error.gpu, error.nbytes, error.origin = gpu, entry.nbytes, entry.origin
        error.what = entry.origin.operator or entry.label or entry.kind.value
        error.live = self._ledger.live_allocations()
        # Few traces come here, and no other waits for what prints tables.
        from pytest_torchmem.profile.tables import alike, allocations_table

        live = alike(error.live)[:_LARGEST]
        table = f"\n\n{allocations_table(live, 'alive')}" if live else ""
        # One argument, as torch's has: programs that tell it by its text look for that.
        error.args = (f"{message}\n\nTrace on fake cuda ({gpu.name}): {error.request}.{table}",)
        return error


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


def format_size(nbytes: int) -> str:
    """Return bytes as torch's own messages do (c10/cuda/CUDACachingAllocator.cpp, format_size)."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if nbytes <= 1024 ** (power + 1):
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes / 1024**3:.2f} GiB"


class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` returns."""

    def __init__(self, gpu: Gpu) -> None:
        known = device_properties(gpu.capability, gpu.multiprocessors)
        self.name = gpu.product
        self.major, self.minor = gpu.capability
        self.total_memory = gpu.memory
        self.multi_processor_count = gpu.multiprocessors
        self.max_threads_per_multi_processor = gpu.threads_per_multiprocessor
        self.warp_size = known["warpSize"]
        self.regs_per_multiprocessor = known["maxRegistersPerSM"]
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName = gpu.product
        self.max_threads_per_block = known["maxThreadsPerBlock"]
        self.shared_memory_per_block = known["maxSharedMemoryPerBlock"]
        self.shared_memory_per_block_optin = known["maxSharedMemoryPerBlockOptin"]
        reserved = known["reservedSharedMemoryPerBlock"]
        self.shared_memory_per_multiprocessor = self.shared_memory_per_block_optin + reserved

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 1024**2}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )
