"""Private parts of torch, tried once per process on a tiny program.

A torch that behaves differently gives one clear sentence instead of a wrong number.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private.autograd import current_graph_task, sequence_number
from pytest_torchmem.torch_private.dispatcher import interception
from pytest_torchmem.torch_private.keys import FAKE, set_excluded
from pytest_torchmem.torch_private.names import check_names, unsupported
from pytest_torchmem.torch_private.operators import OpOverload
from pytest_torchmem.torch_private.storages import hollow_storage, storage_address, tensor_on

_CHECKED: list[bool] = []


def check_torch() -> None:
    """Try every private part once per process; raise ``UnsupportedTorchError`` where one fails."""
    check_names()
    if _CHECKED:
        return
    try:
        _try_interception()
    except UnsupportedTorchError:
        raise
    except Exception as error:
        raise unsupported(f"{type(error).__name__}: {error}") from error
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
        raise unsupported(f"the Fake key saw {seen}")
    if gradient.data_ptr() != 0 or storage_address(gradient) != gradient.untyped_storage()._cdata:
        raise unsupported("a storage without memory is not kept as it is")
    if current_graph_task() != -1 or sequence_number() < 1:
        raise unsupported(
            "`_current_graph_task_id` or `_get_sequence_nr` returned an unexpected value"
        )
