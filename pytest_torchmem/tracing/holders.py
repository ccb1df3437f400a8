"""What refers to tensors that are still alive, and garbage that Python has not collected.

A variable, a list, an attribute, a closure, or another's graph. This is read from the references
that Python keeps (``gc.get_referrers``) and the variables of running functions, which since Python
3.11 are no objects of the collector's. Garbage is told with the program's objects in it.
"""

import dis
import gc
import linecache
import re
import sys
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import is_dataclass
from functools import lru_cache, partial
from itertools import chain
from queue import SimpleQueue
from threading import get_ident
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from pytest_torchmem.interception.attribution import is_own
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.torch_private.tensors import CHILDREN, node_number, storage_address
from pytest_torchmem.tracing.sources import file_of, filled_at, is_of_program, placed

_DEEPEST = 4
_MOST_NODES = 100_000
_OF_CHECKS = ("pytest_torchmem.", "_pytest.", "pluggy.")
_NOT_OF_PROGRAMS = (*_OF_CHECKS, "torch.")
_OF_MODULES = ("._parameters", "._buffers")
"""Where modules keep what their attributes seem to be."""
_CONTAINERS = (list, tuple, dict, set, deque, SimpleQueue, partial, MethodType)
_MADE = (list, dict, set)
"""What comprehensions make, by these instructions."""
_ADD = ("LIST_APPEND", "MAP_ADD", "SET_ADD")
_IN_CONTAINERS = tuple(f"the {one.__name__} " for one in (list, tuple, dict, set, deque))
_SUSPENDED = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
"""Where what is suspended has its variables."""
_NAMED = (nn.Module, ModuleType, type, FunctionType, TracebackType, Tensor, *_SUSPENDED)
"""What is told by a name of its own, or not at all; any other holder by what holds it."""
_CACHES = (type(lru_cache(str)),)
"""What ``functools.lru_cache`` makes of a function: of C, and with an ordinary dictionary."""
_MOST_TOGETHER = 2_000
"""Objects whose referrers are looked for at once: each object that Python knows is compared with
all of them (Modules/gcmodule.c, gc_referrers_for)."""
_MOST_ROOTS = 50
_MOST_MODULES = 20
"""How many modules are looked out of, each in the next."""


class _Referrers:
    """Referrers of many objects, found by one pass over all objects of Python."""

    def __init__(self) -> None:
        self._known: dict[int, list[object]] = {}
        self._own = {id(self._known)}
        """What is made here and refers to objects, too."""
        # Those of this file end before anything is asked, and something may come into their place.
        own = _running_frames.__code__.co_filename
        running = [one for one in _running_frames() if one.f_code.co_filename != own]
        self._running = {*map(id, running)}
        self._local: set[int] = set()
        """What functions have in variables, torch's as well: these refer to it unseen."""
        for frame in running:
            variables = frame.f_locals
            self._local.update(map(id, variables.values()))
            if type(variables) is dict and variables is not frame.f_globals:
                self._own.add(id(variables))  # a copy, which the frame keeps (until Python 3.12)

    def is_free(self, value: object) -> bool:
        """Tell whether no variable of a running function is a value."""
        return id(value) not in self._local

    def of(self, value: object) -> list[object]:
        """Return what refers to a value, but for the frames of functions."""
        if id(value) not in self._known:
            self._find([value])
        return self._known[id(value)]

    def find(self, values: Iterable[object]) -> None:
        """Look for what refers to ``values``, and to the containers that do, and so on."""
        waiting = [*values]
        for _ in range(_DEEPEST + 1):
            if not 0 < len(waiting) <= _MOST_TOGETHER:
                break
            self._find(waiting)
            around = [
                one
                for value in waiting
                for one in self._known[id(value)]
                if _is_container(one) and id(one) not in self._known
            ]
            waiting = [*{id(one): one for one in around}.values()]
            del around

    def clear(self) -> None:
        """Let go of everything: it would stay alive."""
        self._known.clear()

    def _find(self, values: list[object]) -> None:
        wanted: dict[int, list[object]] = {
            id(value): [] for value in values if id(value) not in self._known
        }
        self._own.update(map(id, wanted.values()))
        given = (*values,)  # which Python 3.13 has among the referrers
        for one in gc.get_referrers(*given):
            if one is values or one is given or id(one) in self._own or id(one) in self._running:
                continue
            for referred in {id(other) for other in gc.get_referents(one)} & wanted.keys():
                wanted[referred].append(one)
        self._known |= wanted


