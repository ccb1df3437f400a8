"""``flex_attention`` of torch where it is not public: its kernels in Python, and its block masks.

torch/_higher_order_ops/flex_attention.py; torch/nn/attention/flex_attention.py.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_stack
from types import CellType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pytest_torchmem.torch_private.names import private_attribute, private_name_if_imported
from pytest_torchmem.torch_private.patches import replaced

MODULE = "torch._higher_order_ops.flex_attention"
MASKS = "torch.nn.attention.flex_attention"
private_name_if_imported("torch._higher_order_ops.flex_attention.sdpa_dense")
_CONVERT = private_name_if_imported("torch.nn.attention.flex_attention._convert_mask_to_block_mask")
_COMPILE_WRAPPER = private_name_if_imported(
    "torch._dynamo.eval_frame._TorchDynamoContext.compile_wrapper"
)
private_attribute("torch._ops.HigherOrderOperator._dispatch_cache")
_KERNEL = torch._C.DispatchKey.CompositeExplicitAutograd
_AUTOGRAD = torch._C.DispatchKey.Autograd
_BUFFERS = 7
"""The position of the tensors that ``score_mod`` captures among the arguments."""

_Function: TypeAlias = Callable[..., Any]
MadeFrom: TypeAlias = Callable[[_Function, _Function], tuple[_Function, _Function]]
"""Returns what is called instead of two functions of torch, given these."""


@contextmanager
def flex_kernels_replaced(made_from: MadeFrom) -> Iterator[None]:
    """Let ``flex_attention`` run kernels that are made from those that torch runs eagerly, forward
    and backward; its module is imported.
    """
    module = sys.modules[MODULE]
    forward, backward = module.flex_attention, module.flex_attention_backward
    kernels = made_from(forward.py_kernels[_KERNEL], backward.py_kernels[_KERNEL])
    with _with_kernel(forward, _KERNEL, kernels[0]), _with_kernel(backward, _KERNEL, kernels[1]):
        yield


def captured_tensors_lifted() -> AbstractContextManager[None]:
    """Hand tensors that a ``score_mod`` captures on, which gradients go to, as Dynamo does.
    Eagerly, the operator does not see them.
    """
    operator = sys.modules[MODULE].flex_attention
    original = operator.py_kernels[_AUTOGRAD]

    def autograd(*args: Any) -> Any:
        if len(args) > _BUFFERS and args[_BUFFERS]:
            return original(*args)
        captured: list[Tensor] = []
        score_mod = _lifted(args[3], captured)
        if not captured:
            return original(*args)

        def with_tensors(*values: Any) -> Any:
            return score_mod(values[-len(captured) :])(*values[: -len(captured)])

        rest = args[_BUFFERS + 1 :]
        return original(*args[:3], with_tensors, *args[4:_BUFFERS], tuple(captured), *rest)

    return _with_kernel(operator, _AUTOGRAD, autograd)


def _lifted(value: Any, captured: list[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    """Return what gives a captured value anew, with other tensors in the place of ``captured``.
    Those that gradients go to are appended there; of functions, what these capture.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        position = len(captured)
        captured.append(value)
        return lambda tensors: tensors[position]
    if not isinstance(value, FunctionType) or not value.__closure__:
        return lambda tensors: value
    before = len(captured)
    cells = [_lifted(_content(cell), captured) for cell in value.__closure__]
    if len(captured) == before:
        return lambda tensors: value

    def with_cells(tensors: Sequence[Tensor]) -> Any:
        closure = tuple(CellType(cell(tensors)) for cell in cells)
        code, defaults = value.__code__, value.__defaults__
        return FunctionType(code, value.__globals__, value.__name__, defaults, closure)

    return with_cells


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


@contextmanager
def _with_kernel(operator: Any, key: Any, kernel: Callable[..., Any]) -> Iterator[None]:
    original = operator.py_kernels[key]
    try:
        operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
        yield
    finally:
        operator.py_kernels[key] = original
        operator._dispatch_cache.clear()


def block_masks_replaced(made_from: MadeFrom) -> AbstractContextManager[None]:
    """Replace what makes a mask, and what makes blocks of one; their module is imported."""
    module = sys.modules[MASKS]
    make, convert = made_from(module.create_mask, getattr(module, _CONVERT))
    return replaced(module, **{"create_mask": make, _CONVERT: convert})


def in_what_inductor_compiles() -> bool:
    """Return whether the code that runs would be compiled by Inductor, outside of a trace.

    A compiled function is called by ``compile_wrapper``, of a context that has a configuration of
    the compiler only with Inductor (torch/_dynamo/eval_frame.py, ``OptimizeContext``).
    """
    return any(
        frame.f_code.co_name == _COMPILE_WRAPPER
        and frame.f_code.co_filename.replace("\\", "/").endswith("_dynamo/eval_frame.py")
        and getattr(frame.f_locals.get("self"), "compiler_config", None) is not None
        for frame, _ in walk_stack(sys._getframe(1))
    )
