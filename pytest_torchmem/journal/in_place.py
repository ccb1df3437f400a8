"""Tensors of a step on other memory for its length, and as they were afterwards.

What is exchanged is the implementation in C++ (torch/csrc/Module.cpp,
``THPModule_swap_tensor_impl``): a tensor stays the object that it is, with its class, attributes
and weak references, and its data, gradient, graph and version come back as they were.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.journal.contents import fill
from pytest_torchmem.journal.reached import (
    CONTAINERS,
    MAPPINGS,
    PLAIN,
    Reached,
    container_of,
    is_of_program,
    items_of,
)
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import modules_by_path, tensors_in, tensors_in_tables
from pytest_torchmem.torch_private.dispatch.overrides import DisableTorchFunctionSubclass
from pytest_torchmem.torch_private.tensors.storages import storage_address
from pytest_torchmem.torch_private.tensors.tensors import (
    ACCUMULATED_HOOKS,
    BUFFERS,
    CHILDREN,
    GRADIENT_HOOKS,
    HOOK_TABLES,
    PARAMETERS,
    exchange_implementations,
    is_wrapper,
    set_version,
    version_of,
    wrapped_tensors,
)

_PLAIN = frozenset(PLAIN) | {bool}
_OF_TORCH = (Tensor, nn.Parameter)
_HOOKS = GRADIENT_HOOKS, ACCUMULATED_HOOKS


class Given(NamedTuple):
    """A tensor that a step begins with, and what it is to the model."""

    tensor: ref[Tensor]
    kind: Kind
    name: str
    path: str | None
    """That of the module which it is a parameter or buffer of; None for others."""
    moves: bool
    """Whether it goes to the device with the model or as an input."""
    scripted: Any = None
    """The module in C++ that holds it."""


Other = Callable[[Tensor, Given], Tensor | None]
"""Makes what a tensor is to lie on for the length of a step, if it is to."""


class _Laid(NamedTuple):
    """A tensor that lies elsewhere, which is not kept alive, and ``own``, what it was before."""

    tensor: ref[Tensor]
    own: Tensor
    kind: type
    attributes: dict[str, Any]
    hooks: list[tuple[Any, dict[int, Any]]]
    """The tables of its hooks, and what was in them."""


class _Module:
    """A module, which is not kept alive: one that a step lets go of is made anew of what it had."""

    def __init__(self, module: nn.Module) -> None:
        self._kind, self._own = type(module), vars(module)
        self._hooks = {name: {**self._own[name]} for name in HOOK_TABLES if self._own.get(name)}
        self._anew: nn.Module | None = None
        tables = [self._own.get(name) for name in (PARAMETERS, BUFFERS, CHILDREN)]

        def let_go(_: object) -> None:
            for table in tables:  # which only the module had, and of which note was taken
                if isinstance(table, dict):
                    table.clear()

        self._module = ref(module, let_go)

    @property
    def module(self) -> nn.Module:
        """Return the module, or one that takes its place."""
        found = self._module()
        if found is None:
            found = self._anew = self._anew or object.__new__(self._kind)
            found.__dict__ = self._own
        return found

    def restore(self) -> None:
        """Give it back its class and hooks."""
        module = self._module()
        if module is not None and type(module) is not self._kind:
            module.__class__ = self._kind  # as a lazy one changes it
        for name in HOOK_TABLES:
            before = self._hooks.get(name, {})
            if ((now := self._own.get(name)) or before) and now is not None:
                fill(now, before)


class _Lies(NamedTuple):
    """How a tensor lay, which is not held, on which storage."""

    tensor: ref[Tensor]
    storage: int
    nbytes: int
    geometry: tuple[Any, ...]
    version: int

    @classmethod
    def of(cls, reference: ref[Tensor]) -> "_Lies | None":
        """Return how a strided tensor lies; of others nothing changes so."""
        tensor: Any = reference()
        if type(tensor) not in _OF_TORCH or tensor.layout is not torch.strided:
            return None
        try:
            address, nbytes = storage_address(tensor), tensor.untyped_storage().nbytes()
            version = -1 if tensor.is_inference() else version_of(tensor)
            return cls(reference, address, nbytes, _geometry(tensor), version)
        except (RuntimeError, NotImplementedError):  # it has no storage, or is a lazy parameter
            return None

    def restore(self) -> None:
        """Let it lie so if it is still on its storage.

        An operator in place that changes no more than that (``resize_``, ``t_``) runs on the
        program's own tensor.
        """
        tensor = self.tensor()
        if tensor is None or storage_address(tensor) != self.storage:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() != self.nbytes and storage.resizable():
            storage.resize_(self.nbytes)
        if _geometry(tensor) != self.geometry:
            with torch.no_grad():
                tensor.set_(storage, *self.geometry)
            if self.version >= 0:
                set_version((tensor,), (self.version,))


class InPlace:
    """The tensors and modules of a step, which is run on them again and again.

    All tensors that are ``reached`` lie afterwards as they did.
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
        self._laid: dict[int, _Laid] = {}
        self._scripted: list[tuple[Given, Tensor]] = []
        self._gradients: list[tuple[ref[Tensor], Tensor | None]] = []
        """Those of tensors whose parts lie elsewhere."""
        self._gone: dict[int, Tensor] = {}
        """What takes the place of tensors that a step has let go of."""
        self.modules: dict[int, _Module] = {}
        self._lie = [one for one in map(_Lies.of, reached.tensors) if one is not None]
        with DisableTorchFunctionSubclass():
            roots = [target] if isinstance(target, nn.Module) else []
            self._note_modules(target, "")
            for position, value in enumerate(args):
                roots += self._note_value(value, f"input {position}")
            for name, value in kwargs.items():
                roots += self._note_value(value, name)
            if isinstance(loss_fn, nn.Module):
                self._note_modules(loss_fn, "loss_fn.")
                roots.append(loss_fn)
            for tensor in _tensors_beside(roots):
                self._note(tensor, _kind_of(tensor), "", None, moves=False)

    def _note_value(self, value: Any, name: str) -> list[Any]:
        self._note_modules(value, f"{name}.")
        for tensor in tensors_in(value):
            self._note(tensor, Kind.INPUT, name, None)
        return [value]

    def _note_modules(self, root: Any, prefix: str) -> None:
        if not isinstance(root, nn.Module):
            return
        modules = modules_by_path(root)
        by_path = dict(modules)
        for module in by_path.values():
            if id(module) not in self.modules:
                self.modules[id(module)] = _Module(module)
        found: dict[str, list[tuple[Tensor, Kind, str]]] = {path: [] for path in by_path}
        for kind, table in ((Kind.PARAMETER, PARAMETERS), (Kind.BUFFER, BUFFERS)):
            for path, name, tensor in tensors_in_tables(modules, table):
                found[path].append((tensor, kind, f"{path}.{name}" if path else name))
        for path, module in modules:
            scripted = module if isinstance(module, torch.jit.ScriptModule) else None
            place = None if prefix else path
            for tensor, kind, name in found[path]:
                self._note(tensor, kind, prefix + name, place, scripted=scripted)

    def _note(
        self,
        tensor: Tensor,
        kind: Kind,
        name: str,
        path: str | None,
        *,
        moves: bool = True,
        scripted: Any = None,
    ) -> None:
        if id(tensor) not in self.given:
            self.given[id(tensor)] = Given(ref(tensor), kind, name, path, moves, scripted)

    def own_bytes(self) -> int:
        """Return what the elements of the target's own dense tensors take."""
        own = (one.tensor() for one in self.given.values() if one.path is not None)
        with DisableTorchFunctionSubclass():
            return sum(
                one.numel() * one.element_size()
                for one in own
                if one is not None and one.layout is torch.strided and not is_lazy(one)
            )

    def lay(self, other: Other) -> None:
        """Let the tensors of the step lie on what ``other`` makes of them."""
        self._gone.clear()
        torch.clear_autocast_cache()  # which refers weakly to what it has cast
        with DisableTorchFunctionSubclass():
            for given in self.given.values():
                tensor = given.tensor()
                if tensor is not None:
                    self._lay(tensor, given, other)

    def _lay(self, tensor: Tensor, given: Given, other: Other) -> None:
        if id(tensor) in self._laid:
            return
        if is_wrapper(tensor):
            self._gradients.append((ref(tensor), _gradient(tensor)))
            for part in wrapped_tensors(tensor):
                self._lay(part, given, other)
            return
        made = other(tensor, given)
        if made is None:
            return
        gradient = _gradient(tensor)
        if made.requires_grad != tensor.requires_grad:
            made.requires_grad_(tensor.requires_grad)
        if given.scripted is not None:
            name = given.name.rpartition(".")[2]
            parameter = isinstance(tensor, nn.Parameter)
            setattr(given.scripted, name, nn.Parameter(made) if parameter else made)
            self._scripted.append((given, tensor))
            return
        hooks = [getattr(tensor, name) for name in _HOOKS]
        before = [(table, {**(table or {})}) for table in hooks]
        attributes = {**tensor.__dict__}
        _exchange(tensor, made)
        self._laid[id(tensor)] = _Laid(ref(tensor), made, type(tensor), attributes, before)
        for name, table in zip(_HOOKS, hooks, strict=True):
            if table:
                setattr(tensor, name, table)  # which C++ has with the implementation
        if gradient is not None:
            self._lay(gradient, given._replace(kind=Kind.OTHER, name="", path=None), other)
            tensor.grad = gradient

    def restore(self) -> None:
        """Let all lie as it did."""
        torch.clear_autocast_cache()
        with DisableTorchFunctionSubclass():
            while self._scripted:
                given, tensor = self._scripted.pop()
                setattr(given.scripted, given.name.rpartition(".")[2], tensor)
            while self._laid:
                key, laid = self._laid.popitem()
                own = laid.tensor()
                if own is None:
                    own = self._gone[key] = laid.own
                else:
                    _exchange(own, laid.own)
                own.__class__ = laid.kind
                _restore_attributes(own, laid)
            for holder, gradient in self._gradients:
                if (wrapper := holder()) is not None:
                    wrapper.grad = gradient
            self._gradients.clear()
            for lies in self._lie:
                lies.restore()
        for module in self.modules.values():
            module.restore()

    def keys(self) -> Set[int]:
        """Return the ids of its tensors and modules."""
        return self.given.keys() | self.modules.keys()

    def __getitem__(self, key: int) -> Any:
        """Return a tensor or module by its ``id``, or what takes its place."""
        if key in self.modules:
            return self.modules[key].module
        gone = self._gone.get(key)
        return self.given[key].tensor() if gone is None else gone