class HeldNames:
    """The names under which a program holds what it holds, now."""

    def __init__(self, ignore: object = None) -> None:
        self._ignore = {id(ignore), id(self)}
        self.referrers = _Referrers()
        self._variables: dict[int, str] = {}
        """The variables of the program's running functions, by what they are."""
        self._modules: dict[int, str] = {}
        """The modules that these hold, and those of their own."""
        self._of_record = False
        """Whether what keeps a record is asked for: one within it is told by its type alone."""
        self._asked: set[int] = set()
        """The objects that are looked out of, each in the next: what one holds may hold it."""
        self.nodes: dict[int, int] = {}
        """By the addresses of what the functions of graphs refer to: the numbers of their nodes."""
        self._making = ""
        """The function whose comprehension runs: what that makes nothing else refers to yet."""
        for frame in _frames_of_program():
            code, running = frame.f_code, placed(frame.f_code.co_filename, frame.f_lineno)
            function = _function_of(code)
            if not self._making and _is_in_comprehension(frame):
                self._making = f"that {function}{running} makes"
            for name, value in tuple(frame.f_locals.items()):
                at = running
                if isinstance(value, (Tensor, *_CONTAINERS)):
                    own, known = (code.co_filename, code.co_firstlineno), frame.f_globals
                    at = filled_at(*own, name, known, is_tensor=isinstance(value, Tensor))
                self._note(f"{name} of {function}{at}", value)
        for variable, value in copy_context().items():
            self._note(f"{variable.name} of a context", value)

    def of(self, value: object) -> str:
        """Return what refers to a value and is named, "" where nothing is: of a variable and what
        outlives it, such as a list, the latter.
        """
        found, variable = self._of(value, {*self._ignore}, 0), self._variables.get(id(value))
        outlives = bool(found) and (found.startswith(_IN_CONTAINERS) or found[:4] != "the ")
        return found if outlives or not variable else f"the variable {variable}"

    def _of(self, value: object, seen: set[int], depth: int) -> str:
        seen.add(id(value))
        if depth and (named := self._variables.get(id(value))):
            return named
        referrers = [one for one in self.referrers.of(value) if id(one) not in seen]
        seen.update(map(id, referrers))
        referrers.sort(key=partial(_is_imported, value=value))  # a global has its own module
        seen.add(id(referrers))
        for one in referrers:
            if name := self._direct(one, value):
                return name
        for one in referrers if depth < _DEEPEST else ():
            if _is_container(one) and (name := self._of(one, seen, depth + 1)):
                return _inside(one, name, value)
        is_made = type(value) in _MADE and not referrers and self.referrers.is_free(value)
        return self._making if is_made else ""

    def _note(self, name: str, value: object) -> None:
        """Take note of a variable; those of outer functions stand for what inner ones have too."""
        if isinstance(value, (Tensor, *_CONTAINERS)) or _is_of_library(value):
            self._variables[id(value)] = name
        elif isinstance(value, nn.Module):
            root = type(value).__name__ if name.startswith("self of ") else name
            for path, module in value.named_modules():
                if root == name or id(module) not in self._modules or path:
                    self._modules[id(module)] = _attribute(root, path)

    def _direct(self, holder: object, value: object) -> str:
        """Return the name by which ``holder`` refers to an object, "" where it has none."""
        if isinstance(holder, FunctionType):
            if f"{holder.__module__}.".startswith(_OF_CHECKS):
                return ""  # what makes a tensor of a trace has it in its closure
            part = _part_of(holder, value)
            return f"the {part} of {holder.__qualname__}{self._around(holder)}" if part else ""
        if isinstance(holder, _CACHES):
            return f"the lru_cache of {getattr(holder, '__qualname__', 'a function')}"
        if isinstance(holder, TracebackType):
            return self._of_traceback(holder)
        if frame := getattr(holder, _SUSPENDED.get(type(holder), ""), None):
            name = "" if is_own(frame.f_code) else _key_of(frame.f_locals, value)
            return f"{name} of {_function_of(frame.f_code)}{self._around(holder)}" if name else ""
        if isinstance(holder, dict):
            around = self.referrers.of(holder)
            # a threading.local has those of each thread in a table (Modules/_threadmodule.c)
            tables = (one for one in around if isinstance(one, dict))
            # a class shows its attributes through a proxy alone
            owner = next(
                (
                    one
                    for one in chain(around, *map(self.referrers.of, tables))
                    if getattr(one, "__dict__", None) is holder
                    or (isinstance(one, type) and vars(one).keys() == holder.keys())
                ),
                None,
            )
            key = _key_of(holder, value)
            return self._attribute_of(owner, key) if owner is not None else ""
        if isinstance(holder, type):
            return ""
        slots = (vars(kind) for kind in type(holder).__mro__ if "__slots__" in vars(kind))
        names = [
            name for own in slots for name in own if isinstance(own[name], MemberDescriptorType)
        ]
        if isinstance(holder, tuple):
            names += getattr(holder, "_fields", ())
        attributes = {name: getattr(holder, name, None) for name in names}
        attributes |= getattr(holder, "__dict__", {})
        return self._attribute_of(holder, _key_of(attributes, value))

    def _attribute_of(self, owner: object, key: str) -> str:
        """Return the name of an attribute, "" for those of a trace, which no program knows."""
        of_trace = f"{type(owner).__module__}.".startswith(_OF_CHECKS)
        if not key or of_trace:
            return ""
        if type(owner).__module__ == "torch.utils.checkpoint":  # VersionWrapper
            return "what a selective checkpoint saves"
        if isinstance(owner, BackwardCFunction):
            self.nodes[address_of(getattr(owner, key))] = node_number(owner)
            return ""
        name, outermost = self._called(owner)
        kind = type(owner)
        is_tensor = isinstance(getattr(owner, "__dict__", {}).get(key), Tensor)
        name_of_kind = kind.__qualname__.rpartition(".")[2]
        known = vars(sys.modules.get(kind.__module__, sys))
        filled = filled_at(file_of(kind), name_of_kind, key, known, is_tensor=is_tensor)
        own = _attribute(name, key)
        own = re.sub(r" \([^()]*\)$", "", own) + filled if filled else own
        around = self._around(outermost)
        return own if around and own.endswith(around) else own + around

    def _of_traceback(self, traceback: TracebackType) -> str:
        """Return the name of the error that a traceback belongs to, "" where nothing holds one."""
        for one in self.referrers.of(traceback):
            if isinstance(one, BaseException):
                if f"{type(one).__module__}.".startswith(_NOT_OF_PROGRAMS):
                    return ""  # of a test that failed before
                return f"the traceback of {type(one).__name__}{self._around(one)}"
            if isinstance(one, TracebackType) and (name := self._of_traceback(one)):
                return name
        return ""

    def _around(self, owner: object) -> str:
        """Return in words what holds an object: a container of the program's, or what leads to an
        object of a library's, such as a cache; "" where its own name is enough, or nothing does.
        """
        own = id(owner)
        named = own in self._modules or isinstance(owner, ModuleType | type)
        if named or own in self._asked or len(self._asked) >= _DEEPEST:
            return ""
        is_of_library = _is_of_library(owner)
        self._asked.add(own)
        try:
            found = self._of(owner, {*self._ignore}, int(not is_of_library))
        finally:
            self._asked.discard(own)
        outermost = found.rpartition(" in ")[2]
        is_told = outermost if is_of_library else outermost.startswith(_IN_CONTAINERS)
        return f" in {outermost}" if is_told else ""

    def _called(self, owner: object) -> tuple[str, object]:
        """Return the name of an object, and the outermost one that it is named by. Of a module that
        no variable leads to, that is the holder of its outermost parent, as in
        ``Average.copy.layers.0``.
        """
        if isinstance(owner, ModuleType | type):
            return owner.__name__, owner
        path: list[str] = []
        outermost = owner
        while isinstance(outermost, nn.Module) and id(outermost) not in self._modules:
            outer, key = next(self._owners(outermost), (None, ""))
            if outer is None or len(path) >= _MOST_MODULES:
                break
            path.insert(0, key)
            outermost = outer
        own_name = type(outermost).__qualname__.rpartition("<locals>.")[2].strip("_")
        names = self._variables if isinstance(owner, tuple) else self._modules
        name = names.get(id(outermost), own_name)
        is_record = is_dataclass(owner) or isinstance(owner, tuple)  # a named one
        if path or not is_record or self._of_record:
            return _attribute(name, ".".join(path)), outermost
        self._of_record = True  # what a model returns is told by who keeps it
        try:
            around = (self._direct(one, owner) for one in self.referrers.of(owner))
            record = next((one for one in around if one and not one.startswith("the ")), name)
        finally:
            self._of_record = False
        return record, owner

    def _owners(self, value: object) -> Iterator[tuple[object, str]]:
        """Yield what has the value as an attribute, and its name; modules look below them too."""
        for one in self.referrers.of(value):
            names = one if isinstance(one, dict) else getattr(one, "__dict__", None)
            if not isinstance(names, dict) or not (key := _key_of(names, value)):
                continue
            if names is not one:  # an object whose attributes were never asked for as a dictionary
                yield one, key
                continue
            around = self.referrers.of(names)
            inner = (
                other
                for one in around
                if isinstance(one, dict) and one.get(CHILDREN) is names
                for other in self.referrers.of(one)
            )
            for other in (*around, *inner):
                attributes = getattr(other, "__dict__", None)
                if isinstance(attributes, dict) and (
                    attributes is names or attributes.get(CHILDREN) is names
                ):
                    yield other, key


