"""Clones of a model and its inputs on a real device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.measurement.labels import Label, labels_before
from pytest_torchmem.step.clone import Cloner, compressed_parts
from pytest_torchmem.step.originals import (
    CopiesById,
    calls_of_copies,
    copies_by_id,
    without_gradients,
)
from pytest_torchmem.step.step import Step
from pytest_torchmem.step.trees import tensors_in


@dataclass(frozen=True, slots=True)
class Clones:
    """A target and its arguments, cloned, with their ``step``; ``labels`` are by address of the
    storage.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: Step
    labels: dict[int, Label]
    original: Any = None
    copies: CopiesById = field(default_factory=dict)
    """Of the modules of the target, by the ids of these."""

    def run(self, begins: Callable[[], None] | None = None) -> object:
        """Run the step, and return what outlives it."""
        if not isinstance(self.original, nn.Module):
            return self.step.run(self.target, self.args, self.kwargs, begins)
        with calls_of_copies(self.copies), without_gradients(self.original):
            return self.step.run(self.target, self.args, self.kwargs, begins, self.original)


def clone_to(
    device: torch.device,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    step: Step,
    *,
    moved: bool = False,
) -> Clones:
    """Clone a module and all tensors and modules in its arguments; other callables stay themselves.

    Tensors keep their geometry and gradients. Those that share a storage share its clone, where
    they stay on their device; what is ``moved`` to another has its own elements there and no more,
    as ``Tensor.to`` makes it. What was on ``meta`` is filled with small random numbers, on
    ``device`` itself.
    """
    cloner = _RealCloner(device, moved)
    own_target = cloner.clone(target) if isinstance(target, nn.Module) else target
    own_args = tuple(cloner.clone(value) for value in args)
    own_kwargs = {name: cloner.clone(value) for name, value in kwargs.items()}
    own_step = step.of_copy(cloner.clone_with)
    labels = labels_before(own_target, own_args, own_kwargs)
    copies = copies_by_id(target, cloner.copied) if isinstance(target, nn.Module) else {}
    return Clones(own_target, own_args, own_kwargs, own_step, labels, target, copies)


def clone_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Clone the tensors and modules among a function's arguments, each on its own device.

    What has no tensors stays itself.
    """
    cloner = _RealCloner(None)

    def cloned(value: Any) -> Any:
        tensors = tensors_in(value, of_modules=True)
        return value if next(tensors, None) is None else cloner.clone(value)

    return tuple(map(cloned, args)), {name: cloned(value) for name, value in kwargs.items()}


class _RealCloner(Cloner):
    """Clones with data; without a device what is on ``meta`` stays without."""

    def __init__(self, device: torch.device | None, moved: bool = False) -> None:
        super().__init__(device)
        self._moved = moved
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def clone(self, value: Any) -> Any:
        """Return a deep copy; raises ``UsageError`` where there can be none."""
        try:
            return super().clone(value)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UsageError(
                f"measure() runs on a deep copy, and {type(value).__name__} cannot be copied "
                f"({error}): pass a function that builds the model and runs its step"
            ) from error

    def is_strided(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be cloned with its storage."""
        plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_neg()
        return plain and super().is_strided(tensor)

    def clone_strided(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same elements, and of the same place in a storage if it stays."""
        with torch.no_grad():
            moves = self._moved and not tensor.is_cuda
            clone = self._moved_clone(tensor) if moves else self._whole_clone(tensor)
            return clone.conj() if tensor.is_conj() else clone

    def clone_compressed(self, tensor: Tensor) -> Tensor:
        """Clone indices and values with their storages, which may be larger than they are."""
        indices, plain_indices, values = map(self.clone_tensor, compressed_parts(tensor))
        return torch.sparse_compressed_tensor(
            indices, plain_indices, values, list(tensor.shape), layout=tensor.layout
        )

    def clone_special(self, tensor: Tensor) -> Tensor:
        """Clone a sparse or quantized tensor, or one of another class."""
        sparse = tensor.layout is not torch.strided and type(tensor) is Tensor
        if not sparse and (self.device is None or self.device.type == "cpu"):
            return self.copy_as_torch_does(tensor)
        # Some sparse tensors have no deep copy, and no deep copy reaches another device.
        clone = tensor.detach().to(self.device or tensor.device, copy=True)
        return clone.requires_grad_(tensor.requires_grad)

    def _moved_clone(self, tensor: Tensor) -> Tensor:
        """Return what ``Tensor.to`` makes: its own elements, in their order where it is dense."""
        plain = tensor.detach().conj() if tensor.is_conj() else tensor.detach()
        clone = torch.empty_like(plain, device=self.device)
        if tensor.is_meta:
            _fill(clone)
        else:
            clone.copy_(plain)
        return clone

    def _whole_clone(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same place in a clone of its storage."""
        storage, is_new = self._clone_storage(tensor.untyped_storage())
        clone = torch.empty(0, dtype=tensor.dtype, device=self.device or tensor.device)
        clone.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if is_new and tensor.is_meta and self.device is not None:
            _fill(clone)
        return clone

    def _clone_storage(self, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, bool]:
        known = self._storages.get(storage._cdata)
        if known is not None:
            return known[1], False
        clone = torch.UntypedStorage(storage.nbytes(), device=self.device or storage.device)
        if storage.device.type != "meta" and storage.nbytes():
            clone.copy_(storage)
        # The original is held as well: its address is the key, and must not be used again.
        self._storages[storage._cdata] = (storage, clone)
        return clone, True


def _fill(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.normal_(0.0, 0.02)
    else:
        tensor.zero_()
