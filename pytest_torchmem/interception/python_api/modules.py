"""Real modules of the traced program, which have their own tensors again after the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import replaced_all
from pytest_torchmem.torch_private.replaceable import apply_to_module
from pytest_torchmem.torch_private.storages import storage_address
from pytest_torchmem.torch_private.tensors import has_dispatch, own_buffers, own_parameters


@contextmanager
def modules_given_back(trace: TraceContext) -> Iterator[None]:
    """Give real modules that a program moves or converts their own tensors back afterwards."""
    original: Any = apply_to_module.original
    tensors = _OwnTensors(trace)

    def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not trace.off():
            tensors.note(module)
        return original(module, *args, **kwargs)

    try:
        with replaced_all([apply_to_module.by(apply)]):
            yield
    finally:
        tensors.give_back()


class _OwnTensors:
    """The tensors that real modules came with.

    Weakly: a module that the program makes on another thread is real too, and dies in the trace.
    """

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._parameters: Any = WeakIdKeyDictionary()
        self._buffers: Any = WeakIdKeyDictionary()
        trace.noted_tensors.append(self._parameters)

    def note(self, module: nn.Module) -> None:
        """Keep the data, gradients and buffers of a module that is about to be converted."""
        for parameter in own_parameters(module).values():
            if parameter is not None and self._is_real(parameter):
                self._parameters.setdefault(parameter, (parameter.data, parameter.grad))
        for name, buffer in own_buffers(module).items():
            if buffer is not None and self._trace.brought(buffer):
                self._buffers.setdefault(module, {}).setdefault(name, buffer)

    def _is_real(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter came with the program; wrappers and fake tensors are its own."""
        return self._trace.brought(parameter) and not has_dispatch(parameter)

    def give_back(self) -> None:
        """Put back what has changed."""
        for parameter, (data, gradient) in self._parameters.items():
            if data.device.type != "meta" and _place(parameter.data) != _place(data):
                parameter.grad = None
                parameter.data = data
                parameter.grad = gradient
        for module, named in self._buffers.items():
            own_buffers(module).update(named)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return what differs between two tensors that are not on the same memory."""
    return storage_address(tensor), int(tensor.storage_offset())
