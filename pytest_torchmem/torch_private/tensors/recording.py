"""What torch's profiler and its caching allocator record of a step on a real device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.torch_private.names import private

#: A context that marks a range of the recording.
mark: Callable[[str], Any] = private("torch._C._profiler._RecordFunctionFast")
EventType: Any = private("torch._C._profiler._EventType")
record_memory_history: Callable[..., None] = private("torch.cuda.memory._record_memory_history")
memory_snapshot: Callable[[], dict[str, Any]] = private("torch.cuda.memory._snapshot")
#: Gives back the workspaces of cuBLAS; builds without CUDA have none.
clear_cublas_workspaces: Callable[[], None] = (
    private("torch._C._cuda_clearCublasWorkspaces")
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces")  # is_built() may be that of a fake GPU
    else lambda: None
)