def _exchange(tensor: Tensor, other: Tensor) -> None:
    """Exchange what two tensors are, or no more than their data where C++ refers to one weakly."""
    try:
        exchange_implementations(tensor, other)
    except RuntimeError:
        both = tensor, other
        data, gradients = [one.data for one in both], [_gradient(one) for one in both]
        for one, lies, gradient in zip(both, reversed(data), reversed(gradients), strict=True):
            one.grad = None
            one.data = lies
            one.grad = gradient


def _restore_attributes(tensor: Tensor, laid: _Laid) -> None:
    fill(tensor.__dict__, laid.attributes)
    for name, (own, before) in zip(_HOOKS, laid.hooks, strict=True):
        if getattr(tensor, name) is not own:
            setattr(tensor, name, own)
        if own is not None:
            fill(own, before)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _gradient(tensor: Tensor) -> Tensor | None:
    """Return the gradient of a leaf; some views refuse to say whether they are one
    (autograd/variable.cpp, ``handle_view_on_rebase``).
    """
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        return None


def _kind_of(tensor: Tensor) -> Kind:
    return Kind.PARAMETER if isinstance(tensor, nn.Parameter) else Kind.OTHER


def _tensors_beside(waiting: list[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the attributes of objects, and of those that these hold."""
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind in _PLAIN or id(one) in seen or (kind in CONTAINERS and not one):
            continue
        if kind not in CONTAINERS and isinstance(one, PLAIN):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
            continue
        container = container_of(kind)
        if container is not None:
            waiting += container.values(one) if container in MAPPINGS else items_of(one)
        own = getattr(one, "__dict__", None)
        if type(own) is dict and is_of_program(kind):
            waiting += own.values()
