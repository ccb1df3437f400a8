"""Profilers of CUDA in a traced program: they run, and see nothing of a GPU that does not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patching.patches import Replacements

NVTX: dict[str, Callable[..., Any]] = {
    "range_push": lambda msg: 0,
    "range_pop": lambda: 0,
    "range_start": lambda msg: 0,
    "range_end": lambda range_id: None,
    "mark": lambda msg: None,
}
"""``torch.cuda.nvtx``."""

CUDA_PROFILER: dict[str, Callable[..., Any]] = {"start": lambda: None, "stop": lambda: None}
"""``torch.cuda.profiler``."""


def profilers(trace: TraceContext) -> Replacements:
    """Let ``torch.profiler`` look at the host alone, and ``emit_nvtx`` do nothing."""
    original: Any = profiler.profile.__init__
    enter: Any = profiler.emit_nvtx.__enter__
    leave: Any = profiler.emit_nvtx.__exit__

    def init(self: Any, enabled: bool = True, **options: Any) -> None:
        if not trace.off() and (options.get("use_cuda") or options.get("use_device") == "cuda"):
            options.pop("use_cuda", None)  # torch 2.15 has it no more
            options |= {"use_device": None, "use_cpu": True}
        original(self, enabled, **options)

    nvtx = {
        "__enter__": lambda self: enter(self) if trace.off() else self,
        "__exit__": lambda self, *exception: leave(self, *exception) if trace.off() else None,
    }
    return [
        (profiler.profile, {"__init__": init}),
        (profiler.emit_nvtx, nvtx),
    ]
