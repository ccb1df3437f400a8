"""Modules that the program came with, which are after the trace as they were before.

Their tensors are their own again, and what was put into them is out of them again: shards,
``DTensor`` parameters, hooks, wrappers around their parts. So each trace of a function (for several
devices, for several ranks) begins with the same model.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.torch_private.patching.module_calls import (
    APPLIES,
    ModuleMethods,
    registrations_seen,
)
from pytest_torchmem.torch_private.patching.patches import (
    ABSENT,
    CONTRACT,
    Replacements,
    applied_item,
    name_table,
    state_table,
)
from pytest_torchmem.torch_private.tensors.storages import storage_address
from pytest_torchmem.torch_private.tensors.tensors import (
    CHILDREN,
    MODULE_TABLES,
    PARAMETERS,
    has_dispatch,
    make_subclass,
    own_buffers,
    own_parameters,
)

_MAKING = ("__init__", "__setstate__")
_HOOKING = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


@contextmanager
def modules_given_back(trace: TraceContext) -> Iterator[None]:
    """Give the program's modules back as they were."""
    with LASTING.layer("modules", _functions) as modules:
        trace.note_module = modules.note_whole
        trace.noted_tensors.append(modules.tensors)
        seen = registrations_seen(modules.parameter_registered, modules.child_registered)
        try:
            with seen, modules.methods:
                yield
        finally:
            trace.note_module = lambda module: None
            modules.give_back()


def _functions(trace: TraceContext) -> "Layer[_OwnModules]":
    modules = _OwnModules(trace)
    replacements = modules.replacements()
    looked_at = ((sys.modules, CONTRACT, sys.modules.get(CONTRACT, ABSENT)),)
    return Layer(replacements, modules, (modules.begin,), looked_at)


class _Noted(NamedTuple):
    """What a module was like before the trace changed it."""

    kind: type
    names: frozenset[str]
    """Its attributes."""
    tables: dict[str, dict[Any, Any]]
    """The contents of the tables among them; of children no more than a weak reference."""
    kept: dict[str, Any]
    """Parameters that would be gone otherwise, by name."""


class _Kept(NamedTuple):
    """A parameter as it was, held weakly so that its removal is seen."""

    parameter: ReferenceType[Any]
    data: Tensor
    gradient: Tensor | None
    requires_grad: bool
    kind: type
    attributes: dict[str, Any]


