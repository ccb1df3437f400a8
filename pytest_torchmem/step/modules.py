"""The modules in a module, and the tensors in their tables, in few steps of Python.

``nn.Module.named_modules`` is a generator for each level of the tree, in that of the level above.
What a program's class has in the place of torch's methods is not asked.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from pytest_torchmem.torch_private.tensors.tensors import CHILDREN


def modules_by_path(root: nn.Module, *, each_once: bool = True) -> list[tuple[str, nn.Module]]:
    """Return a module and those in it with their paths, in the order of ``named_modules``.

    A module in several places has the path of the first, or if not ``each_once`` all of them, but
    for places within itself: a child may have its parent.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    around: list[int] = []
    """The ids of the modules that the present one is in."""
    prefixes: list[str] = []
    """What their paths begin with."""
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        path, module = one = waiting.pop()
        if each_once:
            if id(module) in seen:
                continue
            seen.add(id(module))
        else:
            while around and not path.startswith(prefixes[-1]):
                around.pop()
                prefixes.pop()
            if id(module) in around:
                continue
            around.append(id(module))
            prefixes.append(f"{path}." if path else "")
        found.append(one)
        children = _table(module, CHILDREN)
        if children:
            prefix = f"{path}." if path else ""
            waiting += [
                (prefix + name, child) for name, child in reversed(children) if child is not None
            ]
    return found


def tensors_by_path(
    root: nn.Module, table: str, *, each_once: bool = True
) -> Iterator[tuple[str, str, Any]]:
    """Yield the tensors in a ``table`` of each module: the module's path, their name, and they.

    A tensor in several places has the first, or if not ``each_once`` all of them.
    """
    yield from tensors_in_tables(modules_by_path(root, each_once=each_once), table, each_once)


def tensors_in_tables(
    modules: Iterable[tuple[str, nn.Module]], table: str, each_once: bool = True
) -> Iterator[tuple[str, str, Any]]:
    """Yield the same of modules that are known with their paths."""
    seen: set[int] = set()
    for path, module in modules:
        for name, tensor in _table(module, table):
            if tensor is None or (each_once and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield path, name, tensor


def _table(module: nn.Module, name: str) -> tuple[tuple[str, Any], ...]:
    table = getattr(module, name)
    return tuple(table.items()) if table else ()
