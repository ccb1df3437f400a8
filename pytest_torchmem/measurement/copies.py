"""A step whose tensors lie on copies of their data, on a real device, and then as before."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.journal.contents import ProgramState, Reached
from pytest_torchmem.journal.in_place import Given, InPlace
from pytest_torchmem.journal.journal import undisturbed
from pytest_torchmem.measurement.device import cuda_device
from pytest_torchmem.operators.layouts import COMPRESSED, compressed_indices
from pytest_torchmem.step.step import Step
from pytest_torchmem.torch_private.tensors import has_dispatch

Run = Callable[..., object]
"""Runs the step, and returns what outlives it."""


@contextmanager
def on_copies(
    device: torch.device | None,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    step: Step,
    *,
    moved: bool = False,
) -> Iterator[Run]:
    """Let the tensors of a module and of the arguments lie on ``device``, each on its own if that
    is None; and give the module, the arguments and what is in them back as they were.

    Tensors keep their geometry and gradients. Those that share a storage share its copy, where they
    stay on their device; what is ``moved`` to another has its own elements there and no more, as
    ``Tensor.to`` makes it. What was on ``meta`` is filled with small random numbers, on ``device``
    itself.
    """
    module = target if isinstance(target, nn.Module) else None
    reached = Reached(module, args, kwargs, step.loss_fn if module is not None else None)
    in_place = InPlace(reached, module, args, kwargs, step.loss_fn)
    state = ProgramState(reached, in_place.references(), keeps=True)

    try:
        with undisturbed():
            in_place.lay(_Copies(device, moved, stay=module is not None))
            if moved and module is not None:
                _flatten(module)
        yield partial(step.run, target, args, kwargs)
    finally:
        with undisturbed():
            in_place.restore()
            state.restore()


def _flatten(module: nn.Module) -> None:
    """Let each recurrent layer's weights lie in one buffer, as ``Module.to`` does.
    torch/nn/modules/rnn.py, ``RNNBase._apply``. The stand-in has none of cuDNN's recurrent layers.
    """
    if cuda_device().is_stand_in:
        return
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()


class _Copies:
    """Copies of tensors with their data; without a device what is on ``meta`` stays without."""

    def __init__(self, device: torch.device | None, moved: bool, stay: bool) -> None:
        self._device = device
        self._moved = moved
        self._stay = stay and device is not None and device.type != "cpu"
        """Whether tensors stay where they are that ``Module.to`` does not move."""
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, tensor: Tensor, given: Given) -> Tensor | None:
        """Return the copy of a tensor, without a gradient."""
        if (self._stay and not given.moves) or has_dispatch(tensor):
            return None
        device = self._device or tensor.device
        if is_lazy(tensor):
            kind: Any = type(tensor)
            return kind(False, device=device, dtype=tensor.dtype)  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._copy(tensor.detach())

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.layout in COMPRESSED:
            compressed, plain = map(self._copy, compressed_indices(tensor))
            values, shape = self._copy(tensor.values()), list(tensor.shape)
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, layout=tensor.layout
            )
        dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
        if not dense or tensor.is_neg():
            return tensor.to(self._device or tensor.device, copy=True)
        moves = self._moved and not tensor.is_cuda
        copy = self._moved_copy(tensor) if moves else self._whole_copy(tensor)
        return copy.conj() if tensor.is_conj() else copy

    def _moved_copy(self, tensor: Tensor) -> Tensor:
        """Return what ``Tensor.to`` makes: its own elements, in their order where it is dense."""
        plain = tensor.conj() if tensor.is_conj() else tensor
        copy = torch.empty_like(plain, device=self._device)
        if tensor.is_meta:
            _fill(copy)
        else:
            copy.copy_(plain)
        return copy

    def _whole_copy(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_new = storage._cdata not in self._storages
        if is_new:
            made = torch.UntypedStorage(storage.nbytes(), device=self._device or storage.device)
            if storage.device.type != "meta" and storage.nbytes():
                made.copy_(storage)
            # The original is held as well: its address is the key, and must not be used again.
            self._storages[storage._cdata] = (storage, made)
        _, made = self._storages[storage._cdata]
        copy = torch.empty(0, dtype=tensor.dtype, device=self._device or tensor.device)
        copy.set_(made, tensor.storage_offset(), tensor.shape, tensor.stride())
        if is_new and tensor.is_meta and self._device is not None:
            _fill(copy)
        return copy


def _fill(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.normal_(0.0, 0.02)
    else:
        tensor.zero_()
