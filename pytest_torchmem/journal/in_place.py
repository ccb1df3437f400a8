"""Tensors and modules of a program, given back as they were.

For the length of a step the tensors of a module lie on other memory. What is exchanged is the
implementation in C++ (torch/csrc/Module.cpp, ``THPModule_swap_tensor_impl``): a tensor stays the
object that it is, with its class, attributes and weak references, and its data, gradient, graph and
version come back as they were. Where a program itself gives a tensor or a module something else,
note is taken before of what it had.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from operator import attrgetter
from types import MappingProxyType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pytest_torchmem.journal import contents
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import modules_by_path, tensors_in
from pytest_torchmem.torch_private import tensors as private
from pytest_torchmem.torch_private.modes import DisableTorchFunctionSubclass

_OF_TORCH = (Tensor, nn.Parameter)
_TABLES = (Kind.PARAMETER, private.PARAMETERS), (Kind.BUFFER, private.BUFFERS)
_HOOKS = private.GRADIENT_HOOKS, private.ACCUMULATED_HOOKS
_hooks_of: Callable[[Tensor], tuple[Any, Any]] = attrgetter(*_HOOKS)
_NO_HOOKS = None, None


@dataclass(slots=True, eq=False, repr=False)
class Given(contents.Reference):
    """A tensor that a step begins with, which is not kept alive, and what it is to the model."""

    tensor: contents.Weak
    kind: Kind
    name: str = ""
    path: str | None = None
    """That of the module which it is a parameter or buffer of; None for others."""
    moves: bool = True
    """Whether it goes to the device with the model or as an input."""
    scripted: Any = None
    """The module in C++ that holds it."""
    anew: Tensor | None = None
    """What takes its place where a step has let go of it."""

    def found(self) -> Tensor | None:
        tensor = self.tensor()
        return self.anew if tensor is None else tensor


Other = Callable[[Tensor, Given], Tensor | None]
"""Makes what a tensor is to lie on for the length of a step, if it is to."""


class _Tensor(contents.Reference):
    """A tensor as it was, and ``own``, which has its data; it may be kept alive or not."""

    __slots__ = ("_attributes", "_hooked", "_hooks", "_kind", "one", "own")

    def __init__(self, tensor: Tensor, own: Any) -> None:
        self.own, self._kind = own, type(tensor)
        self.one: Callable[[], Tensor | None] = lambda: None
        self._attributes = {**tensor.__dict__}
        self._hooks = _hooks_of(tensor)
        self._hooked = [{**table} if table else {} for table in self._hooks]

    def found(self) -> Any:
        tensor = self.one()
        if tensor is not None:
            return tensor
        if self.own.__class__ is not self._kind:
            self._restore_attributes(self.own)
        return self.own

    def exchange(self, tensor: Tensor) -> None:
        """Let the tensor be ``own``, with its hooks, which C++ has with the implementation."""
        _exchange(tensor, self.own)
        self.one = contents.Weak(tensor)
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
            contents.fill(tensor.__dict__, self._attributes)
        if _hooks_of(tensor) == _NO_HOOKS == self._hooks:  # as of most
            return
        for name, own, before in zip(_HOOKS, self._hooks, self._hooked, strict=True):
            if (now := getattr(tensor, name)) is not own:
                if now:  # C++ keeps it (python_variable.cpp, set_post_accumulate_grad_hooks)
                    now.clear()
                setattr(tensor, name, own)
            if own is not None:
                contents.fill(own, before)


class Gone:
    """Told of the data of tensors that a program lets go of."""

    def __init__(self) -> None:
        self.tell: Callable[[Tensor], object] = lambda data: None


class Noted(_Tensor):
    """A tensor that stays where it is. Where a program lets go of one whose data is kept, ``gone``
    is told, and it is made anew of that.
    """

    __slots__ = ("_gone", "_gradient", "_nbytes", "_other", "_requires_grad", "_version", "_was")

    def __init__(self, tensor: Tensor, gradient: "Noted | Tensor | None", gone: Gone) -> None:
        super().__init__(tensor, None)
        self._gradient, self._gone, self._requires_grad = gradient, gone, tensor.requires_grad
        self._version = -1 if tensor.is_inference() else private.version_of(tensor)
        self._was = _geometry(tensor)
        self._nbytes = _storage_bytes(tensor)
        self._other: contents.Weak | None = None
        """The tensor which has its data by a swap."""
        self.one = contents.Weak(tensor)

    def keep(self, tensor: Tensor) -> None:
        self.own = tensor.data
        self.one = self._watched(tensor)

    def _watched(self, tensor: Tensor) -> contents.Weak:
        own, gone = self.own, self._gone
        if self._nbytes is None:
            return contents.Weak(tensor)
        return contents.Weak(tensor, lambda _: gone.tell(own))

    def swapped(self, other: Tensor) -> None:
        self._other = self._watched(other)

    def found(self) -> Any:
        tensor = self.one()
        if tensor is None and self.own is not None:
            tensor = super().found()
            self.keep(tensor)
            self.restore()
        return contents.GONE if tensor is None else tensor

    def restore(self) -> None:
        """Let the tensor be as it was, if it is there."""
        tensor = self.one()
        if tensor is None:
            return
        self._restore_attributes(tensor)
        self._other = None
        if self._nbytes is not None and self.own is not None:
            storage = self.own.untyped_storage()
            if storage.nbytes() != self._nbytes and storage.resizable():
                storage.resize_(self._nbytes)
        gradient = contents.resolved(self._gradient)
        own = self.own
        if own is not None and (not _is_where(tensor, own) or _geometry(tensor) != self._was):
            _let_lie(tensor, self.own, gradient)
        elif gradient_of(tensor) is not gradient:
            tensor.grad = gradient
        if self._version >= 0:
            _as_it_began(tensor, self._version, self._requires_grad)


def _is_hollow(tensor: Tensor) -> bool:
    """Return whether a tensor is of a fake GPU that stands between traces: it dies there, too."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    no_memory = storage.nbytes() > 0 and not tensor.is_meta and not private.has_memory(storage)
    return no_memory or hasattr(storage, "shown")


