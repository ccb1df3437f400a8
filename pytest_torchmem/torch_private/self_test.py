"""Private parts of torch, tried once per process on a tiny program.

A torch that behaves differently gives one clear sentence instead of a wrong number.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._ops import OpOverload

from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private.dispatcher import interception
from pytest_torchmem.torch_private.internals import (
    FAKE,
    current_graph_task,
    hollow_storage,
    sequence_number,
    set_excluded,
    storage_address,
    tensor_on,
)

_CHECKED: list[bool] = []


def check_torch() -> None:
    """Try every private part once per process; raise ``UnsupportedTorchError`` where one fails."""
    if _CHECKED:
        return
    try:
        _try_interception()
    except UnsupportedTorchError:
        raise
    except Exception as error:
        raise _unsupported(f"{type(error).__name__}: {error}") from error
    _CHECKED.append(True)


def _try_interception() -> None:
    seen: list[str] = []

    def fallback(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        seen.append(operator.name())
        set_excluded(FAKE, True)
        try:
            if operator.name() == "aten::mul.Tensor":
                shape = tuple(args[0].shape)
                storage = hollow_storage(4 * args[0].numel())
                return tensor_on(storage, torch.float32, shape, (shape[1], 1), 0)
            if operator.name() == "aten::sum":
                return torch.zeros(())
            return operator(*args, **kwargs)
        finally:
            set_excluded(FAKE, False)

    weight = torch.ones(2, 3, requires_grad=True)
    with torch.enable_grad(), interception(fallback):
        # A gradient that is given would import sympy (torch/autograd/__init__.py, _make_grads).
        (weight * 2.0).view(3, 2).sum().backward()
    gradient = weight.grad
    if seen.count("aten::mul.Tensor") != 2 or gradient is None:
        raise _unsupported(f"the Fake key saw {seen}")
    if gradient.data_ptr() != 0 or storage_address(gradient) != gradient.untyped_storage()._cdata:
        raise _unsupported("a storage without memory is not kept as it is")
    if current_graph_task() != -1 or sequence_number() < 1:
        raise _unsupported("the autograd engine does not say what it runs")


def _unsupported(reason: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"pytest-torchmem cannot trace on torch {torch.__version__} with Python "
        f"{sys.version_info.major}.{sys.version_info.minor} (its private parts are not as in the "
        f"torch versions it knows, 2.11 to 2.15): {reason}"
    )
