"""Hollow twins of real modules and inputs: the user's own are never changed, moved or run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pytest_torchmem.interception.fingerprint import owner_of
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.layouts.compressed import LAYOUTS
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private.storages import storage_address, tensor_on
from pytest_torchmem.torch_private.tensors import CHILDREN


class Twins:
    """Makes hollow twins of everything that holds tensors, each tensor and storage once."""

    def __init__(self, interceptor: Interceptor, device: torch.device) -> None:
        self._interceptor = interceptor
        self._device = device
        self._whole = device.type == "cpu"
        self._tensors: dict[int, Tensor] = {}
        self._storages: dict[int, Tensor] = {}
        self._labels: dict[int, tuple[Kind, str, str]] = {}
        """Kind, label and owning module's path of tensors, by their ids."""
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []

    def of_module(self, module: nn.Module) -> nn.Module:
        """Return the twin of a module, with its hooks, parametrizations and shared storages."""
        for name, parameter in module.named_parameters():
            self._labels[id(parameter)] = (Kind.PARAMETER, name, owner_of(module, name))
        for name, buffer in module.named_buffers():
            self._labels[id(buffer)] = (Kind.BUFFER, name, owner_of(module, name))
        twin = self._copy(module)
        assert isinstance(twin, nn.Module)
        return twin

    def of_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the twins of a step's arguments."""
        for position, tensor in enumerate(tensors_in(args)):
            self._labels.setdefault(id(tensor), (Kind.INPUT, f"input {position}", ""))
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                self._labels.setdefault(id(tensor), (Kind.INPUT, name, ""))
        return self._copy(args), self._copy(kwargs)

    def _copy(self, value: Any) -> Any:
        """Deep-copy ``value`` with hollow twins in the place of its tensors."""
        with self._tensors_copied_hollow():
            try:
                return copy.deepcopy(value, self._memo)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, copy.Error, NotImplementedError, RuntimeError):
                # Something in it cannot be copied (a lock, a file, a handle): copied by
                # attributes then, and what cannot be copied is shared.
                if isinstance(value, nn.Module):
                    return self._copy_module(value)
                raise

    def _copy_module(self, module: nn.Module) -> nn.Module:
        known = self._memo.get(id(module))
        if known is not None and known.__dict__.get(CHILDREN) is not None:
            return known  # type: ignore[no-any-return]
        twin = module.__class__.__new__(module.__class__)
        self._memo[id(module)] = twin
        self._originals.append(module)
        for name, value in module.__dict__.items():
            if name == CHILDREN:
                children = {
                    child_name: None if child is None else self._copy_module(child)
                    for child_name, child in value.items()
                }
                twin.__dict__[name] = children
                continue
            memo = dict(self._memo)
            try:
                twin.__dict__[name] = copy.deepcopy(value, memo)
                self._memo.update(memo)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, copy.Error, NotImplementedError, RuntimeError):
                twin.__dict__[name] = value
        return twin

    @contextmanager
    def _tensors_copied_hollow(self) -> Iterator[None]:
        def hollow(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
            return self.of_tensor(tensor)

        originals: list[tuple[type, Callable[..., Any]]] = []
        kinds = {Tensor, nn.Parameter}
        for kind in itertools.chain(kinds, _subclasses(Tensor) - kinds):
            if "__deepcopy__" in kind.__dict__:
                originals.append((kind, kind.__dict__["__deepcopy__"]))
                kind.__deepcopy__ = hollow  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for kind, original in originals:
                kind.__deepcopy__ = original  # type: ignore[attr-defined]

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """Return the twin of one tensor; tensors that share a storage have twins that share one."""
        known = self._tensors.get(id(tensor))
        if known is not None:
            return known
        if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):  # of a lazy module
            kind: Any = type(tensor)
            lazy: Tensor = kind(tensor.requires_grad, device=self._device, dtype=tensor.dtype)
            self._tensors[id(tensor)] = lazy
            self._originals.append(tensor)
            return lazy
        if tensor.layout in LAYOUTS:
            return self._compressed_twin(tensor)
        if tensor.layout is torch.jagged:
            return self._jagged_twin(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        twin = self._plain_twin(tensor)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            if type(tensor) is not nn.Parameter:
                twin.__class__ = type(tensor)
        elif type(tensor) is not Tensor and isinstance(tensor, nn.Buffer):
            twin = nn.Buffer(twin, tensor.persistent)
        else:
            twin.requires_grad_(tensor.requires_grad)
        self._tensors[id(tensor)] = twin
        self._originals.append(tensor)
        for name, value in tensor.__dict__.items():
            twin.__dict__[name] = copy.deepcopy(value, self._memo)
        if tensor.is_leaf and tensor.grad is not None:
            twin.grad = self.of_tensor(tensor.grad)
        return twin

    def _compressed_twin(self, tensor: Tensor) -> Tensor:
        """Return a compressed sparse tensor of the twins of its indices and values."""
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        plain = tensor.detach()
        indices = (
            (plain.crow_indices(), plain.col_indices())
            if by_rows
            else (plain.ccol_indices(), plain.row_indices())
        )
        label = self._labels.get(id(tensor))
        parts = []
        for part in (*indices, plain.values()):
            if label is not None:
                self._labels[id(part)] = label
            parts.append(self.of_tensor(part))
        with self._interceptor.working():
            twin: Tensor = torch.ops.aten._sparse_compressed_tensor_unsafe.default(
                *parts, list(tensor.shape), dtype=tensor.dtype, layout=tensor.layout
            )
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        else:
            twin.requires_grad_(tensor.requires_grad)
        self._tensors[id(tensor)] = twin
        self._originals.append(tensor)
        return twin

    def _jagged_twin(self, tensor: Any) -> Tensor:
        """Return a jagged tensor of the twins of its values and offsets."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: self.of_tensor(getattr(tensor, name)) for name in names}
        twin: Tensor = type(tensor).__tensor_unflatten__(
            inner, context, tensor.shape, tensor.stride()
        )
        self._tensors[id(tensor)] = twin
        self._originals.append(tensor)
        return twin

    def _plain_twin(self, tensor: Tensor) -> Tensor:
        other = (Kind.PARAMETER if isinstance(tensor, nn.Parameter) else Kind.OTHER, "", "")
        kind, label, owner = self._labels.get(id(tensor), other)
        address = storage_address(tensor)
        shared = self._storages.get(address) if self._whole else None
        with self._interceptor.working():
            if shared is not None:
                return tensor_on(
                    shared.untyped_storage(),
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.stride(),
                    int(tensor.storage_offset()),
                )
            twin = self._interceptor.border.enter_tensor(
                tensor.detach(), self._device, kind, label, owner, self._whole
            )
        self._storages[address] = twin
        return twin


def _subclasses(kind: type) -> set[type]:
    found: set[type] = set()
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        found |= {subclass} | _subclasses(subclass)
    return found
