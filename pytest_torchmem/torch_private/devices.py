"""Whether a GPU is there, functions of ``torch._C`` that builds without CUDA lack, and what torch's
profiler and its caching allocator record of a step on a real device.

Other packages ask for the raw CUDA stream as they are imported or launch kernels, and
``torch.cuda.graph`` empties the cache of pinned memory (torch/csrc/cuda/Module.cpp). A test may
have put something in the place of torch's functions: ``has_gpu`` asks the driver too.
"""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pytest_torchmem.torch_private.names import optional, private, private_attribute
from pytest_torchmem.torch_private.patches import Additions, having, replaced_all, unless

#: Asks the driver; builds without CUDA have none.
_count: Callable[[], int] = optional("torch._C._cuda_getDeviceCount") or (lambda: 0)


def has_gpu() -> bool:
    """Return whether ``is_available()`` and the driver say so: a test may mock the first."""
    return torch.cuda.is_available() and _count() > 0


def raw_stream_known(off: Callable[[], bool]) -> AbstractContextManager[None]:
    """Let torch give the default stream, unless ``off()``."""
    return bindings_known({"_cuda_getCurrentRawStream": lambda device: 0}, off)


def bindings_known(
    functions: Mapping[str, Callable[..., Any]], off: Callable[[], bool]
) -> AbstractContextManager[None]:
    """Let ``torch._C`` have functions by these names, unless ``off()``."""
    own = vars(torch._C)
    either = {n: unless(off, one, own[n]) if n in own else one for n, one in functions.items()}
    return replaced_all([(torch._C, Additions(either))])


def host_cache_known() -> AbstractContextManager[None]:
    """Let a build without CUDA have a cache of pinned memory, which is empty."""
    known = {} if hasattr(torch._C, name := "_host_emptyCache") else {name: lambda: None}
    return replaced_all([(torch._C, Additions(known))])


#: A context that marks a range of the recording.
mark: Callable[[str], Any] = private("torch._C._profiler._RecordFunctionFast")
EventType: Any = private("torch._C._profiler._EventType")
record_memory_history: Callable[..., None] = private("torch.cuda.memory._record_memory_history")
memory_snapshot: Callable[[], dict[str, Any]] = private("torch.cuda.memory._snapshot")
#: Gives back the workspaces of cuBLAS; builds without CUDA have none.
clear_cublas_workspaces: Callable[[], None] = optional("torch._C._cuda_clearCublasWorkspaces") or (
    lambda: None
)
_profiler_runs = private_attribute("torch.autograd.profiler._is_profiler_enabled")
_COUNTS_ALL_THREADS = "FLAGS_caffe2_report_cpu_memory_usage"


def profiler_runs() -> bool:
    """Return whether torch's profiler runs on any thread: a second one would end it."""
    return bool(_profiler_runs(torch.autograd.profiler))


def all_threads_counted() -> AbstractContextManager[None]:
    """Have the totals beside the CPU allocator's events count all threads, and not those alone that
    are recorded (c10/core/CPUAllocator.cpp, ``ProfiledCPUMemoryReporter``).

    Without this, totals are the sums of the events. Where torch's library has no such flag, they
    stay so.
    """
    flag = _flag(_COUNTS_ALL_THREADS)
    return nullcontext() if flag is None or flag.value else having(flag, value=True)


@cache
def _flag(name: str) -> Any:
    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        with suppress(OSError, ValueError):  # another kind of file, or it is not exported
            return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), name)
    return None
