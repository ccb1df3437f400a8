"""What C++ calls on shards of a ``DTensor``, which torch before 2.13 lets pass by interceptions.

There the key ``FAKE`` comes before the key ``Python``, which excludes it (c10/core/DispatchKey.h).
For a ``DTensor`` that key calls no ``__torch_dispatch__``, in which it could be let in again, but
operators on the shards (torch/csrc/autograd/python_variable.cpp, ``dispatchDTensorOp``). It reads
the attribute with the shard right before it calls one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pytest_torchmem.torch_private.dispatch.keys import FAKE, set_excluded
from pytest_torchmem.torch_private.names import private_if_imported, private_name_if_imported

_dtensor = private_if_imported("torch.distributed.tensor.DTensor")
_SHARD = private_name_if_imported("torch.distributed.tensor.DTensor._local_tensor")
_thread = threading.local()


class _Shard(property):
    """The attribute that C++ reads, and the one that is there without a trace."""

    def __init__(self, before: Any) -> None:
        super().__init__(self._read, before.__set__, before.__delete__)
        self.before = before

    def _read(self, tensor: Tensor) -> Any:
        if getattr(_thread, "is_in_cpp", False):
            set_excluded(FAKE, False)
        return self.before.__get__(tensor)


def is_dispatched_in_cpp(kind: type[Tensor]) -> bool:
    """Return whether C++ runs the operators of a subclass, and no ``__torch_dispatch__``."""
    dtensor = _dtensor()
    if dtensor is None or not issubclass(kind, dtensor):
        return False
    method: Any = kind.__torch_dispatch__
    return method.__func__ is dtensor.__torch_dispatch__.__func__


@contextmanager
def shards_intercepted() -> Iterator[None]:
    """Let operators be intercepted that C++ calls on this thread, once it has read a shard."""
    before = getattr(_dtensor(), _SHARD)
    if not isinstance(before, _Shard):
        setattr(_dtensor(), _SHARD, _Shard(before))
    nested = getattr(_thread, "is_in_cpp", False)
    _thread.is_in_cpp = True
    try:
        yield
    finally:
        _thread.is_in_cpp = nested


def give_shards_back() -> None:
    """Have the attribute of torch there again, as a trace ends."""
    now = getattr(_dtensor(), _SHARD, None)
    if isinstance(now, _Shard):
        setattr(_dtensor(), _SHARD, now.before)