def _is_of_library(value: object) -> bool:
    """Tell whether a value is an instance of a library's class, or of Python's own, and no module,
    and not what a model returns, which is told by who keeps it.
    """
    if isinstance(value, (nn.Module, ModuleType, type)) or is_dataclass(value):
        return False
    owner = type(value).__module__
    if f"{owner}.".startswith(_NOT_OF_PROGRAMS):
        return False
    file = getattr(sys.modules.get(owner), "__file__", "<built in>")
    return owner not in ("builtins", "__main__") and not is_of_program(file)


def together(holders: Sequence[str]) -> str:
    """Return what refers to most of equal tensors, or both containers that have about as many; of
    modules that are alike, their pattern.
    """
    holders = [fold(one)[0] for one in holders] if len({*holders}) > 1 else holders
    most = max(holders, key=lambda one: (holders.count(one), not one.startswith("the variable ")))
    names = [one for one in dict.fromkeys(holders) if 2 * holders.count(one) > holders.count(most)]
    are_two = len({one.partition(" (")[0] for one in names}) == len(names) == 2
    are_two = are_two and all(one.startswith(_IN_CONTAINERS) for one in names)
    return " and ".join(names) if are_two else most


def _attribute(name: str, path: str) -> str:
    """Return what is called by its path in what is called ``name``, a variable of a function."""
    own, of, function = name.partition(" of ")
    own, at, line = own.partition(" (")
    return f"{own}.{path}{at}{line}{of}{function}" if path else name