class _OwnModules:
    """The modules that the program came with, and the tensors that they had.

    Weakly: a module that the program makes on another thread is real too, and dies in the trace.
    """

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self.methods = ModuleMethods(
            {
                **dict.fromkeys(_HOOKING, self._hooking),
                **dict.fromkeys(_MAKING, self._making),
                APPLIES: self._apply,
                "__delattr__": self._deleting,
            }
        )
        """What has to be seen of modules: how they are made, hooked, moved and converted."""
        self._all_applied = False
        """Whether there was none before the trace."""
        self.tensors: Any = WeakIdKeyDictionary()
        """The data and the gradients of tensors that were given others."""
        self._buffers: Any = WeakIdKeyDictionary()
        self._noted: Any = WeakIdKeyDictionary()
        self._made: dict[int, ReferenceType[nn.Module]] = {}
        """The trace's own modules, by their ids; some are gone."""
        self._applied: dict[int, ReferenceType[Any]] = {}
        """What stands in the tables of modules to which composable functions were applied."""

    def begin(self) -> None:
        """Forget the modules of the trace before."""
        if self.tensors or self._buffers or self._noted:  # else they are new
            self.tensors = WeakIdKeyDictionary()
            self._buffers = WeakIdKeyDictionary()
            self._noted = WeakIdKeyDictionary()
        self._made, self._applied = {}, {}

    def replacements(self) -> Replacements:
        """Return how it is seen that composable functions are applied."""
        applied = applied_item()
        self._all_applied = applied is None
        return [] if applied is None else [(applied, {"__init__": self._applying})]

    def _applying(self, item: Any) -> None:
        """Note that a composable function is applied, such as ``fully_shard``."""
        if self._trace.on_thread():
            self._applied[id(item)] = ref(item)

    def _deleting(self, original: Any) -> Callable[..., Any]:
        """Return what is called instead of a module's ``__delattr__``."""

        @wraps(original)
        def delete(module: nn.Module, name: str) -> Any:
            if name in own_parameters(module) and self._is_brought(module):
                self.parameter_registered(module, name, None)
            return original(module, name)

        return delete

    def _apply(self, original: Any) -> Callable[..., Any]:
        def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._trace.off():
                self._note_tensors(module)
            return original(module, *args, **kwargs)

        return apply

    def _making(self, original: Any) -> Callable[..., Any]:
        @wraps(original)
        def make(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._trace.on_thread():
                self._made[id(module)] = ref(module)
            return original(module, *args, **kwargs)

        return make

    def _hooking(self, original: Any) -> Callable[..., Any]:
        @wraps(original)
        def register(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_brought(module):
                self._note(module)
            return original(module, *args, **kwargs)

        return register

    def _is_brought(self, module: nn.Module) -> bool:
        """Whether a module was there before the trace, on whose thread the caller is.

        Dynamo follows the hooks of a module that is made in compiled code, such as a slice of a
        ``ModuleList``; its graph would break at what they ask for.
        """
        if is_dynamo_compiling() or self._trace.off():
            return False
        made = self._made.get(id(module))
        return made is None or made() is not module

    # -- what is noted -----------------------------------------------------------------------------

    def parameter_registered(self, module: Any, name: str, _: Any) -> None:
        """Note a module that is about to get a parameter in the place of another."""
        if self._is_brought(module):
            self._note_tensors(module)
            self._keep(self._note(module), module, name)

    def child_registered(self, module: Any, *_: Any) -> None:
        """Note a module that is about to get a child."""
        if self._is_brought(module):
            self._note(module)

    def note_whole(self, module: nn.Module) -> None:
        """Note a module and all inside it, whose parameters are about to be replaced."""
        for one in module.modules():
            if self._is_brought(one):
                self._note_tensors(one)
                noted = self._note(one)
                for name in own_parameters(one):
                    self._keep(noted, one, name)

    def _note(self, module: nn.Module) -> _Noted:
        noted: _Noted | None = self._noted.get(module)
        if noted is None:
            own = vars(module)
            tables = {name: dict(own[name]) for name in MODULE_TABLES if name in own}
            for name in (CHILDREN, PARAMETERS):
                held = tables[name].items()
                tables[name] = {key: None if one is None else ref(one) for key, one in held}
            tables.update(self._applied_before(own))
            noted = _Noted(type(module), frozenset(own), tables, {})
            self._noted[module] = noted
        return noted

    def _applied_before(self, own: dict[str, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the tables of composable functions, without what was applied in the trace."""
        names, states = name_table(), state_table()
        if names not in own:
            return
        new = {name for name, item in own[names].items() if self._is_of_trace(item)}
        yield names, {name: item for name, item in own[names].items() if name not in new}
        kept = {key: state for key, state in own[states].items() if key.__name__ not in new}
        yield states, kept

    def _is_of_trace(self, item: Any) -> bool:
        applied = self._applied.get(id(item))
        return self._all_applied or (applied is not None and applied() is item)

    def _keep(self, noted: _Noted, module: nn.Module, name: str) -> None:
        """Keep a parameter of a module, or the data that it came with."""
        parameter = own_parameters(module).get(name)
        if parameter is None or name in noted.kept or not _same(noted, name, parameter):
            return
        own = self.tensors.get(parameter)
        if own is None:  # it is of the trace
            return
        data, gradient = own
        if data.device.type == "meta":
            noted.kept[name] = parameter
            return
        gone = lambda _: self._trace.strike_unless_used(data)  # noqa: E731
        about = parameter.requires_grad, type(parameter), dict(vars(parameter))
        noted.kept[name] = _Kept(ref(parameter, gone), data, gradient, *about)

    def _note_tensors(self, module: nn.Module) -> None:
        """Keep the data, gradients and buffers of a module that is about to be converted."""
        for name, parameter in own_parameters(module).items():
            if parameter is None or not self._is_real(parameter):
                continue
            self.tensors.setdefault(parameter, (parameter.data, parameter.grad))
            if parameter.device.type == "meta" and self._is_brought(module):  # is replaced
                self._keep(self._note(module), module, name)
        for name, buffer in own_buffers(module).items():
            if buffer is not None and self._trace.brought(buffer):
                self._buffers.setdefault(module, {}).setdefault(name, buffer)
                if not has_dispatch(buffer):
                    self.tensors.setdefault(buffer, (buffer.data, None))

    def _is_real(self, parameter: Tensor) -> bool:
        """Whether a parameter came with the program; wrappers and fake tensors are its own."""
        return self._trace.brought(parameter) and not has_dispatch(parameter)

    # -- and given back ----------------------------------------------------------------------------

    def give_back(self) -> None:
        """Put back what has changed."""
        again: dict[int, Tensor] = {}
        for module, noted in self._noted.items():
            _restore(module, noted, again)
        for tensor, (data, gradient) in self.tensors.items():
            if data.device.type != "meta" and _place(tensor.data) != _place(data):
                tensor.grad = None
                tensor.data = data
                tensor.grad = gradient
        for module, named in self._buffers.items():
            own_buffers(module).update(named)
        for notes in (self._noted, self.tensors, self._buffers):  # hold no data any longer
            notes.clear()


def _restore(module: nn.Module, noted: _Noted, again: dict[int, Tensor]) -> None:
    """Give a module its class, its attributes and the contents of its tables back."""
    if type(module) is not noted.kind:
        module.__class__ = noted.kind
    own = vars(module)
    for name in [name for name in own if name not in noted.names]:
        del own[name]
    for name, contents in noted.tables.items():
        now = dict(own.get(name, {}))
        table = own.setdefault(name, {})  # the same dictionary: others may hold it
        table.clear()
        for key, held in contents.items():
            if name == PARAMETERS and key in noted.kept:
                table[key] = _parameter(noted.kept[key], again)
            elif not isinstance(held, ReferenceType):
                table[key] = held
            elif held() is not None:
                table[key] = held()
            elif key in now:  # nobody has what was there
                table[key] = now[key]


def _parameter(kept: Any, again: dict[int, Tensor]) -> Any:
    """Return a parameter as it was, or another on the data that it had."""
    if not isinstance(kept, _Kept):
        return kept
    found: Any = kept.parameter()
    if found is None:  # made once for all modules that share it
        found = again.get(id(kept.data))
    if found is None:
        found = make_subclass(kept.kind, kept.data, kept.requires_grad)
        again[id(kept.data)], found.grad = found, kept.gradient
        vars(found).update(kept.attributes)
    return found


def _same(noted: _Noted, name: str, parameter: Tensor) -> bool:
    """Whether a parameter is the one that the module came with."""
    held = noted.tables[PARAMETERS].get(name)
    return held is not None and held() is parameter


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return what differs between two tensors that are not on the same memory."""
    return storage_address(tensor), int(tensor.storage_offset())
