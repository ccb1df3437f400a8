"""What a program can reach and change, and what it held, so that it can be run again as if for the
first time.

That are variables, containers, attributes of objects and classes, and names that are bound
elsewhere: in a cell, a class, slots or globals. A program may be traced several times: on each
device, and once more with real values. What it writes down in objects that it did not make itself
(an optimizer's state, ``self.calls += 1``, a list of losses, a table in a cache) would be there in
the next run, with tensors of a trace that is over.
"""

import copyreg
import operator
import random
import sys
import types
from abc import ABCMeta
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dis import opmap
from enum import EnumMeta, IntEnum
from functools import cached_property, lru_cache, partial
from gc import get_referents, is_tracked
from io import BytesIO, StringIO
from itertools import chain, compress, repeat
from operator import itemgetter
from types import MappingProxyType, ModuleType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pytest_torchmem.step.generators import set_state_of, state_of
from pytest_torchmem.step.imports import is_installed
from pytest_torchmem.torch_private.tensors import BUFFERS, CHILDREN, PARAMETERS, UNSAVED_BUFFERS

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_DESCRIPTORS = (
    *FUNCTIONS,
    staticmethod,
    classmethod,
    property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
"""What classes hold that is no state of a program."""
_NO_STATE = frozenset(_DESCRIPTORS)


class Names:
    """What is bound in one place: names and values, read anew each time."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        bind: Callable[[str, Any], object],
        unbind: Callable[[str], object],
    ) -> None:
        self.read, self._bind, self._unbind = read, bind, unbind

    def write(self, contents: dict[str, Any]) -> None:
        """Bind these and no others; a class may not let itself be changed."""
        now = self.read()
        for name, value in contents.items():
            if name not in now or now[name] is not value:
                with suppress(Exception):
                    self._bind(name, value)
        for name in now.keys() - contents.keys():
            with suppress(AttributeError, TypeError, KeyError):
                self._unbind(name)


def names_of_cell(cell: types.CellType) -> Names:
    def read() -> dict[str, Any]:
        try:
            return {"cell_contents": cell.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    return Names(read, partial(setattr, cell), partial(delattr, cell))


def names_of_globals(variables: dict[str, Any], names: Collection[str]) -> Names:
    """Return variables of a module but for other modules, which it has once they are imported."""

    def read() -> dict[str, Any]:
        bound = [name for name in names if name in variables]
        return {one: variables[one] for one in bound if type(variables[one]) is not ModuleType}

    return Names(read, variables.__setitem__, variables.__delitem__)


def names_of_class(kind: type) -> Names:
    """Return the attributes of a class that are no methods."""

    def read() -> dict[str, Any]:
        return {
            name: one
            for name, one in dict(vars(kind)).items()
            if type(one) not in _NO_STATE  # as most are: methods
            and not name.startswith(("__", "_abc_"))
            and not isinstance(one, _DESCRIPTORS)
        }

    return Names(read, partial(setattr, kind), partial(delattr, kind))


def names_of_slots(one: Any) -> Names | None:
    """Return the slots of an object, ``None`` if its class has none."""
    names = copyreg._slotnames(type(one))  # type: ignore[attr-defined]
    if not names:
        return None

    def read() -> dict[str, Any]:
        return {name: getattr(one, name) for name in names if hasattr(one, name)}

    return Names(read, partial(object.__setattr__, one), partial(object.__delattr__, one))


def is_generator(one: Any) -> bool:
    """Return whether something is a generator of random numbers, of torch, Python or numpy."""
    kinds = type(one).__mro__
    if torch.Generator in kinds or random.Random in kinds:
        return one is not torch.default_generator  # which every trace puts back
    return str(type(one).__module__).startswith("numpy.random.")


def names_of_state(one: Any) -> Names | None:
    """Return what a generator, an array or a text in memory holds, ``None`` of anything else."""
    get: Callable[[], Any]
    put: Callable[[Any], object]
    kind = type(one)
    if kind is torch.Generator:
        get, put = partial(state_of, one), partial(set_state_of, one)
    elif is_generator(one) or kind in (StringIO, BytesIO):
        one = getattr(one, "bit_generator", one)
        get, put = one.__getstate__, one.__setstate__
    elif kind in (bytearray, array) or (kind.__name__, kind.__module__) == ("ndarray", "numpy"):
        if (getattr(one, "nbytes", 0) or len(one)) > _MOST_BYTES:
            return None
        get, put = partial(copy, one), partial(one.__setitem__, slice(None))
    else:
        return None

    def read() -> dict[str, Any]:
        with suppress(NotImplementedError, ValueError):  # ``SystemRandom``, a text that is closed
            state = get()
            return {"": lambda: state}  # which is held, and is no object of the program's
        return {}

    return Names(read, lambda _, state: put(state()), lambda _: None)


#: The most objects that are looked at, and bytes of an array that are noted: behind that, a program
#: has data rather than state.
_MOST, _MOST_BYTES = 50_000, 1 << 16
_LEVELS = 3
"""Levels of containers and objects that are looked into where there is no end to them."""
MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
SEQUENCES = frozenset({list, deque})
CHANGEABLE = MAPPINGS | SEQUENCES | {set}
CONTAINERS = CHANGEABLE | {tuple, frozenset}
#: Where state belongs to the interpreter, the test run, torch or a trace, not to the program.
_OTHERS = frozenset({"_pytest", "pytest", "pluggy", "xdist", "execnet", "torch", "pytest_torchmem"})
_OTHERS |= sys.stdlib_module_names - {"argparse", "collections", "types"}
_WITHOUT_STATE = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    Tensor,
    str,
    bytes,
    int,
    float,
    complex,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
#: What takes no memory of a device, and holds nothing that does.
PLAIN = (type, *(kind for kind in _WITHOUT_STATE if kind is not Tensor), type(None))
_QUICK = frozenset({bool, *PLAIN}) - {type}
"""The same for most objects, told by their own type."""
CODE = (type, types.ModuleType, *FUNCTIONS)
_QUICK_CODE = frozenset({ABCMeta, *CODE})
"""Types of most of what a file defines."""
_CALLED = frozenset({types.FunctionType, types.MethodType, partial})
_FOLLOWED = _CALLED | CONTAINERS
_STAYS = frozenset(vars(nn.Module())) - {BUFFERS, CHILDREN, UNSAVED_BUFFERS}
"""Attributes of every module that do not change with a step; of parameters there is a list."""
_STORES = frozenset({opmap["STORE_GLOBAL"], opmap["DELETE_GLOBAL"]})
_STORES_ATTRIBUTES = frozenset({opmap["STORE_ATTR"], opmap["DELETE_ATTR"]})


class Scope(IntEnum):
    """Whose something is; what is no program's own, others use, too."""

    OWN = 0
    MODULE = 1
    """An attribute of a module or an optimizer, or in one."""
    GLOBAL = 2
    """A global variable, an attribute of a class, or in one."""
    OF_METHODS = 3
    """What only methods name of these, or have at hand: what they have been called with, say."""


WHOLE = frozenset({Scope.OWN, Scope.MODULE, Scope.GLOBAL})
"""What a step of a module leaves as it was."""


Holder = tuple[Any, Scope]
"""A container or ``Names``, whose contents a program can change, and whose that is."""


class Reached:
    """What can be changed of all that a function, or a module's forward, can reach.

    Functions are followed through closures, defaults and the globals that they name, and those of
    the program's own files through the modules that they name. So are methods of its classes. Of
    other classes, and of the files that define modules, only what stands there is looked at: there
    is no end to what a library's functions name.
    """

    def __init__(self, target: Callable[..., Any] | None, *arguments: Any) -> None:
        self.holders: list[Holder] = []
        self.parameters: list[dict[str, Tensor | None]] = []
        """Tables of modules' parameters."""
        self.tensors: list[ref[Tensor]] = []
        """Other tensors."""
        self.modules: list[ref[nn.Module]] = []
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self.settings: list[dict[str, Any]] = []
        """Attributes of objects of other classes that hold tensors, such as moving averages."""
        self._seen: dict[int, Any] = {}
        """What was looked at, by its id: it lives on, so that no other object gets its address."""
        self._kinds: dict[type, None] = {}
        self._looked_at = 0
        """Of how many of these the attributes were noted."""
        self._called: list[tuple[Any, Scope]] | None = []
        """Functions, which are followed when all is found that the arguments hold."""
        self._at_classes = False
        """Whether no more is looked at than what stands there."""
        self._waiting: dict[Scope, list[Any]] = {scope: [] for scope in Scope}
        roots = [target, *arguments]
        held = (one for one in roots if isinstance(one, nn.Module) or not callable(one))
        self._waiting[Scope.OWN] += held
        self._walk_scopes(Scope.OWN, Scope.MODULE)
        self._held = len(self.parameters), len(self.tensors)
        self._waiting[Scope.OWN] += roots
        called, self._called = self._called, None
        for function, scope in called:
            self._waiting[scope] += self._of_callable(function, scope)
        self._walk_scopes(Scope.OWN, Scope.MODULE, Scope.GLOBAL)
        self._look_at_classes(Scope.GLOBAL)
        self._walk_scopes(*Scope)
        self._look_at_classes(Scope.OF_METHODS)
        self._seen.clear()

    def every_tensor(self, *, held: bool = False) -> Iterator[Tensor]:
        """Yield the tensors that were found, or those ``held`` by more than functions."""
        parameters, tensors = self._held if held else (None, None)
        for table in self.parameters[:parameters]:
            yield from (one for one in table.values() if one is not None)
        found = (one() for one in self.tensors[:tensors])
        yield from (one for one in found if one is not None)

    def _walk_scopes(self, *scopes: Scope) -> None:
        for scope in scopes:
            while (waiting := self._waiting[scope]) and len(self._seen) < _MOST:
                self._waiting[scope] = []
                self._walk(waiting, scope)

    def _walk(self, waiting: list[Any], scope: Scope, levels: int = _MOST) -> None:
        seen, holders = self._seen, self.holders
        while waiting and levels and len(seen) < _MOST:
            found: list[Any] = []
            for one in waiting:
                kind, number = type(one), id(one)
                if kind in _QUICK or number in seen:
                    continue
                if kind in CHANGEABLE and not one:
                    seen[number] = one
                    holders.append((one, scope))
                elif kind in _FOLLOWED or not isinstance(one, _WITHOUT_STATE):
                    seen[number] = one
                    found += self._inside(one, scope)
                elif isinstance(one, Tensor):
                    self.tensors.append(Weak(one))
            waiting, levels = found, levels - 1

    def _inside(self, one: Any, scope: Scope) -> Iterable[Any]:
        """Note what can be changed of an object, and return where to look next."""
        kind = type(one)
        if kind in CONTAINERS:
            if kind in CHANGEABLE:
                self.holders.append((one, scope))
            return [*(one.values() if kind in MAPPINGS else one)] if one else ()
        if kind in _CALLED:
            if self._called is None:
                return self._of_callable(one, scope)
            self._called.append((one, scope))
        elif isinstance(one, type):
            self._note_class(one)
        elif (container := container_of(kind)) is not None:
            if container in CHANGEABLE:
                self.holders.append((one, scope))
            values = container.values if container in MAPPINGS else container.__iter__
            return [*values(one), *self._of_object(one, scope)]
        else:
            if (state := names_of_state(one)) is not None:
                self.holders.append((state, Scope.MODULE if is_generator(one) else scope))
            if is_of_program(kind):
                return self._of_object(one, scope)
            if type(own := getattr(one, "__dict__", None)) is dict and "__wrapped__" in own:
                return (own["__wrapped__"],)  # a function whose results are cached
        return ()

    def _of_callable(self, one: Any, scope: Scope) -> Iterable[Any]:
        if type(one) is types.FunctionType:
            return self._of_function(one, scope)
        if type(one) is types.MethodType:
            return one.__self__, one.__func__
        return one.func, one.args, one.keywords

    def _of_function(self, function: types.FunctionType, scope: Scope) -> Iterator[Any]:
        """Yield what a function has at hand, and note the globals that it names."""
        for cell in function.__closure__ or ():
            names = names_of_cell(cell)
            self.holders.append((names, scope))
            yield from names.read().values()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield wrapped
        # of the interpreter, pytest or torch
        if ((function.__module__ or "").partition(".")[0] in _OTHERS) or self._at_classes:
            return
        named, operations = _names_in(function.__code__)
        own, places = not is_installed(function.__code__.co_filename), [function.__globals__]
        if own and opmap["IMPORT_NAME"] in operations:
            package = str(places[0].get("__package__"))
            folders = "", f"{package}.", f"{package.rpartition('.')[0]}."
            imported = {f"{folder}{name}" for folder in folders for name in named}
            imported = set(filter(_is_own, imported & sys.modules.keys()))
            places += [vars(sys.modules[one]) for one in imported]
        stores, scope = _STORES, max(scope, Scope.GLOBAL)
        for variables in places:
            found = [variables[name] for name in named if name in variables]
            self._waiting[scope] += found
            if not stores.isdisjoint(operations):
                self.holders.append((names_of_globals(variables, named), scope))
            if own:
                modules = (one for one in found if isinstance(one, ModuleType))
                others = (vars(one) for one in modules if _is_own(one.__name__))
                places += [one for one in others if not any(one is place for place in places)]
            stores = _STORES_ATTRIBUTES

    def _note_class(self, kind: type) -> None:
        """Note a class and its bases, and the methods and attributes of the program's own."""
        for base in kind.__mro__ if kind not in self._kinds else ():
            if base not in self._kinds:
                self._kinds[base] = None
                if _is_own(base.__module__):
                    for scope, one in _parts_of_class(base):
                        self._waiting[scope].append(one)

    def _of_object(self, one: Any, scope: Scope) -> list[Any]:
        """Note the attributes of an object, and return them; those of a module wait."""
        self._note_class(type(one))
        own, module = getattr(one, "__dict__", None), isinstance(one, nn.Module)
        inside: list[Any] = []
        if type(own) is dict and module:
            self.modules.append(Weak(one))
            self.holders.append((own, Scope.MODULE))
            waiting = self._waiting[max(scope, Scope.MODULE)]
            waiting += [own[name] for name in own if name not in _STAYS]
            self.parameters += [own[name] for name in (PARAMETERS,) if name in own]
        elif type(own) is dict:
            inside += own.values()
            if isinstance(one, _TRAINING):
                self.holders += [(held, Scope.MODULE) for held in (own, *_changeable_in(inside))]
                if isinstance(one, Optimizer):
                    self.optimizers.add(one)
            else:
                self.holders.append((own, scope))
                if type(one) is not types.SimpleNamespace and any(map(_is_trained, inside)):
                    self.settings.append(own)
        slots = names_of_slots(one)
        if slots is not None:
            self.holders.append((slots, scope))
            inside += slots.read().values()
        return inside

    def _look_at_classes(self, scope: Scope) -> None:
        """Note what can be changed of classes, and of the files that define those of modules."""
        kinds, self._at_classes = [*self._kinds][self._looked_at :], True
        self._looked_at = len(self._kinds)
        kinds = [kind for kind in kinds if str(kind.__module__).partition(".")[0] not in _OTHERS]
        places = [names_of_class(kind) for kind in kinds]
        files = {kind.__module__ for kind in kinds if issubclass(kind, nn.Module)}
        for file in files & sys.modules.keys():
            variables = vars(sys.modules[file])
            states = [
                name
                for name, kind in zip(variables, map(type, variables.values()), strict=True)
                if kind not in _QUICK_CODE and name[:2] != "__" and not issubclass(kind, CODE)
            ]
            places.append(names_of_globals(variables, states))
        self.holders += [(names, scope) for names in places]
        values = chain.from_iterable(names.read().values() for names in places)
        self._walk([one for one in values if not isinstance(one, nn.Module)], scope, _LEVELS)
        self._at_classes = False


_TRAINING = (Optimizer, LRScheduler, GradScaler)
"""What belongs to a program as its modules do."""


def _is_trained(one: Any) -> bool:
    """Return whether something is or holds a tensor, or is a module or an optimizer."""
    return isinstance(one, (nn.Module, *_TRAINING)) or holds_tensor(one, lambda _: True, 1)


def _changeable_in(values: Iterable[Any], levels: int = _LEVELS) -> Iterator[Any]:
    """Yield containers that can be changed, and those in them."""
    for one in values:
        if (container := container_of(type(one))) in CHANGEABLE:
            yield one
            if levels:
                inside = container.values(one) if container in MAPPINGS else items_of(one)
                yield from _changeable_in(inside, levels - 1)


def container_of(kind: type) -> Any:
    """Return which kind of container the objects of a class are, ``None`` if they are none.

    Those of a class that the program derived from one count, too: a cache that is a ``dict``. What
    changes them calls the kind's own methods, not theirs.
    """
    if kind in CONTAINERS:
        return kind
    if CONTAINERS.isdisjoint(kind.__mro__) or not is_of_program(kind):
        return None
    return next(base for base in kind.__mro__ if base in CONTAINERS)


def items_of(one: Any) -> list[Any]:
    """Return what is in a list, a deque, a set or a tuple."""
    return list(container_of(type(one)).__iter__(one))


_WITH_STATE = ("torch.optim", "torch.nn", "torch.distributions", "torch.amp", "torch.utils.hooks")
"""Modules of torch whose objects have state of the program."""


def is_of_program(kind: type) -> bool:
    """Return whether objects of a class have state of the program: optimizers and modules do."""
    if str(kind.__module__).startswith(_WITH_STATE):
        return True
    return str(kind.__module__).partition(".")[0] not in _OTHERS


def _is_own(module: str) -> bool:
    """Return whether a module is the program's own, and not of a library that is installed."""
    file, root = getattr(sys.modules.get(module), "__file__", None), module.partition(".")[0]
    return not (is_installed(file or "") or root in _OTHERS or root in sys.stdlib_module_names)


def _parts_of_class(kind: type) -> Iterator[tuple[Scope, Any]]:
    """Yield the functions that a class has in any form, and its other attributes."""
    for name, one in dict(vars(kind)).items():
        if isinstance(one, (*_DESCRIPTORS, cached_property)):
            functions = (part for part in (one, *get_referents(one)) if type(part) in _CALLED)
            yield from zip(repeat(Scope.OF_METHODS), functions)
        elif name[:2] != "__":
            yield Scope.GLOBAL, one


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[int]]:
    """Return the names of globals and attributes in the code of a function, and of those which it
    defines, and its operations.
    """
    within = [_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    names, operations = zip((code.co_names, code.co_code[::2]), *within, strict=True)
    return frozenset().union(*names), frozenset().union(*operations)


_HOLD_NOTHING = (*PLAIN, *FUNCTIONS)
_NOTHING_OF_INTEREST = (*_HOLD_NOTHING, nn.Module)
_EMPTY_KINDS = frozenset({*_HOLD_NOTHING, bool, ABCMeta, EnumMeta})
"""The same for most objects, told by their own type."""
_AS_THEY_ARE = _EMPTY_KINDS | CHANGEABLE
"""What is noted of objects of these types keeps none of the program's alive."""
_SETTINGS = (int, float, str)
_OF_TORCH = (Tensor, nn.Module)
GONE: Any = object()
"""Stands for what was there before, and is no more."""
_is_gone = partial(operator.is_, GONE)


class Reference:
    """What stands for something that is held elsewhere, or not kept alive."""

    __slots__ = ()

    def found(self) -> Any:
        """Return that, ``GONE`` if it is no more."""
        raise NotImplementedError


class Weak(Reference, ref):  # type: ignore[type-arg]
    """Stands for what is not kept alive; contents may be weak references themselves."""

    __slots__ = ()

    def found(self) -> Any:
        one = self()
        return GONE if one is None else one


class _Parts(Reference):
    """Stands for a tuple or a frozenset whose parts are not kept alive."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: type, parts: list[Any]) -> None:
        self.kind, self.parts = kind, parts

    def found(self) -> Any:
        parts = [*map(resolved, self.parts)]
        gone = any(one is GONE for one in parts)
        return GONE if gone else container_of(self.kind).__new__(self.kind, parts)


def resolved(one: Any) -> Any:
    """Return what was noted, ``GONE`` if it is no more."""
    return one.found() if isinstance(one, Reference) else one


def settled(contents: Any, now: Any) -> Any:
    """Return contents with what was noted in the place of what stands for it; what is gone of them
    stays as it is ``now``, or away.
    """
    found = mapped(resolved, contents)
    if not any(map(_is_gone, _parts(found))):  # as of most
        return found
    if isinstance(found, dict):
        kept = ((key, now.get(key, GONE) if one is GONE else one) for key, one in found.items())
        return {key: one for key, one in kept if key is not GONE and one is not GONE}
    return [one for one in found if one is not GONE]


def weakly(one: Any) -> Any:
    """Return what stands for something without keeping it alive, or a tensor in it. Containers that
    can be changed have their own contents noted, and are themselves.
    """
    kind = type(one)
    if kind in _EMPTY_KINDS or isinstance(one, _HOLD_NOTHING):
        return one
    container = container_of(kind)
    if container in CHANGEABLE:
        return one
    if container is not None:
        parts = items_of(one)
        return one if _hold_nothing(parts) else _Parts(kind, [*map(weakly, parts)])
    if not (is_tracked(one) and (isinstance(one, _OF_TORCH) or not is_of_program(kind))):
        return one  # it holds nothing, or its attributes were reached, and are held
    try:
        return Weak(one)
    except TypeError:  # ``SimpleNamespace`` for one, whose attributes are noted
        return one


class ProgramState:
    """The contents of all that a program can reach and change. What is held elsewhere is not held
    here: ``references`` stand for it, by its ids; and what the program may let go of no more than
    weakly, unless this ``keeps`` it. ``of_modules``: only modules and optimizers.
    """

    def __init__(
        self,
        reached: Reached,
        references: Mapping[int, Reference] = MappingProxyType({}),
        *,
        keeps: bool = False,
        of_modules: bool = False,
    ) -> None:
        def noted(one: Any) -> Any:
            return references.get(id(one)) or (one if keeps else weakly(one))

        self._noted: list[tuple[Any, Scope, Any]] = []
        self._empty: list[tuple[Any, Scope, Any]] = []
        """The same of containers that were empty, as most are."""
        for place, scope in chain(reached.holders, zip(reached.parameters, repeat(Scope.MODULE))):
            if of_modules and scope is not Scope.MODULE:
                continue
            contents = place.copy() if type(place) is dict else contents_of(place)
            if not contents and type(place) in CONTAINERS:
                self._empty.append((place, scope, contents))
            elif _AS_THEY_ARE.issuperset(map(type, _parts(contents))):
                self._noted.append((place, scope, contents))
            else:
                self._noted.append((place, scope, mapped(noted, contents)))
        self._settings = [
            (place, {name: one for name, one in place.items() if isinstance(one, _SETTINGS)})
            for place in reached.settings
        ]

    def _changed(self) -> Iterator[tuple[Any, Scope, Any, Any]]:
        """Yield what does not hold the very same now, with what it held and holds."""
        filled = compress(self._empty, map(itemgetter(0), self._empty))
        for place, scope, noted in chain(self._noted, filled):
            now = place if type(place) is dict else contents_of(place)
            if not is_same(now, noted) and not is_same(now, mapped(resolved, noted)):
                yield place, scope, noted, now

    def restore(self) -> None:
        """Give everything its contents back, as before the first run."""
        for place, scope, noted, now in self._changed():
            fill(place, self._before(place, scope, noted, now), now)

    def _before(self, place: Any, scope: Scope, noted: Any, now: Any) -> Any:
        contents = settled(noted, now)
        if scope >= Scope.GLOBAL and isinstance(place, dict):
            # What a library registers as it is imported is registered once in a process.
            new = {key: one for key, one in now.items() if key not in contents}
            contents |= {key: one for key, one in new.items() if isinstance(one, CODE)}
        return contents

    def give_back(
        self,
        is_made_here: Callable[[Tensor], bool] = lambda tensor: False,
        whole: Collection[Scope] = (Scope.MODULE,),
    ) -> None:
        """Give modules and optimizers, or all that is ``whole``, their contents back, and what is
        elsewhere its tensors and objects. There a function's own variables keep what it has put in
        besides, and others all but the tensors of the trace: a cache what it had computed.
        """
        for place, scope, noted, now in self._changed():
            if scope in whole:
                contents = self._before(place, scope, noted, now)
            elif isinstance(now, dict):
                contents = self._names(place, scope, noted, now, is_made_here)
            else:
                contents = self._items(scope, noted, now, is_made_here)
            fill(place, contents, now)
        for place, settings in self._settings:
            place.update({name: one for name, one in settings.items() if name in place})

    def _names(
        self, place: Any, scope: Scope, noted: Any, now: Any, is_made_here: Callable[[Tensor], bool]
    ) -> dict[Any, Any]:
        contents: dict[Any, Any] = {}
        known = {resolved(key): one for key, one in noted.items()}
        for name, reference in known.items():
            then, one = resolved(reference), now.get(name, GONE)
            if one is not GONE and _is_the_same(one, reference):
                contents[name] = one
                continue
            lost = one is not GONE and scope is not Scope.OWN and holds_tensor(one, is_made_here)
            kept = then if lost or _holds_memory(then) else one
            if kept is GONE and lost and isinstance(place, Names):
                kept = None  # a tensor that is gone
            if kept is not GONE and name is not GONE:
                contents[name] = kept
        for name, one in now.items():
            if name not in known and (scope is Scope.OWN or not holds_tensor(one, is_made_here)):
                contents[name] = one
        return contents

    def _items(
        self, scope: Scope, noted: Any, now: Any, is_made_here: Callable[[Tensor], bool]
    ) -> list[Any]:
        before: list[Any] = settled(noted, now)
        present, known = set(map(id, now)), set(map(id, before))
        lost = any(id(one) not in present and _holds_memory(one) for one in before)
        if scope is not Scope.OWN:
            new = (one for one in now if id(one) not in known)
            lost = lost or any(holds_tensor(one, is_made_here) for one in new)
        return before if lost else now


def _holds_memory(one: Any, depth: int = _LEVELS) -> bool:
    """Return whether something is, or holds, a tensor or an object that may have any."""
    kind = type(one)
    if kind in _EMPTY_KINDS or one is GONE:
        return False
    if container_of(kind) is None:
        return not isinstance(one, _HOLD_NOTHING)
    return depth > 0 and any(_holds_memory(part, depth - 1) for part in _parts(contents_of(one)))


def _is_the_same(one: Any, noted: Any) -> bool:
    """Return whether something is what was noted, or a tuple of the same."""
    if type(noted) is not _Parts:
        return resolved(noted) is one
    found = items_of(one) if type(one) is noted.kind else []
    return len(found) == len(noted.parts) and all(map(_is_the_same, found, noted.parts))


def mapped(function: Callable[[Any], Any], contents: Any) -> Any:
    """Return contents with what a function returns for each in its place."""
    if not isinstance(contents, dict):
        return [one if type(one) in _AS_THEY_ARE else function(one) for one in contents]
    if not _AS_THEY_ARE.issuperset(map(type, contents)):
        contents = {function(name): one for name, one in contents.items()}
    return {
        name: one if type(one) in _AS_THEY_ARE else function(one) for name, one in contents.items()
    }


def holds_tensor(one: Any, is_meant: Callable[[Tensor], bool], depth: int = _LEVELS) -> bool:
    """Return whether something is a tensor that is meant, or holds one, not too deep."""
    if isinstance(one, Tensor):
        return is_meant(one)
    if depth == 0 or isinstance(one, _NOTHING_OF_INTEREST):
        return False
    kind, own = type(one), getattr(one, "__dict__", None)
    inside = [*own.values()] if type(own) is dict and is_of_program(kind) else []
    if container_of(kind) is not None and not _hold_nothing(contents := contents_of(one)):
        inside += _parts(contents)
    return any(
        holds_tensor(part, is_meant, depth - 1) for part in inside if type(part) not in _EMPTY_KINDS
    )


def _hold_nothing(contents: Any) -> bool:
    """Return whether what a container holds, keys and values alike, holds nothing itself."""
    if isinstance(contents, dict):
        return _hold_nothing([*contents]) and _hold_nothing([*contents.values()])
    return _EMPTY_KINDS.issuperset(map(type, contents)) or all(
        type(part) in _EMPTY_KINDS or isinstance(part, _HOLD_NOTHING) for part in contents
    )


def contents_of(place: Any) -> Any:
    """Return names and values as a dictionary, and anything else as a list."""
    kind = type(place)
    if kind is Names:
        return place.read()
    if kind is dict:
        return place.copy()
    if kind is list:
        return place[:]
    kind = container_of(kind)
    return dict(kind.items(place)) if kind in MAPPINGS else items_of(place)


def fill(place: Any, contents: Any, now: Any = None) -> None:
    """Give a container, or names, contents unless it has these ``now``."""
    if is_same(contents_of(place) if now is None else now, contents):
        return
    if type(place) is Names:
        place.write(contents)
        return
    kind = container_of(type(place))
    kind.clear(place)
    if kind in MAPPINGS:
        for key, value in contents.items():
            kind.__setitem__(place, key, value)
    else:
        (kind.update if kind is set else kind.extend)(place, contents)


def _parts(container: Any) -> Iterable[Any]:
    """Return what a container holds, keys and values alike."""
    return chain(container, container.values()) if isinstance(container, dict) else container


def is_same(now: Any, before: Any) -> bool:
    """Return whether contents are the very same things, in the same order."""
    if not now or len(now) != len(before) or not all(map(operator.is_, now, before)):
        return not now and not before
    return not isinstance(now, dict) or all(map(operator.is_, now.values(), before.values()))
