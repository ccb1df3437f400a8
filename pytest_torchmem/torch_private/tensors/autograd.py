"""What the autograd engine says of itself, and of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from torch import Tensor

from pytest_torchmem.torch_private.names import private, private_attribute, private_name

#: -1 outside of a backward, else the number of the running graph task of this thread.
current_graph_task: Callable[[], int] = private("torch._C._current_graph_task_id")
current_node: Callable[[], Any] = private("torch._C._current_autograd_node")
#: Whether the running backward leaves its nodes what they have saved (``retain_graph``).
keeps_graph: Callable[[], bool] = private("torch._C._autograd._get_current_graph_task_keep_graph")
#: One more than the sequence number of the autograd node this thread made last.
sequence_number: Callable[[], int] = private("torch._C._autograd._get_sequence_nr")
#: A node's number, which is read in place: ``node._sequence_nr()``.
NODE_NUMBER = private_name("torch.autograd.graph.Node._sequence_nr")
#: What a node knows of the gradients that it takes.
node_inputs: Callable[[Any], Any] = private_attribute("torch.autograd.graph.Node._input_metadata")
engine_has_threads: Callable[[], bool] = private("torch._C._is_multithreading_enabled")

#: The frame that the autograd engine is called from; an operator whose caller it is was issued by
#: C++ inside of the engine and not by a hook or a custom function.
ENGINE_CODE: CodeType = private("torch.autograd.graph._engine_run_backward.__code__")
#: The code that calls what ``torch.vmap`` was given.
VMAP_CODE: CodeType = private("torch._functorch.vmap._flat_vmap.__code__")


def saved_by(node: Any, name: str) -> Any:
    """Return what a node has saved by a name of derivatives.yaml, or None (``_saved_input``)."""
    return getattr(node, f"_saved_{name}", None)


def numbers_saved_by(outputs: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the tensors of no dimension, on the host, that nodes have saved for some outputs.

    Autograd saves a Python number as the tensor that it is wrapped in, also where everything else
    is a fake tensor. They are returned by the addresses of their storages.
    """
    found: dict[int, Tensor] = {}
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
        for name in dir(node):
            value = _saved(node, name) if name.startswith("_saved_") else None
            if type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu":
                found[value.untyped_storage().data_ptr()] = value
    return found


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:  # freed, or written to since
        return None


def in_engine_thread() -> bool:
    """Return whether a GPU's kernels would be launched by the autograd engine's own thread now."""
    return current_graph_task() != -1 and engine_has_threads()


#: The attribute of a ``torch.autograd.Function`` with the class of its nodes.
_NODE = private_name("torch.autograd.Function._backward_cls")


def name_node(function: Any, name: str) -> None:
    """Give the graph's nodes of a ``torch.autograd.Function`` the name of one of torch's own."""
    node = getattr(function, _NODE)
    node.__name__ = node.__qualname__ = name
