"""Private parts of torch, tried once per process on a tiny program.

A torch that behaves differently gives one clear sentence instead of a wrong number.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private import dispatcher, keys, tensors
from pytest_torchmem.torch_private.kernels import run_cpu_kernel
from pytest_torchmem.torch_private.names import missing_names, unsupported

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_own_thread(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Have a function called where no mode is on that its caller is in (``inference_mode``)."""

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return call


def check_torch(*, cuda: bool = True) -> None:
    """Try every private part once per process; raise ``UnsupportedTorchError`` where one fails.

    What only traces on fake cuda use is tried for ``cuda``: to register a kernel for all operators
    takes milliseconds.
    """
    if missing := missing_names():
        raise unsupported(f"it has no {', '.join(missing)}")
    _try_once((_try_interception, _try_cpu_kernel))
    if cuda:
        _try_once((_try_kernels,))


@cache
@on_own_thread
def _try_once(parts: tuple[Callable[[], None], ...]) -> None:
    try:
        for part in parts:
            part()
        tensors.nowhere().forget()  # where ``set_detect_anomaly`` has looked for NaN
    except UnsupportedTorchError:
        raise
    except Exception as error:
        raise unsupported(f"{type(error).__name__}: {error}") from error


def _try_interception() -> None:
    seen: list[str] = []
    nodes: list[int] = []

    def fallback(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
        seen.append(operator.name())
        with keys.excluded(keys.FAKE):
            if operator.name() == "aten::mul.Tensor":
                if tensors.current_graph_task() != -1 and not tensors.keeps_graph():
                    nodes.append(tensors.current_node()._sequence_nr())
                shape = tuple(args[0].shape)
                storage = tensors.hollow_storage(4 * args[0].numel())
                return tensors.tensor_on(storage, torch.float32, shape, (shape[1], 1), 0)
            if operator.name() == "aten::sum":
                return torch.zeros((), dtype=torch.float32)
            return operator(*args, **kwargs)

    weight = torch.ones(2, 3, dtype=torch.float32, requires_grad=True)
    with dispatcher.interception(fallback):
        product = weight * 2.0
        number = tensors.sequence_number() - 1
        # A gradient that is given would import sympy (torch/autograd/__init__.py, _make_grads).
        product.view(3, 2).sum().backward()
    gradient = weight.grad
    if seen.count("aten::mul.Tensor") != 2 or gradient is None:
        raise unsupported(f"dispatch key Fake intercepted {seen}")
    if (
        tensors.has_memory(gradient.untyped_storage())
        or tensors.storage_address(gradient) != gradient.untyped_storage()._cdata
    ):
        raise unsupported("a storage without memory is not kept as it is")
    if tensors.current_graph_task() != -1 or nodes != [number]:
        raise unsupported(
            "`_current_graph_task_id`, `_current_autograd_node` or `_get_sequence_nr` returned an "
            "unexpected value"
        )


def _try_kernels() -> None:
    """Composite operators run Python kernels, above autograd and within autocast."""
    seen: list[str] = []

    def dropout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(keys.COMPOSITE_KEY)
        return args[0]

    def dot(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with dispatcher.outside_autocast():
            seen.append(keys.AUTOCAST_KEY)
            return torch.dot(*args)

    tensor = torch.ones(1)
    with (
        dispatcher.composite_kernels(["aten::dropout"], dropout),
        dispatcher.autocast_kernels(dot) as register,
    ):
        register(["aten::dot"])
        torch.dropout(tensor, 0.5, True)
        dispatcher.autocast_key_included(True)
        try:
            torch.dot(tensor, tensor)
        finally:
            dispatcher.autocast_key_included(False)
        torch.dot(tensor, tensor)
    torch.dropout(tensor, 0.0, True)
    if seen != [keys.COMPOSITE_KEY, keys.AUTOCAST_KEY]:
        raise unsupported(
            f"of {keys.COMPOSITE_KEY} and {keys.AUTOCAST_KEY}, kernels ran for {seen}"
        )


def _try_cpu_kernel() -> None:
    tensor = torch.ones(1)
    multiply = keys.find_operator("mul.Tensor")
    if (
        multiply is None
        or keys.is_composite_implicit(multiply)
        or not keys.has_kernel_on(multiply, "cpu")
    ):
        raise unsupported("aten::mul.Tensor has no kernel of its own for the CPU")
    if run_cpu_kernel(multiply, tensor, tensor) != 1:
        raise unsupported("the CPU's kernel of aten::mul.Tensor does not run by its dispatch key")