def _inside(container: object, name: str, value: object) -> str:
    """Return what is called ``name``, with what it is unless the name says so."""
    if isinstance(container, (CellType, FrameType)) or name.startswith("the "):
        return name
    for registry in _OF_MODULES:
        own, is_in, rest = name.partition(registry)
        if isinstance(container, dict) and is_in and not rest.partition(" ")[0]:
            return f"{own}.{_key_of(container, value)}{rest}"
    return f"the {type(container).__name__.strip('_')} {name}"


def _frames_of_program() -> Iterator[FrameType]:
    """Yield the frames of the program's functions, this thread's and the innermost first."""
    here = get_ident()
    for _, innermost in sorted(sys._current_frames().items(), key=lambda one: one[0] != here):
        frame: FrameType | None = innermost
        while frame is not None:
            owner = str(frame.f_globals.get("__name__", ""))
            if owner == "pytest_torchmem.step.step":
                break  # beyond is who asked for the trace
            if not f"{owner}.".startswith(_NOT_OF_PROGRAMS):
                yield frame
            frame = frame.f_back


def _running_frames() -> list[FrameType]:
    """Return the frames of running functions, without those that a traceback holds."""
    found: list[FrameType] = []
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return found


def _is_in_comprehension(frame: FrameType) -> bool:
    """Tell whether what a function does now is to be put into the list, set or dictionary that a
    comprehension makes: in its loop that comes next (until Python 3.11 in a function of its own).
    """
    end = 0
    for one in dis.get_instructions(frame.f_code):
        if one.offset <= frame.f_lasti:
            end = one.argval if one.opname == "FOR_ITER" else end
        elif one.offset >= end or one.opname == "FOR_ITER":
            return False
        elif one.opname in _ADD:
            return True
    return False


def _is_container(value: object) -> bool:
    """Tell whether what holds a value is to be asked about instead."""
    of_trace = f"{type(value).__module__}.".startswith(_OF_CHECKS)
    return not (of_trace or isinstance(value, _NAMED))


def _part_of(function: FunctionType, value: object) -> str:
    """Return in a word as what a function holds a value, "" where it does not."""
    closure = function.__closure__ or ()
    if closure is value or any(cell is value for cell in closure):
        return "closure"
    is_default = value is function.__defaults__ or value is function.__kwdefaults__
    return "defaults" if is_default and value is not None else ""


def _is_imported(holder: object, value: object) -> bool:
    """Tell whether ``holder`` is the globals of a module that has ``value`` from another one."""
    if not isinstance(holder, dict) or not isinstance(holder.get("__file__"), str):
        return False
    key = _key_of(holder, value)
    lines = linecache.getlines(holder["__file__"])
    return bool(lines) and not any(re.match(rf"{re.escape(key)}\s*[:=]", line) for line in lines)


