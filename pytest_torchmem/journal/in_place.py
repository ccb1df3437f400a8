"""Tensors and modules of a program, given back as they were.

For the length of a step the tensors of a module lie on other memory. What is exchanged is the
implementation in C++ (torch/csrc/Module.cpp, ``THPModule_swap_tensor_impl``): a tensor stays the
object that it is, with its class, attributes and weak references, and its data, gradient, graph and
version come back as they were. Where a program itself gives a tensor or a module something else,
note is taken before of what it had.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from itertools import compress
from operator import attrgetter
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.journal.contents import (
    GONE,
    Reached,
    Reference,
    Weak,
    all_resolved,
    fill,
    mapped,
    weakly,
)
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import modules_by_path, tensors_in
from pytest_torchmem.torch_private import tensors as private
from pytest_torchmem.torch_private.modes import DisableTorchFunctionSubclass

_OF_TORCH = (Tensor, nn.Parameter)
_TABLES = (Kind.PARAMETER, private.PARAMETERS), (Kind.BUFFER, private.BUFFERS)
_HOOKS = private.GRADIENT_HOOKS, private.ACCUMULATED_HOOKS
_hooks_of: Callable[[Tensor], tuple[Any, Any]] = attrgetter(*_HOOKS)
_NO_HOOKS = None, None


class Given(Reference):
    """A tensor that a step begins with, which is not kept alive, and what it is to the model."""

    __slots__ = ("anew", "kind", "moves", "name", "path", "scripted", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        kind: Kind,
        name: str = "",
        path: str | None = None,
        *,
        moves: bool = True,
        scripted: Any = None,
    ) -> None:
        self.tensor, self.kind, self.name = ref(tensor), kind, name
        self.path = path
        """That of the module which it is a parameter or buffer of; None for others."""
        self.moves = moves
        """Whether it goes to the device with the model or as an input."""
        self.scripted = scripted
        """The module in C++ that holds it."""
        self.anew: Tensor | None = None
        """What takes its place where a step has let go of it."""

    def found(self) -> Tensor | None:
        tensor = self.tensor()
        return self.anew if tensor is None else tensor


Other = Callable[[Tensor, Given], Tensor | None]
"""Makes what a tensor is to lie on for the length of a step, if it is to."""


class _Tensor(Reference):
    """A tensor with other data, and ``own``, which has what it had; it may be kept alive or not."""

    __slots__ = ("_attributes", "_hooked", "_hooks", "_kind", "own", "tensor")

    def __init__(self, tensor: Tensor, own: Tensor) -> None:
        self.own, self._kind = own, type(tensor)
        self.tensor: Callable[[], Tensor | None] = lambda: None
        self._attributes = {**tensor.__dict__}
        self._hooks = _hooks_of(tensor)
        self._hooked = [{**table} if table else {} for table in self._hooks]

    def found(self) -> Tensor:
        tensor = self.tensor()
        if tensor is not None:
            return tensor
        if self.own.__class__ is not self._kind:
            self._restore_attributes(self.own)
        return self.own

    def exchange(self, tensor: Tensor) -> None:
        """Let the tensor be ``own``, with its hooks, which C++ has with the implementation."""
        _exchange(tensor, self.own)
        self.tensor = ref(tensor)
        if any(self._hooks):
            for name, table in zip(_HOOKS, self._hooks, strict=True):
                if table:
                    setattr(tensor, name, table)

    def give_back(self, tensor: Tensor) -> None:
        _exchange(tensor, self.own)
        self._restore_attributes(tensor)

    def _restore_attributes(self, tensor: Tensor) -> None:
        if type(tensor) is not self._kind:
            tensor.__class__ = self._kind
        if self._attributes or tensor.__dict__:
            fill(tensor.__dict__, self._attributes)
        if _hooks_of(tensor) == _NO_HOOKS == self._hooks:  # as of most
            return
        for name, own, before in zip(_HOOKS, self._hooks, self._hooked, strict=True):
            if getattr(tensor, name) is not own:
                setattr(tensor, name, own)
            if own is not None:
                fill(own, before)


class _Module(Reference):
    """A module as it was, which is not kept alive: one that a step lets go of is made anew of what
    it had. ``beside``: the contents of tables that it had beside those of hooks, and no other
    attributes.
    """

    def __init__(self, module: nn.Module, beside: Mapping[str, Any] | None = None) -> None:
        self._kind, self._own = type(module), vars(module)
        self._names = None if beside is None else frozenset(self._own)
        self.tables: dict[str, dict[Any, Any]] = {
            name: {**self._own[name]} for name in _filled(self._own)
        }
        self.tables |= beside or {}
        self._anew: nn.Module | None = None
        names = (private.PARAMETERS, private.BUFFERS, private.CHILDREN) if beside is None else ()
        self.module: ref[nn.Module] = ref(module, partial(_clear, [*map(self._own.get, names)]))

    def found(self) -> nn.Module:
        found = self.module()
        if found is None:
            found = self._anew = self._anew or object.__new__(self._kind)
            found.__dict__ = self._own
        return found

    def restore(self) -> None:
        """Give it back its class and tables; what is gone of these stays as it is now."""
        module, own = self.module(), self._own
        if module is not None and type(module) is not self._kind:
            module.__class__ = self._kind  # as a lazy one changes it
        if self._names is not None:
            for name in own.keys() - self._names:
                del own[name]
        for name in dict.fromkeys((*_filled(own), *self.tables)):
            now, before = own.get(name), self.tables.get(name)
            if now or before:
                table = own.setdefault(name, {})  # the same dictionary: others may hold it
                found = all_resolved(before or {}).items()
                kept = ((key, table.get(key, GONE) if one is GONE else one) for key, one in found)
                fill(table, {key: one for key, one in kept if one is not GONE})


def _filled(own: Mapping[str, Any]) -> Iterable[str]:
    """Return which of a module's tables of hooks have any; of most modules none has."""
    return compress(private.HOOK_TABLES, map(own.get, private.HOOK_TABLES))


