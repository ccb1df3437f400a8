"""How tensors lie that a program brings with it: as before, for the next trace as for its caller.

An operator in place that changes no more than that (``resize_``, ``t_``, ``unsqueeze_``) runs on
the program's own tensor, which is real.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from pytest_torchmem.torch_private.tensors.storages import storage_address

_PLAIN = (Tensor, nn.Parameter)


class _Noted(NamedTuple):
    """A tensor, which is not held, and how it lay on which storage."""

    tensor: ReferenceType[Tensor]
    storage: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Geometries:
    """Those of tensors, to be what they were."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def note(self, tensor: Tensor) -> None:
        """Take note of how a strided tensor lies; of others nothing changes so."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return
        try:
            address, nbytes = storage_address(tensor), tensor.untyped_storage().nbytes()
            geometry = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        except (RuntimeError, NotImplementedError):  # it has no storage, or is a lazy parameter
            return
        self._noted.append(_Noted(ref(tensor), address, nbytes, *geometry))

    def restore(self) -> None:
        """Let each tensor that is still on its storage lie as it did."""
        for noted in self._noted:
            tensor = noted.tensor()
            if tensor is None or storage_address(tensor) != noted.storage:
                continue
            storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
            if storage.nbytes() != noted.nbytes and storage.resizable():
                storage.resize_(noted.nbytes)
            now = tensor.shape, tensor.stride(), offset
            if now != (noted.shape, noted.stride, noted.offset):
                with torch.no_grad():
                    tensor.set_(storage, noted.offset, noted.shape, noted.stride)