def _key_of(names: Mapping[Any, Any], value: object) -> str:
    return next((str(key) for key, one in tuple(names.items()) if one is value), "")


def holding_graphs(
    tensors: Iterable[Tensor], wanted: Mapping[int, int], names: HeldNames
) -> dict[int, str]:
    """Return which tensor's graph has the nodes of the numbers ``wanted``, by their keys. Of
    several tensors the oldest is told that has a name: a loss of today leads to what a state of
    yesterday leads to, and it is the state that should have been detached.
    """
    roots = []
    for tensor in tensors:
        node = tensor.grad_fn if type(tensor) is Tensor else None
        if node is not None:
            roots.append((node_number(node), tensor, node))
    roots.sort(key=lambda root: root[0])
    found: dict[int, str] = {}
    left = _MOST_NODES
    for place, (_, tensor, node) in enumerate(roots):
        if place % _MOST_ROOTS == 0:
            names.referrers.find([root[1] for root in roots[place : place + _MOST_ROOTS]])
        reached = _nodes_reached(node, left)
        left -= len(reached)
        here = [key for key, number in wanted.items() if number in reached and key not in found]
        name = names.of(tensor) if here else ""
        if name:
            found |= dict.fromkeys(here, f"the graph of {name}")
        if left <= 0 or len(found) == len(wanted):
            break
    return found


def _nodes_reached(root: Any, most: int) -> Collection[int]:
    """Return the numbers of the nodes that a backward from ``root`` would come to, and of each
    parameter there the address, as a negative number.
    """
    numbers: set[int] = set()
    seen, waiting = {root}, [root]
    while waiting and len(seen) < most:
        node = waiting.pop()
        numbers.add(node_number(node))
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
            numbers.add(-address_of(leaf))
        following: Sequence[tuple[Any, int]] = node.next_functions
        new = [one for one, _ in following if one is not None and one not in seen]
        seen.update(new)
        waiting += new
    return numbers


def address_of(tensor: Any) -> int:
    """Return the address of a tensor's storage, 0 where it has none."""
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


def _function_of(code: CodeType) -> str:
    """Return the name of the function that runs, with its class from Python 3.11; of a lambda or a
    comprehension that of the function around it.
    """
    names = str(getattr(code, "co_qualname", code.co_name)).split(".<locals>.")
    return next((name for name in reversed(names) if name[:1] != "<"), names[-1])


def collect(wanted: Iterable[int]) -> dict[int, str]:
    """Collect garbage; return what of the program in it holds the addresses ``wanted``."""
    flags, known = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)  # gc.garbage has then all that was found
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    found = _owners(gc.garbage[known:], set(wanted))
    del gc.garbage[known:]
    gc.collect()
    return found


def _owners(garbage: Collection[object], left: set[int]) -> dict[int, str]:
    """Return the program's objects among ``garbage`` that hold what is at the addresses ``left``.
    That is looked for only if a tensor that is held by garbage is there at all.
    """
    tensors = (one for one in gc.get_referents(*garbage) if issubclass(type(one), Tensor))
    held = {id(one): address for one in tensors if (address := address_of(one)) in left}
    inside, found = set(map(id, garbage)), dict[int, str]()
    for one in sorted(garbage, key=lambda one: not issubclass(type(one), BaseException)):
        if held and left and (name := _name_of(one)):
            here = left & {held[key] for key in _reached(one, inside) & held.keys()}
            found.update(dict.fromkeys(here, name))
            left -= here
    if found:  # what a graph in a cycle has saved is no object of Python's
        found = dict.fromkeys(left, next(iter(found.values()))) | found
    return found


def _name_of(one: object) -> str:
    """Return what one of the program's own objects is, "" for any other."""
    kind = type(one)  # to ask an object for its class may run code of its own
    if issubclass(kind, BaseException):
        return f"the traceback of {kind.__qualname__}"
    if issubclass(kind, FunctionType):
        code = cast(FunctionType, one).__code__
        is_program = not is_own(code) and is_of_program(code.co_filename)
        return cast(FunctionType, one).__qualname__ if is_program else ""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__qualname__ if isinstance(file, str) and is_of_program(file) else ""


def _reached(one: object, inside: Container[int]) -> set[int]:
    """Return the ids of what an object leads to through others whose ids are ``inside``."""
    reached, waiting = {id(one)}, [one]
    while waiting:
        new = {id(other): other for other in gc.get_referents(waiting.pop())}
        waiting += [other for key, other in new.items() if key in inside and key not in reached]
        reached.update(new)
    return reached
