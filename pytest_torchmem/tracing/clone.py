"""Hollow clones of real modules and inputs."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.interception.fingerprint import owner_of
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.plan import Output
from pytest_torchmem.operators.sparse.parts import compressed_like
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.clone import Cloner, compressed_parts
from pytest_torchmem.step.modules import modules_by_path, tensors_in_tables
from pytest_torchmem.step.object_copies import NOT_CAUGHT, NOT_COPIED
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private.tensors.storages import storage_address
from pytest_torchmem.torch_private.tensors.tensors import BUFFERS, PARAMETERS

_UNKNOWN = (Kind.OTHER, "", "")


class HollowCloner(Cloner):
    """Clones without memory, booked on a device with the names that their tensors go by."""

    def __init__(self, interceptor: Interceptor, device: torch.device) -> None:
        super().__init__(device)
        self._interceptor = interceptor
        self._on = device
        self.whole = device.type == "cpu"
        """Whether a tensor takes its whole storage along; what is moved has its own elements."""
        self._storages: dict[int, Tensor] = {}
        """The first clone on each storage, by the addresses of the originals' storages."""
        self.names: dict[int, str] = {}
        """The first name of each such storage, by the same addresses."""
        self._labels: dict[int, tuple[Kind, str, str]] = {}
        """Kind, label and owning module's path of tensors, by their ids."""

    def clone_module(self, module: nn.Module) -> nn.Module:
        """Return the clone of a module, with its hooks, parametrizations and shared storages."""
        own = self._label(module, "")
        values = self._interceptor.parts.values
        dense = (one for one in own if one.layout is torch.strided and not is_lazy(one))
        values.expect(sum(one.numel() * one.element_size() for one in dense))
        clone = self.clone(module)
        assert isinstance(clone, nn.Module)
        return clone

    def clone_with(self, function: Any) -> Any:
        """Return what goes with the clones; the tensors of a loss are named after it."""
        if isinstance(function, nn.Module):
            self._label(function, "loss_fn.")
        return super().clone_with(function)

    def _label(self, module: nn.Module, prefix: str) -> list[Tensor]:
        """Note the names of a module's tensors, and return them."""
        own: list[Tensor] = []
        modules = modules_by_path(module)
        for kind, table in ((Kind.PARAMETER, PARAMETERS), (Kind.BUFFER, BUFFERS)):
            for path, name, tensor in tensors_in_tables(modules, table):
                whole = f"{path}.{name}" if path else name
                if not (prefix and id(tensor) in self._labels):  # it may hold the model itself
                    owner = "" if prefix else owner_of(module, whole)
                    self._labels[id(tensor)] = kind, prefix + whole, owner
                own.append(tensor)
        return own

    def clone_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the clones of a step's arguments."""
        for position, tensor in enumerate(tensors_in(args)):
            self._labels.setdefault(id(tensor), (Kind.INPUT, f"input {position}", ""))
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                self._labels.setdefault(id(tensor), (Kind.INPUT, name, ""))
        return self.clone(args), self.clone(kwargs)

    def clone_tensor(self, tensor: Tensor) -> Tensor:
        """Return the clone of a tensor; one that has none is met as what a program brings along."""
        try:
            return super().clone_tensor(tensor)
        except NOT_COPIED as error:
            if isinstance(error, NOT_CAUGHT):
                raise
            return cast(Tensor, self.remember(tensor, tensor))

    def clone_strided(self, tensor: Tensor) -> Tensor:
        """Return a hollow tensor; those that share a storage have clones that share one."""
        other = (Kind.PARAMETER, "", "") if isinstance(tensor, nn.Parameter) else _UNKNOWN
        kind, label, owner = self._labels.get(id(tensor), other)
        address = storage_address(tensor)
        self.names.setdefault(address, label)
        shared = self._storages.get(address) if self.whole else None
        with self._interceptor.working():
            if shared is not None:
                return Output.of(tensor).on(shared.untyped_storage())
            clone = self._interceptor.parts.conversion.enter_tensor(
                tensor.detach(), self._on, kind, label, owner, self.whole
            )
        self._storages[address] = clone
        return clone

    def copy_scripted(self, module: Any) -> Any:
        """Return the deep copy of a scripted module, whose real tensors are not met."""
        with self._interceptor.working():
            return super().copy_scripted(module)

    def clone_compressed(self, tensor: Tensor) -> Tensor:
        """Return a tensor of hollow indices and values, which go by its name."""
        parts = compressed_parts(tensor)
        if id(tensor) in self._labels:
            self._labels |= dict.fromkeys(map(id, parts), self._labels[id(tensor)])
        clones = [self.clone_tensor(part) for part in parts]
        with self._interceptor.working():
            return compressed_like(tensor, *clones)

    def clone_special(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, which is met like any that a program brings with it."""
        return tensor