def _clear(tables: Iterable[Any], _: object) -> None:
    """Clear tables which only a module had, and of which note was taken."""
    for table in tables:
        if isinstance(table, dict):
            table.clear()


def _lying(tensor: Tensor | None) -> Callable[[], None] | None:
    """Return what lets a strided tensor lie as it does, if it is on the same storage by then. An
    operator in place that changes no more than that (``resize_``, ``t_``) runs on the program's own
    tensor.
    """
    if type(tensor) not in _OF_TORCH or tensor is None or tensor.layout is not torch.strided:
        return None
    try:
        address, nbytes = private.storage_address(tensor), tensor.untyped_storage().nbytes()
        version = -1 if tensor.is_inference() else private.version_of(tensor)
        geometry, held = _geometry(tensor), ref(tensor)
    except (RuntimeError, NotImplementedError):  # it has no storage, or is a lazy parameter
        return None

    def restore() -> None:
        tensor = held()
        if tensor is None or private.storage_address(tensor) != address:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes and storage.resizable():
            storage.resize_(nbytes)
        if _geometry(tensor) != geometry:
            with torch.no_grad():
                tensor.set_(storage, *geometry)
            if version >= 0:
                private.set_version((tensor,), (version,))

    return restore


class InPlace:
    """The tensors and modules of a step, which is run on them again and again. All tensors that are
    ``reached`` lie afterwards as they did.
    """

    def __init__(
        self,
        reached: Reached,
        target: Any = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        loss_fn: Any = None,
    ) -> None:
        self.given: dict[int, Given] = {}
        self.modules: dict[int, _Module] = {}
        self._laid: dict[int, _Tensor] = {}
        self._scripted: list[tuple[Given, Tensor]] = []
        self._gradients: list[tuple[ref[Tensor], Tensor | None]] = []
        """Those of tensors whose parts lie elsewhere."""
        self._lie: list[Callable[[], None] | None] = []
        """What lets tensors that stay where they are lie as they did."""
        self._changed: Any = WeakIdKeyDictionary()
        """Modules that a program changes. Weakly: one that it makes on another thread dies."""
        self._moved: Any = WeakIdKeyDictionary()
        """Tensors to which it gives other data."""
        self._buffers: Any = WeakIdKeyDictionary()
        """Buffers of modules to which it gives others, by name."""
        self._used: Any = WeakIdKeyDictionary()
        """Gradients of leaves, and versions of tensors, that it uses."""
        self._optimizers: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        """States of optimizers that step, None of its own."""
        self.by_tensor = self._moved, self._used
        with DisableTorchFunctionSubclass():
            self._note_modules(target, "")
            for position, value in enumerate(args):
                self._note_value(value, f"input {position}")
            for name, value in kwargs.items():
                self._note_value(value, name)
            self._note_modules(loss_fn, "loss_fn.")
            for tensor in reached.every_tensor(held=True):
                if id(tensor) not in self.given:
                    self.given[id(tensor)] = Given(tensor, _kind_of(tensor), moves=False)
            self._began = [
                (ref(one), private.version_of(one), one.requires_grad)
                for one in reached.every_tensor()
                if not one.is_inference()
            ]
            stay = (one() for one in reached.tensors)
            self._lie += [_lying(one) for one in stay if id(one) not in self.given]

    def _note_value(self, value: Any, name: str) -> None:
        self._note_modules(value, f"{name}.")
        for tensor in tensors_in(value):
            if id(tensor) not in self.given:
                self.given[id(tensor)] = Given(tensor, Kind.INPUT, name)

    def _note_modules(self, root: Any, prefix: str) -> None:
        for path, module in modules_by_path(root) if isinstance(root, nn.Module) else ():
            if id(module) not in self.modules:
                self.modules[id(module)] = _Module(module)
            scripted = module if isinstance(module, torch.jit.ScriptModule) else None
            begin, place = f"{prefix}{path}." if path else prefix, None if prefix else path
            for kind, table in _TABLES:
                for name, tensor in (getattr(module, table) or {}).items():
                    if tensor is not None and id(tensor) not in self.given:
                        given = Given(tensor, kind, begin + name, place, scripted=scripted)
                        self.given[id(tensor)] = given

    def note_on_gpu(self, tensors: Iterable[Tensor]) -> None:
        """Take note of tensors on a real GPU: C++ sees none in a trace, so they lie elsewhere."""
        with DisableTorchFunctionSubclass():
            for tensor in filter(private.is_on_real_gpu, tensors):
                given = self.given.get(id(tensor))
                if given is None or not given.moves:
                    self.given[id(tensor)] = Given(tensor, _kind_of(tensor))

    def references(self) -> Mapping[int, Reference]:
        """Return what stands for its tensors and modules, by their ids."""
        return {**self.given, **self.modules}

    def own_bytes(self) -> int:
        """Return what the elements of the target's own dense tensors take."""
        own = (one.tensor() for one in self.given.values() if one.path is not None)
        with DisableTorchFunctionSubclass():
            return sum(
                one.numel() * one.element_size()
                for one in own
                if one is not None and one.layout is torch.strided and not is_lazy(one)
            )

    # -- a step on other memory --------------------------------------------------------------------

    def lay(self, other: Other) -> None:
        """Let the tensors of the step lie on what ``other`` makes of them."""
        torch.clear_autocast_cache()  # which refers weakly to what it has cast
        with DisableTorchFunctionSubclass():
            for given in self.given.values():
                given.anew, tensor = None, given.tensor()
                if tensor is not None:
                    self._lay(tensor, given, other)

    def _lay(self, tensor: Tensor, given: Given, other: Other) -> None:
        if id(tensor) in self._laid:
            return
        if type(tensor) not in _OF_TORCH and private.is_wrapper(tensor):
            self._gradients.append((ref(tensor), gradient_of(tensor)))
            for part in private.wrapped_tensors(tensor):
                self._lay(part, given, other)
            return
        made = other(tensor, given)
        if made is None:
            self._lie.append(_lying(tensor))
            return
        gradient = gradient_of(tensor)
        if made.requires_grad != tensor.requires_grad:
            made.requires_grad_(tensor.requires_grad)
        if given.scripted is not None:
            name = given.name.rpartition(".")[2]
            parameter = isinstance(tensor, nn.Parameter)
            setattr(given.scripted, name, nn.Parameter(made) if parameter else made)
            self._scripted.append((given, tensor))
            return
        laid = self._laid[id(tensor)] = _Tensor(tensor, made)
        laid.exchange(tensor)
        if gradient is not None:
            self._lay(gradient, Given(gradient, Kind.OTHER, moves=given.moves), other)
            tensor.grad = gradient

    # -- what a program changes itself -------------------------------------------------------------

    def note_use(self, tensor: Tensor) -> None:
        """Take note of the gradient and version of a tensor that an operator is about to use."""
        if tensor not in self._used:
            version = -1 if tensor.is_inference() else private.version_of(tensor)
            leaf = tensor.requires_grad and tensor.is_leaf
            self._used[tensor] = (tensor.grad,) if leaf else (), version

    def note_data(self, tensor: Tensor) -> Tensor:
        """Take note of the data of a tensor that is about to be given other, and return that."""
        if tensor not in self._moved:
            own = tensor.data
            own.requires_grad_(tensor.requires_grad)
            own.grad = gradient_of(tensor)
            self._moved[tensor] = _Tensor(tensor, own)
        noted: Tensor = self._moved[tensor].own
        return noted

    def knows(self, module: nn.Module) -> bool:
        """Return whether note was taken of a module."""
        given = self.modules.get(id(module))
        return (given is not None and given.module() is module) or module in self._changed

    def note_module(self, module: nn.Module, beside: dict[str, Any]) -> None:
        """Take note of a module whose tables, and what it has ``beside``, are about to change."""
        own = vars(module)
        tables = {
            name: mapped(weakly, own[name]) for name in (private.PARAMETERS, private.CHILDREN)
        }
        self._changed[module] = _Module(module, tables | beside)

    def keep(self, module: nn.Module, name: str, when_gone: Callable[[Tensor], object]) -> None:
        """Keep the data that a parameter of a module came with, or one on ``meta`` itself.
        ``when_gone`` is called with the data when the parameter itself is gone.
        """
        parameter, changed = private.own_parameters(module).get(name), self._changed.get(module)
        if parameter is None or changed is None or parameter not in self._moved:
            return
        held, moved = changed.tables[private.PARAMETERS], self._moved[parameter]
        weak = held.get(name)
        if type(weak) is not Weak or weak() is not parameter:
            return  # it is kept, or of the trace
        if moved.own.is_meta:
            held[name] = parameter
            return
        data = moved.own
        moved.tensor = ref(parameter, lambda _: when_gone(data))
        held[name] = moved

    def keep_buffer(self, module: nn.Module, name: str, buffer: Tensor) -> None:
        """Keep a buffer in whose place another is about to be."""
        self._buffers.setdefault(module, {}).setdefault(name, buffer)

    def note_optimizer(self, optimizer: Optimizer, *, is_new: bool = False) -> None:
        """Take note of the state of an optimizer that is about to step; a new one keeps its own."""
        if is_new:
            self._optimizers[optimizer] = None
        elif optimizer not in self._optimizers:
            self._optimizers[optimizer] = {
                key: copy(one) if isinstance(one, dict) else one
                for key, one in optimizer.state.items()
            }

    # -- and given back ----------------------------------------------------------------------------

    def restore(self) -> None:
        torch.clear_autocast_cache()
        with DisableTorchFunctionSubclass():
            try:
                self._undo_changes()
            finally:
                self._lift()
            for reference, version, requires_grad in self._began:
                if (tensor := reference()) is not None:
                    _as_it_began(tensor, version, requires_grad)
        for module in self.modules.values():
            module.restore()

    def _lift(self) -> None:
        """Let tensors lie where they did."""
        while self._scripted:
            given, tensor = self._scripted.pop()
            setattr(given.scripted, given.name.rpartition(".")[2], tensor)
        while self._laid:
            key, laid = self._laid.popitem()
            own = laid.tensor()
            if own is not None:
                laid.give_back(own)
            elif key in self.given:
                self.given[key].anew = laid.found()
        for holder, gradient in self._gradients:
            if (wrapper := holder()) is not None:
                wrapper.grad = gradient
        self._gradients.clear()
        for restore in filter(None, self._lie):
            restore()

    def _undo_changes(self) -> None:
        for changed in [*self._changed.values()]:
            changed.restore()
        for tensor, moved in reversed([*self._moved.items()]):  # gradients before what they are of
            if not moved.own.is_meta and _place(tensor) != _place(moved.own):
                _let_lie(tensor, moved.own, moved.own.grad)
        for module, named in [*self._buffers.items()]:
            private.own_buffers(module).update(named)
        for tensor, (gradients, version) in [*self._used.items()]:
            for gradient in gradients:
                tensor.grad = gradient
            if version >= 0 and private.version_of(tensor) != version:
                private.set_version((tensor,), (version,))
        for optimizer, state in [*self._optimizers.items()]:
            if state is not None:
                optimizer.state.clear()
                optimizer.state.update(state)
        for notes in (self._changed, self._moved, self._buffers, self._used, self._optimizers):
            if notes:
                notes.clear()


