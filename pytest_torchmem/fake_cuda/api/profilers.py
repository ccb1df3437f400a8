"""Profilers of CUDA in a traced program: they run, and see nothing of a GPU that does not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.autograd import profiler

from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced_all

_SUCCESS = 0


@contextmanager
def profilers_of_nothing(trace: TraceContext) -> Iterator[None]:
    """Let ``torch.profiler`` look at the host alone, and ``emit_nvtx`` do nothing."""
    original: Any = profiler.profile.__init__
    enter: Any = profiler.emit_nvtx.__enter__
    leave: Any = profiler.emit_nvtx.__exit__

    def init(self: Any, enabled: bool = True, **options: Any) -> None:
        if not trace.off() and (options.get("use_cuda") or options.get("use_device") == "cuda"):
            options |= {"use_cuda": False, "use_device": None, "use_cpu": True}
        original(self, enabled, **options)

    def enter_nvtx(self: Any) -> Any:
        return enter(self) if trace.off() else self

    def leave_nvtx(self: Any, *exception: Any) -> Any:
        return leave(self, *exception) if trace.off() else None

    with replaced_all(
        [
            (profiler.profile, {"__init__": init}),
            (profiler.emit_nvtx, {"__enter__": enter_nvtx, "__exit__": leave_nvtx}),
        ]
    ):
        yield


def runtime_answers(memory: DeviceMemory) -> dict[str, Callable[..., Any]]:
    """Return what ``torch.cuda.cudart()`` gives, and how its results are looked at."""

    def mem_get_info(device: Any = 0) -> tuple[int, int]:
        memory.follow()
        return memory.free, memory.gpu.memory

    runtime = SimpleNamespace(
        cudaError=SimpleNamespace(success=_SUCCESS),
        cudaGetErrorString=lambda error: "no error",
        cudaHostRegister=lambda address, size, flags: _SUCCESS,
        cudaHostUnregister=lambda address: _SUCCESS,
        cudaMemGetInfo=mem_get_info,
        cudaProfilerStart=lambda: _SUCCESS,
        cudaProfilerStop=lambda: _SUCCESS,
    )
    return {"cudart": lambda: runtime, "check_error": lambda res: None}
