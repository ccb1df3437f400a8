"""A GPU for machines without one: tensors are the CPU's, an allocator like CUDA's counts them."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_torchmem.targets.gpus import Gpu, find_gpu
from pytest_torchmem.torch_private.keys import FAKE

_BLOCK, _SEGMENT = 512, 2 * 1024**2
_OF_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.copy_.default)
"""What copying a storage runs; a copy is counted when it becomes a tensor."""
_COUNTERS = ("allocation", "requested_bytes", "allocated_bytes", "reserved_bytes")


class StandIn:
    """Counts every storage that an operator makes, from its request until its last reference dies.

    As the caching allocator does: blocks of 512 bytes, segments that stay until the cache is
    emptied, statistics with current, peak, allocated and freed, a history of requests.
    """

    out_of_memory: type[BaseException] = torch.OutOfMemoryError
    is_stand_in = False

    def __init__(self, gpu: Gpu | str = "a100-80gb", why_not: str = "") -> None:
        self.torch_device = torch.device("cpu")
        self.calls: list[str] = []
        self.others = 0
        """Bytes of other processes."""
        self.workspaces: dict[str, int | Callable[..., int]] = {}
        """What kernels take and give back, by operator: bytes, or a function of its arguments."""
        self.buffers: dict[str, int] = {}
        """What libraries take at an operator's first call and keep until the cache is emptied."""
        self.reserves: dict[str, tuple[int, int]] = {}
        """An output whose size a library decides, by operator: its position and its bytes."""
        self._kept: dict[str, torch.UntypedStorage] = {}
        self._gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
        self._why_not = why_not
        self._figures = {
            f"{name}.all.{part}": 0
            for name in _COUNTERS
            for part in ("current", "peak", "allocated", "freed")
        }
        self._history: list[dict[str, Any]] | None = None
        self._state = torch.zeros(16, dtype=torch.uint8)
        self._known: dict[int, Any] = {}
        self._foreign: dict[int, Any] = {}
        """What is on the CPU in earnest: an operator was given it, and none had made it."""

    def take_untold(self) -> tuple[str, ...]:
        return ()

    def why_not(self) -> str:
        self.calls.append("why_not")
        return self._why_not

    def gpu(self) -> Gpu:
        self.calls.append("gpu")
        return self._gpu

    def cudnn(self) -> str:
        return "9.19.0"

    @contextmanager
    def taken(self) -> Iterator[None]:
        yield

    @contextmanager
    def current(self) -> Iterator[None]:
        with _Counting(self), _counting_below_interception(self):
            yield

    def memory(self) -> tuple[int, int]:
        held = self._figures["reserved_bytes.all.current"]
        return max(self._gpu.memory - held - self.others, 0), self._gpu.memory

    def statistics(self) -> Mapping[str, int]:
        return dict(self._figures)

    def reset_peaks(self) -> None:
        for name in _COUNTERS:
            self._figures[f"{name}.all.peak"] = self._figures[f"{name}.all.current"]

    def synchronise(self) -> None:
        self.calls.append("synchronise")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self._kept.clear()
        needed = -(-self._figures["allocated_bytes.all.current"] // _SEGMENT) * _SEGMENT
        self._add("reserved_bytes", needed - self._figures["reserved_bytes.all.current"])

    def generator_state(self) -> torch.Tensor:
        return self._state

    def set_generator_state(self, state: torch.Tensor) -> None:
        self.calls.append("set_generator_state")

    def start_history(self) -> None:
        self._history = []

    def stop_history(self) -> Sequence[Mapping[str, Any]]:
        found, self._history = self._history or [], None
        return found

    def run(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operator, with what its kernel takes besides its outputs."""
        if name in self.buffers and name not in self._kept:
            self._kept[name] = self._taken(self.buffers[name])
        taken = self.workspaces.get(name, 0)
        temporary = self._taken(taken(*args, **kwargs) if callable(taken) else taken)
        outputs = function(*args, **kwargs)
        if name in self.reserves:
            position, nbytes = self.reserves[name]
            reserve = torch.empty(nbytes, dtype=torch.uint8)
            outputs = (*outputs[:position], reserve, *outputs[position + 1 :])
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(tensor, torch.Tensor):
                self.request(tensor.untyped_storage())
        del temporary
        return outputs

    def _taken(self, nbytes: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(nbytes)
        self.request(storage)
        return storage

    def request(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is known."""
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._foreign or not nbytes:
            return
        block = -(-nbytes // _BLOCK) * _BLOCK
        needed = self._figures["allocated_bytes.all.current"] + block
        needed = -(-needed // _SEGMENT) * _SEGMENT
        if needed + self.others > self._gpu.memory:
            raise self.out_of_memory(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU 0 is full"
            )
        self._add("allocation", 1)
        self._add("requested_bytes", nbytes)
        self._add("allocated_bytes", block)
        self._add("reserved_bytes", max(needed - self._figures["reserved_bytes.all.current"], 0))
        self._write_down("alloc", storage.data_ptr(), nbytes)
        address = storage.data_ptr()
        self._known[key] = weakref.finalize(storage, self._release, key, address, nbytes, block)

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Take a storage for the CPU's own, unless it is known."""
        key = storage._cdata
        if key not in self._known and key not in self._foreign:
            self._foreign[key] = weakref.finalize(storage, self._foreign.pop, key)

    def _release(self, key: int, address: int, nbytes: int, block: int) -> None:
        del self._known[key]
        self._add("allocation", -1)
        self._add("requested_bytes", -nbytes)
        self._add("allocated_bytes", -block)
        self._write_down("free_requested", address, nbytes)
        self._write_down("free_completed", address, nbytes)

    def _write_down(self, action: str, address: int, nbytes: int) -> None:
        if self._history is not None:
            self._history.append({"action": action, "addr": address, "size": nbytes})

    def _add(self, name: str, amount: int) -> None:
        figures, stem = self._figures, f"{name}.all"
        figures[f"{stem}.current"] += amount
        figures[f"{stem}.peak"] = max(figures[f"{stem}.peak"], figures[f"{stem}.current"])
        figures[f"{stem}.{'allocated' if amount > 0 else 'freed'}"] += abs(amount)


def _is_intercepted() -> bool:
    """Return whether operators of this thread go to the fallback of the Fake key."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(FAKE)
    return included and not torch._C._dispatch_tls_is_dispatch_key_excluded(FAKE)


def _is_in_interceptor() -> bool:
    """Return whether the fallback of the Fake key is running.

    Before torch 2.13 a dispatch mode runs with that key excluded too.
    """
    included = torch._C._dispatch_tls_is_dispatch_key_included(FAKE)
    return bool(included and torch._C._dispatch_tls_is_dispatch_key_excluded(FAKE))


@contextmanager
def _counting_below_interception(device: StandIn) -> Iterator[None]:
    """Count what an interceptor runs: a dispatch mode is asked before it, and then no more."""
    original = OpOverload.__call__

    def call(function: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        if _is_in_interceptor() and function not in _OF_STORAGES:
            return device.run(functools.partial(original, function), function.name(), args, kwargs)
        return original(function, *args, **kwargs)

    OpOverload.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverload.__call__ = original  # type: ignore[method-assign]


class _Counting(TorchDispatchMode):
    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        if function in _OF_STORAGES:
            return function(*args, **(kwargs or {}))
        if _is_intercepted():  # whoever intercepts runs the operator
            return function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._device.leave_out(tensor.untyped_storage())
        return self._device.run(function, function.name(), args, kwargs or {})