def _storage_bytes(tensor: Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return None


class _Module(contents.Reference):
    """A module as it was, which is not kept alive: one that a step lets go of is made anew of what
    it had.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kind, self._own = type(module), vars(module)
        self._tables = {name: {**self._own[name]} for name in _filled(self._own)}
        self._hold(module)

    def _hold(self, module: nn.Module) -> None:
        names = private.PARAMETERS, private.BUFFERS, private.CHILDREN
        self.one = contents.Weak(module, partial(_clear, [*map(self._own.get, names)]))

    def found(self) -> nn.Module:
        found: nn.Module | None = self.one()
        if found is None:
            found = object.__new__(self._kind)
            found.__dict__ = self._own
            self._hold(found)
        return found

    def restore(self) -> None:
        """Give it back its class and hooks."""
        module, own = self.one(), self._own
        if module is not None and type(module) is not self._kind:
            module.__class__ = self._kind  # as a lazy one changes it
        for name in dict.fromkeys((*_filled(own), *self._tables)):
            contents.fill(own.setdefault(name, {}), self._tables.get(name, {}))


def _filled(own: Mapping[str, Any]) -> Iterable[str]:
    """Return which of a module's tables of hooks have any; of most modules none has."""
    return compress(private.HOOK_TABLES, map(own.get, private.HOOK_TABLES))


def _clear(tables: Iterable[Any], _: object) -> None:
    """Clear tables which only a module had, and of which note was taken."""
    for table in tables:
        if isinstance(table, dict):
            table.clear()


class InPlace:
    """The tensors and modules of a step, which is run on them again and again. All tensors that are
    ``reached`` lie afterwards as they did.
    """

    def __init__(
        self,
        reached: contents.Reached,
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
        self._noted: dict[int, Noted] = {}
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        """Those of the program's own, and those that it has made, which keep their state."""
        self._others: list[Callable[[], None]] = []
        """What gives back what is noted in the course of a step."""
        self.gone = Gone()
        with DisableTorchFunctionSubclass():
            self._note_modules(target, "")
            inputs = ((f"input {position}", value) for position, value in enumerate(args))
            for name, value in chain(inputs, kwargs.items()):
                self._note_modules(value, f"{name}.")
                for tensor in tensors_in(value):
                    self._give(tensor, Kind.INPUT, name)
            self._note_modules(loss_fn, "loss_fn.")
            if target is not None or args or kwargs:
                for tensor in reached.every_tensor(held=True):
                    self._give(tensor, _kind_of(tensor), moves=False)
        self._note_reached(reached)

    def _note_reached(self, reached: contents.Reached) -> None:
        with DisableTorchFunctionSubclass():
            for module in filter(None, (one() for one in reached.modules)):
                if self.knows(module):
                    continue
                self.modules[id(module)] = _Module(module)
                for _, table in _TABLES:
                    for tensor in (getattr(module, table) or {}).values():
                        if tensor is not None and id(tensor) not in self.given:
                            self.note(tensor)
            for tensor in reached.every_tensor():
                if id(tensor) not in self.given:
                    self.note(tensor, keeps=not _is_hollow(tensor))
            self.optimizers.update(reached.optimizers)

    def _give(self, tensor: Tensor | None, *of_it: Any, **named: Any) -> None:
        """Take note of a tensor, unless it was given before as something else."""
        if tensor is not None and id(tensor) not in self.given:
            self.given[id(tensor)] = Given(contents.Weak(tensor), *of_it, **named)

    def _note_modules(self, root: Any, prefix: str) -> None:
        for path, module in modules_by_path(root) if isinstance(root, nn.Module) else ():
            if id(module) not in self.modules:
                self.modules[id(module)] = _Module(module)
            scripted = module if isinstance(module, torch.jit.ScriptModule) else None
            begin, place = f"{prefix}{path}." if path else prefix, None if prefix else path
            for kind, table in _TABLES:
                for name, tensor in (getattr(module, table) or {}).items():
                    self._give(tensor, kind, begin + name, place, scripted=scripted)

    def note_on_gpu(self, tensors: Iterable[Tensor]) -> None:
        """Take note of tensors on a real GPU: C++ sees none in a trace, so they lie elsewhere."""
        with DisableTorchFunctionSubclass():
            for tensor in filter(private.is_on_real_gpu, tensors):
                given = self.given.get(id(tensor))
                if given is None or not given.moves:
                    self.given[id(tensor)] = Given(contents.Weak(tensor), _kind_of(tensor))

    def references(self) -> Mapping[int, contents.Reference]:
        """Return what stands for its tensors and modules, by their ids."""
        notes: list[Noted | _Module] = [*self._noted.values(), *self.modules.values()]
        found: dict[int, contents.Reference] = {
            id(one): noted for noted in notes for one in (noted.one(),) if one is not None
        }
        return found | self.given

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
            self.note(tensor)
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
            of_it = Given(contents.Weak(gradient), Kind.OTHER, moves=given.moves)
            self._lay(gradient, of_it, other)
            tensor.grad = gradient

    # -- what a program changes itself -------------------------------------------------------------

    def note(self, tensor: Tensor, *, keeps: bool = True) -> Noted | None:
        """Return what a tensor was that stays where it is, before anything is done with it.
        ``keeps``: with its data.
        """
        noted = self._noted.get(id(tensor))
        if noted is None or noted.one() is not tensor:
            if id(tensor) in self._laid or private.has_dispatch(tensor):
                return None
            gradient = gradient_of(tensor)
            of_gradient = None if gradient is None else self.note(gradient)
            noted = Noted(tensor, of_gradient or gradient, self.gone)
            self._noted[id(tensor)] = noted
        if keeps and noted.own is None:
            noted.keep(tensor)
        return noted

    def note_storage(self, storage: torch.UntypedStorage) -> None:
        """Keep the bytes of a real storage that is about to be resized."""
        held, kept = ref(storage), private.bytes_of(storage).clone()

        def restore() -> None:
            if (found := held()) is not None:
                found.resize_(kept.nbytes)
                private.bytes_of(found).copy_(kept)

        self._others.append(restore)

    def knows(self, module: nn.Module) -> bool:
        """Return whether note was taken of a module."""
        given = self.modules.get(id(module))
        return given is not None and given.one() is module

    def note_other(
        self, one: nn.Module | Optimizer, tables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Take note of a module or an optimizer that could not be reached from the beginning.
        ``tables``: what has been in these of its own, which were changed already.
        """
        if self.knows(one) if isinstance(one, nn.Module) else one in self.optimizers:
            return
        reached = contents.Reached(None, one)
        self._note_reached(reached)
        self._others += [partial(contents.fill, vars(one)[name], tables[name]) for name in tables]
        state = contents.ProgramState(reached, self.references(), of_modules=True)
        self._others.append(state.restore)

    # -- and given back ----------------------------------------------------------------------------

    def restore(self) -> None:
        torch.clear_autocast_cache()
        with DisableTorchFunctionSubclass():
            self._lift()
            for noted in [*self._noted.values()]:  # gradients before what they are of
                noted.restore()
        for module in [*self.modules.values()]:
            module.restore()
        while self._others:
            self._others.pop()()

    def _lift(self) -> None:
        """Let tensors lie where they did."""
        while self._scripted:
            given, tensor = self._scripted.pop()
            setattr(given.scripted, given.name.rpartition(".")[2], tensor)
        while self._laid:
            key, laid = self._laid.popitem()
            own = laid.one()
            if own is not None:
                laid.give_back(own)
            elif key in self.given:
                self.given[key].anew = laid.found()
        for holder, gradient in self._gradients:
            if (wrapper := holder()) is not None:
                wrapper.grad = gradient
        self._gradients.clear()


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
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _is_where(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are of one kind, on the same memory."""
    try:
        same = private.storage_address(tensor) == private.storage_address(other)
    except (RuntimeError, NotImplementedError):  # of other layouts, whose parts are not exchanged
        return tensor.layout is other.layout
    return same and tensor.dtype is other.dtype


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return a leaf's gradient; some views refuse to say (variable.cpp, handle_view_on_rebase)."""
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        return None


def _kind_of(tensor: Tensor) -> Kind:
    return Kind.PARAMETER if isinstance(tensor, nn.Parameter) else Kind.OTHER
