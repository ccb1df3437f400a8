"""Clones of a step's module and inputs: the user's own are never changed, moved or run."""

from __future__ import annotations

import copy
import copyreg
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import compress
from operator import not_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.errors import add_note
from pytest_torchmem.step.clone_functions import FunctionCloner, Parts, holds_nothing, partial_of
from pytest_torchmem.step.signals import undisturbed
from pytest_torchmem.torch_private.tensors.tensors import (
    accumulated_hooks,
    gradient_hooks,
    make_subclass,
)

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_COMPRESSED = frozenset((*_BY_ROWS, *_BY_COLUMNS))
_TENSORS = frozenset((Tensor, nn.Parameter))
"""Classes of tensors that are no more than their elements, if they are strided."""
_SHARED = frozenset(
    {
        *(type(None), bool, int, float, complex, bytes, str, range, type, type(...)),
        *(types.BuiltinFunctionType, types.CodeType, property),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
"""Types of which a copy is the same; torch's own here do not change."""
_HOLDING = frozenset({types.FunctionType, weakref.ref})
"""Types of which ``copy.deepcopy`` makes no other, and that may hold what is copied."""
_TABLES = frozenset({dict, OrderedDict})
_STRING = frozenset({str})
_COPY_RULES: Mapping[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
_OWN_RULES = ("__deepcopy__", "__getnewargs_ex__", "__getnewargs__")
_OF_MODULES = frozenset(nn.Module().__dict__)
"""What every module has, unless it was saved by an earlier torch."""
_RULES_OF_ONE = ("__deepcopy__", "__reduce_ex__", "__getstate__")
_ABSENT: Any = object()
_HOOK_OF_ORIGINAL = (
    "(A hook of a parameter was called with a copy of it, on which the step runs, and did not find "
    "that among what it has. Check or trace a function that builds the model and registers hooks.)"
)


def _is_bare(table: Any) -> bool:
    """Return whether a table has no attributes of its own."""
    return type(table) is dict or not table.__dict__


class Cloner(ABC):
    """Deep copies in which every tensor, wherever it is found, is cloned once.

    Functions that hold parts of a module (``clone_functions.py``) hold those of its copy. What
    becomes of a tensor is for a subclass to say; without a device it stays where it is.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []
        """What nobody else may hold, so that its id stays its own."""
        self._left_to_torch: set[int] = set()
        """Tensors that are copied as torch itself does, by their ids."""
        self._plain: dict[type, bool] = {}
        """Whether objects of a class are nothing but their attributes."""
        self._parts = Parts()
        self._cloning_on: int | None = None
        """The thread on which ``copy.deepcopy`` clones tensors in this way."""

    @abstractmethod
    def clone_strided(self, tensor: Tensor) -> Tensor:
        """Return a clone of a tensor's elements, without gradient and attributes."""

    @abstractmethod
    def clone_compressed(self, tensor: Tensor) -> Tensor:
        """Return the same of a compressed sparse tensor."""

    @abstractmethod
    def clone_special(self, tensor: Tensor) -> Tensor:
        """Return a whole clone of a tensor that is neither, nor jagged."""

    def is_strided(self, tensor: Tensor) -> bool:
        """Return whether a tensor is nothing but its elements in a storage."""
        return tensor.layout is torch.strided and not tensor.is_quantized

    def clone(self, value: Any) -> Any:
        """Return a deep copy of ``value``, with the clones of its tensors."""
        self._parts.begin(value)
        return self.copy(value)

    def clone_with(self, function: Any) -> Any:
        """Return what goes with the clones: the clone of a module, a function that holds clones
        where the given one holds what was cloned, and all else as it is.
        """
        if isinstance(function, nn.Module):
            return self.clone(function)
        return FunctionCloner(self, self._parts).clone(function)

    def copied(self, value: Any) -> Any:
        """Return the copy that was made of ``value``, or None."""
        return self._memo.get(id(value))

    def copy(self, value: Any) -> Any:
        """Return what ``copy.deepcopy`` makes of ``value``, with the clones of its tensors.

        Modules and what they mostly consist of are copied here, by the same rules in a fraction of
        the time (Lib/copy.py); anything else by ``copy.deepcopy``.
        """
        kind = type(value)
        if kind in _SHARED:
            return value
        known = self._memo.get(id(value), _ABSENT)
        if known is not _ABSENT:
            return known
        if kind in _TABLES and _is_bare(value):
            return self._copy_table(value)
        if kind is list:
            items: list[Any] = self.remember(value, [])
            items.extend(map(self.copy, value))
            return items
        if kind is set:
            return self.remember(value, set(map(self.copy, value)))
        if kind is tuple:
            return self._copy_tuple(value)
        if kind is types.FunctionType and holds_nothing(value):
            return value
        if kind in _HOLDING:
            return FunctionCloner(self, self._parts).clone(value)
        if kind is partial:
            return self.remember(value, partial_of(value, self.copy))
        if isinstance(value, Tensor):
            return self._copy_as_python(value) if self._left_to_torch else self.clone_tensor(value)
        plain = self._plain.get(kind)
        if plain is None:
            plain = self._plain[kind] = _is_plain(kind)
        if plain and value.__dict__.keys().isdisjoint(_RULES_OF_ONE):
            return self._copy_object(value)
        return self._copy_as_python(value)

    def _copy_table(self, table: Any) -> Any:
        """Copy a dictionary; what needs no copy is taken over without a step of Python for each."""
        if not _STRING.issuperset(map(type, table)):
            made = self.remember(table, type(table)())
            for key, item in table.items():
                made[self.copy(key)] = self.copy(item)
            return made
        made = self.remember(table, table.copy())
        memo, originals = self._memo, self._originals
        shared = map(_SHARED.__contains__, map(type, table.values()))
        for name in compress(table, map(not_, shared)):
            item = made[name]
            kind: Any = type(item)
            if kind not in _TABLES or item or id(item) in memo:
                made[name] = self.copy(item)
            elif kind is dict or not item.__dict__:
                made[name] = memo[id(item)] = kind()  # as most tables of a module are
                originals.append(item)
            else:
                made[name] = self.copy(item)
        return made

    def _copy_tuple(self, value: tuple[Any, ...]) -> Any:
        made = tuple([self.copy(item) for item in value])
        known = self._memo.get(id(value), _ABSENT)
        if known is not _ABSENT:  # it is part of itself
            return known
        same = all(one is other for one, other in zip(value, made, strict=True))
        return value if same else self.remember(value, made)

    def _copy_object(self, value: Any) -> Any:
        """Copy an object that is nothing but its attributes, which it gets when all are there."""
        made = self.remember(value, value.__class__.__new__(value.__class__))
        state = value.__getstate__() if _has_state(type(value)) else value.__dict__ or None
        if state is not None:
            state = self.copy(state)
            rule = getattr(type(made), "__setstate__", None)
            if rule is nn.Module.__setstate__ and state.keys() >= _OF_MODULES:
                made.__dict__.update(state)  # it makes what is not there
            elif hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                made.__dict__.update(state)
        return made

    def _copy_as_python(self, value: Any) -> Any:
        if self._cloning_on == threading.get_ident():
            return copy.deepcopy(value, self._memo)
        with self._cloning():
            return copy.deepcopy(value, self._memo)

    def remember(self, value: Any, made: Any) -> Any:
        """Let ``made`` be the copy of ``value``, and return it."""
        self._memo[id(value)] = made
        self._originals.append(value)
        return made

    def clone_tensor(self, tensor: Tensor) -> Tensor:
        """Return the clone of one tensor, with its gradient and attributes."""
        known: Tensor | None = self._memo.get(id(tensor))
        if known is not None:
            return known
        strided, layout = False, tensor.layout
        if type(tensor) in _TENSORS and layout is torch.strided and self.is_strided(tensor):
            clone, strided = _as_leaf(self.clone_strided(tensor), tensor), True
        elif is_lazy(tensor):
            kind: Any = type(tensor)
            device = self.device or tensor.device
            clone = kind(tensor.requires_grad, device=device, dtype=tensor.dtype)
        elif layout is torch.jagged:
            clone = self._clone_jagged(tensor)
        elif layout in _COMPRESSED:
            clone = _as_leaf(self.clone_compressed(tensor), tensor)
        elif self.is_strided(tensor):
            clone, strided = _as_leaf(self.clone_strided(tensor), tensor), True
        else:
            clone = self.clone_special(tensor)
        self._memo[id(tensor)] = clone
        self._originals.append(tensor)
        if strided:
            if tensor.__dict__:
                clone.__dict__.update(self.copy(tensor.__dict__))
            if tensor.requires_grad:
                self._copy_hooks(tensor, clone)
            if tensor.is_leaf and tensor.grad is not None:
                clone.grad = self.clone_tensor(tensor.grad)
        return clone

    def _copy_hooks(self, tensor: Tensor, clone: Tensor) -> None:
        """Let what is called with a leaf's gradient be called with that of its clone."""
        of_gradient, accumulated = gradient_hooks(tensor), accumulated_hooks(tensor)
        if not tensor.is_leaf or not (of_gradient or accumulated):
            return
        for hook in list((of_gradient or {}).values()):
            clone.register_hook(_on_clone(self.copy(hook)))
        for hook in list((accumulated or {}).values()):
            clone.register_post_accumulate_grad_hook(_on_clone(self.copy(hook)))

    def copy_as_torch_does(self, tensor: Tensor) -> Tensor:
        """Return what ``copy.deepcopy`` makes of a tensor."""
        self._left_to_torch.add(id(tensor))
        try:
            return cast(Tensor, self._copy_as_python(tensor))
        finally:
            self._left_to_torch.discard(id(tensor))

    def _clone_jagged(self, tensor: Any) -> Tensor:
        """Clone values and offsets; a deep copy would go with no other of the same offsets."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: self.clone_tensor(getattr(tensor, name)) for name in names}
        clone: Tensor = type(tensor).__tensor_unflatten__(
            inner, context, tensor.shape, tensor.stride()
        )
        return clone

    @contextmanager
    def _cloning(self) -> Iterator[None]:
        """Have ``copy.deepcopy`` on this thread clone tensors in this way."""
        originals: dict[Any, Any] = {
            kind: kind.__dict__["__deepcopy__"]
            for kind in {Tensor} | _subclasses(Tensor)
            if "__deepcopy__" in kind.__dict__
        }
        thread = threading.get_ident()
        # Weakly: what torch imports meanwhile may keep the function (``torch.overrides``).
        cloner = weakref.ref(self)

        def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
            def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
                here = cloner() if threading.get_ident() == thread else None
                if here is None or id(tensor) in here._left_to_torch:
                    return original(tensor, memo)
                return here.clone_tensor(tensor)

            return deepcopy

        def put_back() -> None:
            while originals:
                kind, original = next(reversed(originals.items()))
                kind.__deepcopy__ = original
                del originals[kind]

        try:
            with undisturbed():
                for kind, original in originals.items():
                    kind.__deepcopy__ = replacement(original)
            self._cloning_on = thread
            yield
        finally:
            self._cloning_on = None
            try:
                with undisturbed():
                    put_back()
            finally:
                put_back()  # what a signal kept the first from putting back


def _on_clone(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a hook of a parameter that says on an error that it ran on another one's clone."""

    def called(tensor: Tensor) -> Any:
        try:
            return hook(tensor)
        except LookupError as error:
            add_note(error, _HOOK_OF_ORIGINAL)
            raise

    return called


class _Plain:
    """What is nothing but its attributes."""


def _is_plain(kind: Any) -> bool:
    """Return whether ``copy.deepcopy`` makes an object of a class and copies its attributes."""
    return (
        kind.__basicsize__ == _Plain.__basicsize__
        and kind.__dictoffset__ == _Plain.__dictoffset__
        and kind.__weakrefoffset__ == _Plain.__weakrefoffset__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind not in copyreg.dispatch_table
        and kind not in _COPY_RULES
        and (hasattr(kind, "__setstate__") or not _has_state(kind))
        and not any(hasattr(kind, name) for name in _OWN_RULES)
    )


def _has_state(kind: Any) -> bool:
    """Return whether a class says itself what its objects consist of."""
    return getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)


def compressed_parts(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the compressed and the plain indices of a compressed sparse tensor, and its values."""
    plain = tensor.detach()
    if tensor.layout in _BY_ROWS:
        return plain.crow_indices(), plain.col_indices(), plain.values()
    return plain.ccol_indices(), plain.row_indices(), plain.values()


def _as_leaf(clone: Tensor, tensor: Tensor) -> Tensor:
    """Return a clone as the leaf that ``tensor`` is: a parameter, or a tensor with a gradient."""
    if type(tensor) is nn.Parameter:
        return make_subclass(nn.Parameter, clone, tensor.requires_grad)  # type: ignore[no-any-return]
    if not isinstance(tensor, nn.Parameter):
        return clone.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(clone, requires_grad=tensor.requires_grad)
    parameter.__class__ = type(tensor)
    return parameter


def _subclasses(kind: type) -> set[type]:
    found: set[type] = set()
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        found |= {subclass} | _subclasses(subclass)
    return found
