"""Clones of a step's module and inputs: the user's own are never changed, moved or run."""

from __future__ import annotations

import copy
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.errors import add_note
from pytest_torchmem.step.object_copies import ObjectCopier
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
_HOOK_OF_ORIGINAL = (
    "(A hook of a parameter was called with a copy of it, on which the step runs, and did not find "
    "that among what it has. Check or trace a function that builds the model and registers hooks.)"
)


class Cloner(ObjectCopier):
    """Deep copies in which every tensor, wherever it is found, is cloned once.

    Functions that hold parts of a module (``clone_functions.py``) hold those of its copy. What
    becomes of a tensor is for a subclass to say; without a device it stays where it is.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        super().__init__()
        self._left_to_torch: set[int] = set()
        """Tensors that are copied as torch itself does, by their ids."""
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

    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """Return the clone of a tensor, or its deep copy within one that is left to torch."""
        if self._left_to_torch:
            return cast(Tensor, self.copy_as_python(tensor))
        return self.clone_tensor(tensor)

    def copy_as_python(self, value: Any) -> Any:
        """Return what ``copy.deepcopy`` makes of an object, with the clones of its tensors."""
        if self._cloning_on == threading.get_ident():
            return copy.deepcopy(value, self._memo)
        with self._cloning():
            return copy.deepcopy(value, self._memo)

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
            return cast(Tensor, self.copy_as_python(tensor))
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
