"""Names for the storages of a measured step, by their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private.tensors.tensors import is_wrapper, wrapped_tensors


@dataclass(frozen=True, slots=True)
class Label:
    """What a storage is to the model: its kind, and the first name it goes by."""

    kind: Kind
    name: str
    shape: tuple[int, ...]
    dtype: str


def labels_before(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Label]:
    """Name what a step begins with: parameters, buffers, gradients from before and inputs."""
    labels: dict[int, Label] = {}
    if isinstance(target, nn.Module):
        _label_module(labels, target, "")
    inputs = {f"args[{position}]": value for position, value in enumerate(args)} | dict(kwargs)
    for name, value in inputs.items():
        if isinstance(value, nn.Module):
            _label_module(labels, value, name)
            continue
        for tensor in tensors_in(value):
            _label(labels, tensor, Kind.INPUT, name)
    return labels


def labels_after(target: Any, outliving: object) -> dict[int, Label]:
    """Name what the step made and left behind: gradients and the optimizer's state."""
    labels: dict[int, Label] = {}
    if not isinstance(target, nn.Module):
        return labels
    names: dict[int, str] = {}
    for name, parameter in target.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            _label(labels, parameter.grad, Kind.GRADIENT, name)
    if isinstance(outliving, torch.optim.Optimizer):
        for key, state in outliving.state.items():
            for tensor in tensors_in(state):
                _label(labels, tensor, Kind.OPTIMIZER_STATE, names.get(id(key), ""))
    return labels


def _label_module(labels: dict[int, Label], module: nn.Module, prefix: str) -> None:
    for name, parameter in module.named_parameters(prefix):
        _label(labels, parameter, Kind.PARAMETER, name)
        if parameter.grad is not None:
            _label(labels, parameter.grad, Kind.GRADIENT, name)
    for name, buffer in module.named_buffers(prefix):
        _label(labels, buffer, Kind.BUFFER, name)


def _label(labels: dict[int, Label], tensor: Tensor, kind: Kind, name: str) -> None:
    if is_wrapper(tensor):
        for inner in wrapped_tensors(tensor):
            _label(labels, inner, kind, name)
    elif (
        tensor.layout is torch.strided and not is_lazy(tensor) and tensor.untyped_storage().nbytes()
    ):
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        labels.setdefault(tensor.untyped_storage().data_ptr(), Label(kind, name, shape, dtype))
