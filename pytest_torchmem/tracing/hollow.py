"""Hollow tensors in the place of those that a module's step begins with."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.interception.conversion import Conversion
from pytest_torchmem.interception.plan import Output
from pytest_torchmem.journal.in_place import Given
from pytest_torchmem.operators.sparse import COMPRESSED, compressed_indices, compressed_like
from pytest_torchmem.torch_private.tensors import has_dispatch, storage_address


class HollowTensors:
    """Makes tensors without memory, booked on a device with the names that they go by."""

    def __init__(self, conversion: Conversion, device: torch.device, root: nn.Module) -> None:
        self._conversion = conversion
        self._on = device
        self._root = type(root).__name__
        self._whole = device.type == "cpu"
        """Whether a tensor takes its whole storage along; what is moved has its own elements."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Those in the place of real ones, by the addresses of these."""

    def __call__(self, tensor: Tensor, given: Given) -> Tensor | None:
        """Return the hollow storage of a tensor, None for one of the program's own that is met in
        the step.
        """
        if not (given.moves or self._whole):
            return None
        if is_lazy(tensor):
            kind: Any = type(tensor)
            return kind(False, device=self._on, dtype=tensor.dtype)  # type: ignore[no-any-return]
        if tensor.layout in COMPRESSED:
            plain = tensor.detach()
            parts = (*compressed_indices(plain), plain.values())
            return compressed_like(tensor, *(self._hollow(part, given) for part in parts))
        if tensor.layout is not torch.strided or tensor.is_quantized or has_dispatch(tensor):
            return None
        try:
            return self._hollow(tensor.detach(), given)
        except (RuntimeError, NotImplementedError):
            if tensor.is_nested:
                return None
            raise

    def _hollow(self, tensor: Tensor, given: Given) -> Tensor:
        """Return a hollow tensor; those that share a storage share one."""
        address = storage_address(tensor)
        shared = self._storages.get(address) if self._whole else None
        if shared is not None:
            return Output.of(tensor).on(shared)
        owner = ""
        if given.path is not None:
            owner = f"{self._root}.{given.path}" if given.path else self._root
        made = self._conversion.enter_tensor(
            tensor, self._on, given.kind, given.name, owner, self._whole
        )
        self._storages[address] = made.untyped_storage()
        return made
