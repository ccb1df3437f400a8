"""Deep copies of objects, by the rules of ``copy.deepcopy`` (Lib/copy.py) in a part of the time.

Beyond these rules, functions hold the copies of what they held, what cannot be copied is shared
alone, and a module has a copy whatever its class says.
"""

from __future__ import annotations

import copy
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import compress
from operator import not_
from pickle import PickleError
from typing import Any

import torch
from torch import Tensor, nn

from pytest_torchmem.errors import TorchmemError
from pytest_torchmem.step.clone_functions import FunctionCloner, Parts, holds_nothing, partial_of
from pytest_torchmem.step.copy_rules import (
    COPY_RULES,
    RULES_OF_ONE,
    give_state,
    has_own_rule,
    has_state,
    in_slots,
    is_of_attributes_alone,
    is_plain,
    new_of,
    reduced,
    says_its_copy,
    weak_items,
)
from pytest_torchmem.torch_private.tensors.tensors import BUFFERS, CHILDREN, PARAMETERS

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
_OF_MODULES = frozenset(nn.Module().__dict__)
"""What every module has, unless it was saved by an earlier torch."""
NOT_COPIED = (TypeError, ValueError, AttributeError, PickleError, copy.Error, RuntimeError)
"""What is raised where a lock, a file or a handle is met, or by a class that wants no copies."""
NOT_CAUGHT = (TorchmemError, torch.OutOfMemoryError)
"""What of this is told all the same."""
_LEAST_ID = 1 << 20
"""No address of an object is smaller."""
_ABSENT: Any = object()


def _is_bare(table: Any) -> bool:
    """Return whether a table has no attributes of its own."""
    return type(table) is dict or not table.__dict__


