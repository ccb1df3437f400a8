"""The tensors among nested values, of a program or an operator's arguments, and a module's modules.

The two nest in different ways. A program passes and returns mappings, sequences and dataclasses of
any class (``transformers.BatchEncoding``, ``ModelOutput``), and all of them are walked. To an
operator the dispatcher passes plain lists, tuples and dicts and nothing else
(torch/csrc/jit/python/pybind_utils.h, ``toPyObject``), for every operator of a trace: there exact
types are compared, which is faster, and anything else is a value (``torch.Size``).

``nn.Module.named_modules`` is a generator for each level of the tree, in that of the level above:
modules are found in few steps of Python. What a program's class has in the place of torch's methods
is not asked.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pytest_torchmem.torch_private.tensors import CHILDREN

Args: TypeAlias = tuple[Any, ...]
"""The arguments of a call by place."""
Kwargs: TypeAlias = dict[str, Any]
"""And by name."""
_Leaf = TypeVar("_Leaf")
_CONTAINERS = frozenset({list, tuple, dict})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested mappings, sequences and dataclasses, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "__dict__", None)  # where no property of the program answers
        for entry in fields(value):
            name = entry.name
            held = getattr(value, name, None) if own is None else own.get(name)
            yield from tensors_in(held)


def argument_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an operator's arguments, or of its result, in order."""
    return argument_leaves(value, Tensor)


def argument_leaves(value: Any, kind: type[_Leaf] | tuple[type[_Leaf], ...]) -> list[_Leaf]:
    """Return what is of ``kind`` in nested plain lists, tuples and dicts, in order."""
    if isinstance(value, kind):
        return [value]
    found: list[_Leaf] = []
    if type(value) in _CONTAINERS:
        _collect(value, kind, found)
    return found


def _collect(container: Any, kind: Any, found: list[Any]) -> None:
    for item in container.values() if type(container) is dict else container:
        if isinstance(item, kind):
            found.append(item)
        elif type(item) in _CONTAINERS:
            _collect(item, kind, found)


def replace_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return an operator's arguments or result with ``function`` of every tensor in its place."""
    return replace_leaves(value, Tensor, function)


def replace_leaves(value: Any, kind: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested plain lists, tuples and dicts with what is of ``kind`` replaced."""
    if isinstance(value, kind):
        return function(value)
    of = type(value)
    if of is tuple or of is list:
        replaced = [  # not a call for each number among an operator's arguments
            function(item)
            if isinstance(item, kind)
            else replace_leaves(item, kind, function)
            if type(item) in _CONTAINERS
            else item
            for item in value
        ]
        return replaced if of is list else tuple(replaced)
    if of is dict:
        return {key: replace_leaves(item, kind, function) for key, item in value.items()}
    return value


def shape_text(tensor: Tensor) -> str:
    """Return the shape of a tensor as text. Nested ones of the strided layout have none in one list
    (NestedTensorImpl.h).
    """
    if tensor.is_nested and tensor.layout is torch.strided:
        return f"[{tensor.size(0)} nested]"
    return str(list(tensor.shape))


def modules_by_path(root: nn.Module, *, each_once: bool = True) -> list[tuple[str, nn.Module]]:
    """Return a module and those in it with their paths, in the order of ``named_modules``. A module
    in several places has the path of the first, or if not ``each_once`` all of them, but for places
    within itself: a child may have its parent.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", root, ())]
    """Modules with their paths, and the ids of those that each is in."""
    while waiting:
        path, module, around = waiting.pop()
        if id(module) in (seen if each_once else around):
            continue
        seen.add(id(module))
        found.append((path, module))
        children = _table(module, CHILDREN)
        if children:
            prefix, within = f"{path}." if path else "", (*around, id(module))
            waiting += [
                (prefix + name, child, within)
                for name, child in reversed(children)
                if child is not None
            ]
    return found


def tensors_by_path(
    root: nn.Module, table: str, *, each_once: bool = True
) -> Iterator[tuple[str, str, Any]]:
    """Yield the tensors in a ``table`` of each module: the module's path, their name, and they. A
    tensor in several places has the first, or if not ``each_once`` all of them.
    """
    seen: set[int] = set()
    for path, module in modules_by_path(root, each_once=each_once):
        for name, tensor in _table(module, table):
            if tensor is None or (each_once and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield path, name, tensor


def _table(module: nn.Module, name: str) -> tuple[tuple[str, Any], ...]:
    table = getattr(module, name)
    return tuple(table.items()) if table else ()