def _exchange(tensor: Tensor, other: Tensor) -> None:
    """Exchange what two tensors are, or no more than their data where C++ refers to one weakly."""
    try:
        private.exchange_implementations(tensor, other)
    except RuntimeError:
        both = tensor, other
        data, gradients = [one.data for one in both], [gradient_of(one) for one in both]
        for one, lies, gradient in zip(both, reversed(data), reversed(gradients), strict=True):
            _let_lie(one, lies, gradient)


def _as_it_began(tensor: Tensor, version: int, requires_grad: bool) -> None:
    """Restore version and ``requires_grad``: a step may have written to a detached tensor of it,
    frozen it, or given a constant a history by writing in place what depends on a parameter.
    """
    if private.version_of(tensor) != version:
        private.set_version((tensor,), (version,))
    if tensor.requires_grad == requires_grad:
        return
    if requires_grad:
        tensor.requires_grad_()
    elif (base := private.view_base(tensor)) is not None:  # a view cannot be detached in place
        base.detach_()
        _exchange(tensor, tensor.detach())
    else:
        tensor.detach_()


def _let_lie(tensor: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    tensor.grad = None
    tensor.data = data
    tensor.grad = gradient


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return what differs between two tensors that are not on the same memory."""
    return private.storage_address(tensor), int(tensor.storage_offset())


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return a leaf's gradient; some views refuse to say (variable.cpp, handle_view_on_rebase)."""
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        return None


def _kind_of(tensor: Tensor) -> Kind:
    return Kind.PARAMETER if isinstance(tensor, nn.Parameter) else Kind.OTHER
