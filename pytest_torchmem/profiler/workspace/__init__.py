"""Workspace: the bytes a kernel takes for itself beyond the outputs it returns.

A flat registry of small pure functions of geometries, one per operator and device::

    @workspace("aten::native_layer_norm_backward", device="cpu")
    def layer_norm_backward(machine, outputs, grad_out, input, normalized_shape, mean, rstd,
                            weight=None, bias=None, output_mask=(True, True, True)):
        '''Per-thread sums of gamma and beta; LayerNormBackwardKernelImplInternal.'''
        return machine.threads * 2 * math.prod(normalized_shape) * input.element_size()

``machine`` is the ``Host`` or ``Gpu`` the trace stands for; ``outputs`` are what the operator
returned; then come the operator's own arguments, with the defaults of its schema. Tensors have
their geometry (``shape``, ``stride()``, ``dtype``, ``numel()``) and no data. A function returns the
bytes at the kernel's own peak beyond what was live before it and its outputs: an ``int``, or a
tuple of the single requests that are alive together then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pytest_torchmem.profiler.patches import is_another

WorkspaceFunction = Callable[..., "int | tuple[int, ...]"]
_F = TypeVar("_F", bound=WorkspaceFunction)

_FUNCTIONS: dict[tuple[str, str], WorkspaceFunction] = {}


def workspace(*operators: str, device: str) -> Callable[[_F], _F]:
    """Register a function for ``operators`` (``"aten::mm"``: every overload) on ``device``.

    Raises ``ValueError`` where an operator already has a function on that device.
    """

    def register(function: _F) -> _F:
        for operator in operators:
            key = (operator, device)
            if is_another(_FUNCTIONS.get(key), function):
                raise ValueError(f"{operator} already has a workspace function for {device}")
            _FUNCTIONS[key] = function
        return function

    return register


def find_workspace(operator: str, device: str) -> WorkspaceFunction | None:
    """Return the function for an operator (``"aten::mm"``) on ``device``, or ``None``."""
    _load()
    return _FUNCTIONS.get((operator, device))


def _load() -> None:
    from pytest_torchmem.profiler.workspace import cpu  # noqa: F401