class ObjectCopier(ABC):
    """Deep copies in which tensors are what a subclass makes of them."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []
        """What nobody else may hold, so that its id stays its own."""
        self._plain: dict[type, bool] = {}
        """Whether objects of a class are nothing but their attributes."""
        self._says_its_copy: dict[type, bool] = {}
        """Whether a class of modules does."""
        self._parts = Parts()
        self._of_tensor: Exception | None = None
        """Why a tensor has no copy, for which what holds it is not shared."""
        self._by_ids: list[Any] = []
        """Copies of dictionaries and sets whose keys may be ids."""

    @abstractmethod
    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """Return what takes the place of a tensor."""

    @abstractmethod
    def copy_as_python(self, value: Any) -> Any:
        """Return what ``copy.deepcopy`` makes of an object whose class has a rule of its own."""

    def clone(self, value: Any) -> Any:
        """Return a deep copy of ``value``, with the clones of its tensors.

        What cannot be copied (a lock, a file, a generator) is shared.
        """
        self._parts.begin(value)
        made = self.copy(value)
        while self._by_ids:
            _exchange_ids(self._by_ids.pop(), self._memo)
        return made

    def clone_with(self, function: Any) -> Any:
        """Return what goes with the clones: the clone of a module, a function that holds clones
        where the given one holds what was cloned, and all else as it is.
        """
        if isinstance(function, nn.Module):
            return self.clone(function)
        self._parts.elsewhere.clear()  # without the global variables that are named
        return FunctionCloner(self, self._parts, named=True).clone(function)

    def copied(self, value: Any) -> Any:
        """Return the copy that was made of ``value``, or None."""
        return self._memo.get(id(value))

    def remember(self, value: Any, made: Any) -> Any:
        """Let ``made`` be the copy of ``value``, and return it."""
        self._memo[id(value)] = made
        self._originals.append(value)
        return made

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
            return self._with_ids(self.remember(value, set(map(self.copy, value))))
        if kind is tuple:
            return self._copy_tuple(value)
        if kind is types.FunctionType and holds_nothing(value):
            return value
        if kind in _HOLDING:
            return FunctionCloner(self, self._parts).clone(value)
        if kind is partial:
            return self.remember(value, partial_of(value, self.copy))
        if isinstance(value, Tensor):
            try:
                return self.copy_tensor(value)
            except Exception as error:
                self._of_tensor = error
                raise
        return self._copy_or_share(value)

    def _copy_or_share(self, value: Any) -> Any:
        """Copy an object by the rule of its class; one that has no copy is its own."""
        known = len(self._memo)
        try:
            made = self._copy_by_rule(value)
        except NOT_COPIED as error:
            if error is self._of_tensor or isinstance(error, NOT_CAUGHT):
                raise
            made = value
            self._forget_since(known)
        if isinstance(value, nn.Module) and not self._is_copy(made, value):
            return self._copy_attributes(value)
        return made if id(value) in self._memo else self.remember(value, made)

    def _copy_by_rule(self, value: Any) -> Any:
        kind = type(value)
        plain = self._plain.get(kind)
        if plain is None:
            plain = self._plain[kind] = is_plain(kind)
        if plain and value.__dict__.keys().isdisjoint(RULES_OF_ONE):
            return self._copy_object(value)
        if kind is types.MethodType:
            return types.MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if kind is weakref.WeakMethod:
            method = value()
            return value if method is None else weakref.WeakMethod(self.copy(method))
        if kind in weakref.ProxyTypes:
            return weakref.proxy(self.copy(value.__init__.__self__))
        if kind is types.MappingProxyType:
            return types.MappingProxyType(self.copy(dict(value)))
        if kind in COPY_RULES or issubclass(kind, type):
            return value
        if (items := weak_items(value)) is not None:
            return self._copy_weakly(value, items)
        if isinstance(value, torch.jit.ScriptModule):
            return self._copy_scripted(value)
        if isinstance(value, nn.Module) and is_of_attributes_alone(value):
            return self._copy_attributes(value)
        if has_own_rule(value):
            return self.copy_as_python(value)
        return self._reconstruct(value, *reduced(value))

    def _forget_since(self, known: int) -> None:
        """Forget what was copied since there were so many, but for tensors, which are booked."""
        for key in list(self._memo)[known:]:
            if not isinstance(self._memo[key], Tensor) and key != id(self._memo):
                del self._memo[key]

    def _is_copy(self, made: Any, module: nn.Module) -> bool:
        """Return whether a module of its own tensors was made: a class may say it is its copy."""
        if made is module:
            return False
        kind = type(module)
        says = self._says_its_copy.get(kind)
        if says is None:
            says = self._says_its_copy[kind] = says_its_copy(kind)
        says = says or "__deepcopy__" in module.__dict__
        if not says or isinstance(made, torch.jit.ScriptModule):
            return True
        for table in (PARAMETERS, BUFFERS, CHILDREN):
            own, other = module.__dict__.get(table), made.__dict__.get(table)
            for name, one in (own or {}).items():
                if one is not None and (other or {}).get(name) is not self._memo.get(id(one), one):
                    return False
        return True

    def _copy_attributes(self, value: nn.Module) -> Any:
        """Copy a module attribute by attribute, whatever its class says."""
        made = self.remember(value, object.__new__(type(value)))
        for name, one in in_slots(value):
            object.__setattr__(made, name, self.copy(one))
        own = nn.Module.__getstate__(value)
        made.__dict__.update((name, self.copy(one)) for name, one in own.items())
        return made

    def _copy_scripted(self, value: Any) -> Any:
        """Copy a module that C++ has, whose deep copy has tensors that are no leaves."""
        whole = self.copy_scripted(value)
        pairs = zip(value.modules(), whole.modules(), strict=True)
        for one, made in [*pairs]:
            for name, tensor in (*getattr(one, PARAMETERS).items(), *getattr(one, BUFFERS).items()):
                if tensor is not None:
                    setattr(made, name, self.copy(tensor))
            self.remember(one, made)
        return whole

    def copy_scripted(self, module: Any) -> Any:
        """Return the deep copy of a scripted module, of which C++ copies the tensors."""
        return self.copy_as_python(module)

    def _copy_weakly(self, value: Any, items: list[tuple[Any, Any]]) -> Any:
        """Copy what refers weakly to its keys or values: to copies of those that have one."""
        made = self.remember(value, value.copy())
        made.clear()
        for key, one in items:
            if isinstance(value, weakref.WeakSet):
                made.add(self._copy_of_part(key))
            else:
                weak = isinstance(value, weakref.WeakValueDictionary)
                copied = self._copy_of_part(one) if weak else self.copy(one)
                made[self.copy(key) if weak else self._copy_of_part(key)] = copied
        return made

    def _copy_of_part(self, value: Any) -> Any:
        """Return the copy of something that is a part of what is copied, and lives on in it."""
        known = self._memo.get(id(value), _ABSENT)
        return self.copy(value) if known is not _ABSENT or value in self._parts else value

    def _reconstruct(
        self,
        value: Any,
        make: Callable[..., Any],
        args: tuple[Any, ...] = (),
        state: Any = None,
        items: Any = None,
        pairs: Any = None,
        *_: Any,
    ) -> Any:
        """Make an object anew of what it says it consists of, as ``copy._reconstruct`` does."""
        made = make(*map(self.copy, args))
        if made is value:  # its class has one object
            return value
        self.remember(value, made)
        if state is not None:
            give_state(made, self.copy(state))
        for one in items or ():
            made.append(self.copy(one))
        for key, one in pairs or ():
            made[self.copy(key)] = self.copy(one)
        return self._with_ids(made) if pairs is not None else made

    def _with_ids(self, made: Any) -> Any:
        """Take note of a copy whose keys may be ids, which those of copies take the place of."""
        first = next(iter(made), None)
        if type(first) is int and first >= _LEAST_ID:
            self._by_ids.append(made)
        return made

    def _copy_table(self, table: Any) -> Any:
        """Copy a dictionary; what needs no copy is taken over without a step of Python for each."""
        if not _STRING.issuperset(map(type, table)):
            made = self.remember(table, type(table)())
            for key, item in table.items():
                made[self.copy(key)] = self.copy(item)
            return self._with_ids(made)
        made = self.remember(table, table.copy())
        memo = self._memo
        shared = map(_SHARED.__contains__, map(type, table.values()))
        for name in compress(table, map(not_, shared)):
            item = made[name]
            kind: Any = type(item)
            if kind not in _TABLES or item or id(item) in memo:
                made[name] = self.copy(item)
            elif kind is dict or not item.__dict__:
                made[name] = memo[id(item)] = kind()  # as most tables of a module are
                self._originals.append(item)
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
        new = new_of(value)
        if new is value:
            return value
        made = self.remember(value, new)
        state = value.__getstate__() if has_state(type(value)) else value.__dict__ or None
        if state is not None:
            state = self.copy(state)
            rule = getattr(type(made), "__setstate__", None)
            if rule is nn.Module.__setstate__ and state.keys() >= _OF_MODULES:
                made.__dict__.update(state)  # it makes what is not there
            else:
                give_state(made, state)
        return made


def _exchange_ids(table: Any, copies: dict[int, Any]) -> None:
    """Put ids of copies in the place of those of what they are copies of."""
    if not any(type(key) is int and key in copies for key in table):
        return
    if isinstance(table, set):
        keys = {id(copies[key]) if type(key) is int and key in copies else key for key in table}
        table.clear()
        table.update(keys)
        return
    items = [*table.items()]
    table.clear()
    for key, one in items:
        table[id(copies[key]) if type(key) is int and key in copies else key] = one
