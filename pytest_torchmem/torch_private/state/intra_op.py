"""The threads on which a kernel of the CPU runs, for the calling thread alone.

``torch.set_num_threads`` is for the process: a thread that runs its first kernel meanwhile keeps
what it finds (ATen/ParallelOpenMP.cpp, ``set_num_threads``, ``init_num_threads``). The number that
OpenMP itself has is each thread's own (``nthreads-var`` of the OpenMP specification), and the one
that ``at::get_num_threads`` returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
"""What depends on OpenMP's library, in which its functions are found too. On Windows they are not:
there kernels run on as many threads as ever."""


class OneThread:
    """A context that runs the kernels that the calling thread asks for on that thread alone.

    For a few thousand elements others do not help, and where they have no core of their own the
    kernel waits for them a thousand times as long as it takes (``at::tril`` starts them for any
    size).
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        before = torch.get_num_threads()  # which sets it on a thread that is new
        set_to = _setter() if before != 1 else None
        self._before = before if set_to is not None else 1
        if set_to is not None:
            set_to(1)

    def __exit__(self, *_: object) -> None:
        set_to = _setter() if self._before != 1 else None
        if set_to is not None:
            set_to(self._before)


@cache
def _setter() -> Callable[[int], None] | None:
    folder = Path(torch.__file__).parent / "lib"
    for name in _LIBRARIES:
        if not (folder / name).exists():
            continue
        try:
            set_to = ctypes.CDLL(str(folder / name)).omp_set_num_threads
        except (OSError, AttributeError):  # torch was built without OpenMP
            return None
        set_to.argtypes, set_to.restype = (ctypes.c_int,), None
        return set_to
    return None
