"""Copies of a model and its inputs on a real device, so that the user's own are never touched."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import tensors_in


@dataclass(frozen=True, slots=True)
class Label:
    """What a storage is to the model: its kind, and the first name it goes by."""

    kind: Kind
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Copies:
    """A target and its arguments, copied; ``labels`` are by address of the storage."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: dict[int, Label]


def copy_to_cpu(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Copies:
    """Copy a target and its arguments to the CPU, as :func:`copy_to`."""
    return copy_to(torch.device("cpu"), target, args, kwargs)


def copy_to(
    device: torch.device,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    moved: bool = False,
) -> Copies:
    """Copy a module and all tensors and modules in its arguments; other callables stay themselves.

    Tensors keep their geometry and gradients. Those that share a storage share its copy, where they
    stay on their device; what is ``moved`` to another has its own elements there and no more, as
    ``Tensor.to`` makes it. What was on ``meta`` is filled with small random numbers, on ``device``
    itself.
    """
    copier = _Copier(device, moved)
    target_copy = copier.copy(target) if isinstance(target, torch.nn.Module) else target
    args_copy = tuple(copier.copy(value) for value in args)
    kwargs_copy = {name: copier.copy(value) for name, value in kwargs.items()}
    labels: dict[int, Label] = {}
    if isinstance(target_copy, torch.nn.Module):
        _label_module(labels, target_copy, "")
    for position, value in enumerate(args_copy):
        _label_value(labels, value, f"args[{position}]")
    for name, value in kwargs_copy.items():
        _label_value(labels, value, name)
    return Copies(target_copy, args_copy, kwargs_copy, labels)


def copy_where_they_are(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the tensors and modules among a function's arguments, each on its own device.

    What has no tensors stays itself.
    """
    copier = _Copier(None)

    def copied(value: Any) -> Any:
        tensors = tensors_in(value, of_modules=True)
        return value if next(tensors, None) is None else copier.copy(value)

    return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class _Copier:
    """Deep copies that keep storages shared across all the values copied by one copier.

    Without a device every tensor is copied to where it is, and one on ``meta`` stays without data.
    """

    def __init__(self, device: torch.device | None, moved: bool = False) -> None:
        self._device = device
        self._moved = moved
        self._memo: dict[int, Any] = {}
        self._parts: list[torch.Tensor] = []
        """Tensors that are copied and held by nobody else, so that their ids stay theirs."""
        self._storages: dict[int, tuple[Any, torch.UntypedStorage]] = {}

    def copy(self, value: Any) -> Any:
        for tensor in tensors_in(value, of_modules=True):
            self._copy_tensor(tensor)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            raise UsageError(
                f"measure() runs on a deep copy, and {type(value).__name__} cannot be copied "
                f"({error}): pass a function that builds the model and runs its step"
            ) from error

    def _copy_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._memo:
            return
        if tensor.layout is torch.jagged:
            self._copy_jagged(tensor)
            return
        if tensor.layout in _COMPRESSED:
            self._copy_compressed(tensor)
            return
        if tensor.layout is not torch.strided and type(tensor) is torch.Tensor:
            # Sparse tensors have no storage of their own to copy, and some no deep copy.
            twin = tensor.detach().to(self._device or tensor.device, copy=True)
            self._memo[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        if not _is_plain(tensor):
            self._copy_special(tensor)
            return
        with torch.no_grad():
            if self._moved and not tensor.is_cuda:
                twin = self._moved_copy(tensor)
            else:
                twin = self._whole_copy(tensor)
            if tensor.is_conj():
                twin = twin.conj()
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, tensor.requires_grad)
        elif tensor.requires_grad:
            twin.requires_grad_()
        self._memo[id(tensor)] = twin
        twin.__dict__.update(copy.deepcopy(tensor.__dict__, self._memo))
        if tensor.is_leaf and tensor.grad is not None:
            self._copy_tensor(tensor.grad)
            twin.grad = self._memo.get(id(tensor.grad))

    def _copy_compressed(self, tensor: torch.Tensor) -> None:
        """Copy indices and values with their storages, which may be larger than they are."""
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        plain = tensor.detach()
        parts = (
            plain.crow_indices() if by_rows else plain.ccol_indices(),
            plain.col_indices() if by_rows else plain.row_indices(),
            plain.values(),
        )
        for part in parts:
            self._copy_tensor(part)
            self._parts.append(part)
        compressed, plain_indices, values = (self._memo[id(part)] for part in parts)
        twin = torch.sparse_compressed_tensor(
            compressed, plain_indices, values, list(tensor.shape), layout=tensor.layout
        )
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, tensor.requires_grad)
        self._memo[id(tensor)] = twin.requires_grad_(tensor.requires_grad)

    def _copy_jagged(self, tensor: Any) -> None:
        """Copy values and offsets; a deep copy would go with no other of the same offsets."""
        names, context = tensor.__tensor_flatten__()
        for name in names:
            self._copy_tensor(getattr(tensor, name))
        inner = {name: self._memo[id(getattr(tensor, name))] for name in names}
        self._memo[id(tensor)] = type(tensor).__tensor_unflatten__(
            inner, context, tensor.shape, tensor.stride()
        )

    def _moved_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what ``Tensor.to`` makes: its own elements, in their order where it is dense."""
        plain = tensor.detach().conj() if tensor.is_conj() else tensor.detach()
        twin = torch.empty_like(plain, device=self._device)
        if tensor.is_meta:
            _fill(twin)
        else:
            twin.copy_(plain)
        return twin

    def _whole_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same place in a copy of its storage."""
        storage, is_new = self._copy_storage(tensor.untyped_storage())
        twin = torch.empty(0, dtype=tensor.dtype, device=self._device or tensor.device)
        twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if is_new and tensor.is_meta and self._device is not None:
            _fill(twin)
        return twin

    def _copy_special(self, tensor: torch.Tensor) -> None:
        """Copy a subclass or a quantized tensor to a device that a deep copy would not reach."""
        if id(tensor) in self._memo or self._device is None or self._device.type == "cpu":
            return
        if is_lazy(tensor):
            kind: Any = type(tensor)
            lazy = kind(tensor.requires_grad, device=self._device, dtype=tensor.dtype)
            self._memo[id(tensor)] = lazy
            return
        twin = tensor.detach().to(self._device, copy=True)
        self._memo[id(tensor)] = twin.requires_grad_(tensor.requires_grad)

    def _copy_storage(self, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, bool]:
        known = self._storages.get(storage._cdata)
        if known is not None:
            return known[1], False
        twin = torch.UntypedStorage(storage.nbytes(), device=self._device or storage.device)
        if storage.device.type != "meta" and storage.nbytes():
            twin.copy_(storage)
        # The original is held as well: its address is the key, and must not be used again.
        self._storages[storage._cdata] = (storage, twin)
        return twin, True


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_neg()
    )


def _fill(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.normal_(0.0, 0.02)
    else:
        tensor.zero_()


def _label_module(labels: dict[int, Label], module: torch.nn.Module, prefix: str) -> None:
    for name, parameter in module.named_parameters(prefix):
        _label(labels, parameter, Kind.PARAMETER, name)
        if parameter.grad is not None:
            _label(labels, parameter.grad, Kind.GRADIENT, name)
    for name, buffer in module.named_buffers(prefix):
        _label(labels, buffer, Kind.BUFFER, name)


def _label_value(labels: dict[int, Label], value: Any, name: str) -> None:
    if isinstance(value, torch.nn.Module):
        _label_module(labels, value, name)
        return
    for tensor in tensors_in(value):
        _label(labels, tensor, Kind.INPUT, name)


def _label(labels: dict[int, Label], tensor: torch.Tensor, kind: Kind, name: str) -> None:
    if not _is_plain(tensor) or not tensor.untyped_storage().nbytes():
        return
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    labels.setdefault(tensor.untyped_storage().data_ptr(), Label(kind, name, shape, dtype))
