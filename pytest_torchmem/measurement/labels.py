"""Names for what a measured step made and left behind."""

from __future__ import annotations

import torch

from pytest_torchmem.measurement.copies import Copies, Label
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private.tensors import is_wrapper, wrapped_tensors


def labels_after(copies: Copies, outliving: object) -> dict[int, Label]:
    """Name what the step made and left behind: gradients and the optimizer's state."""
    labels: dict[int, Label] = {}
    if not isinstance(copies.target, torch.nn.Module):
        return labels
    names: dict[int, str] = {}
    for name, parameter in copies.target.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            _label(labels, parameter.grad, Kind.GRADIENT, name)
    if isinstance(outliving, torch.optim.Optimizer):
        for key, state in outliving.state.items():
            for tensor in tensors_in(state):
                _label(labels, tensor, Kind.OPTIMIZER_STATE, names.get(id(key), ""))
    return labels


def _label(labels: dict[int, Label], tensor: torch.Tensor, kind: Kind, name: str) -> None:
    if is_wrapper(tensor):
        for inner in wrapped_tensors(tensor):
            _label(labels, inner, kind, name)
    elif tensor.layout is torch.strided:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        labels.setdefault(tensor.untyped_storage().data_ptr(), Label(kind, name, shape, dtype))
