"""The fingerprint of what a step works on, and the names of its parameters and optimizer states.

It distinguishes other work (larger inputs, a wider model) from the same work that needs more, and
a renamed test from a new one. It is made of what the program chose and of nothing that torch, the
device or the machine choose: shapes, dtypes and the parameters' bytes.
"""

import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pytest_torchmem.interception.facts import FactCollector
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.profile.timeline import Allocation, Kind
from pytest_torchmem.step.trees import shape_text, tensors_in
from pytest_torchmem.torch_private.tensors import is_wrapper, storage_address, wrapped_tensors

_RANDOM = frozenset(("rand", "randn", "randint", "randperm", "normal"))
"""Factories by which a program without modules makes its inputs."""


def fingerprint_of_step(ledger: Ledger, device: torch.device) -> str:
    """Return the fingerprint of a module's step: its inputs' geometry and its parameters' bytes.

    Called before the forward, when nothing else is in the ledger.
    """
    lines: list[str] = []
    parameters = 0
    for entry in ledger.devices[device].entries.values():
        if entry.kind is Kind.INPUT:
            lines.append(f"{entry.label} {_line(entry)}")
        else:
            parameters += entry.nbytes
    return _digest([*lines, f"{parameters}"])


class Program:
    """What a callable works on, which is only seen as it runs.

    That is what it hands to the modules that it calls itself, and what real tensors it brings with
    it; of a program that has neither, the random tensors that it makes. How often and in which
    order does not count: that is for the figures to show.
    """

    def __init__(self, ledger: Ledger, facts: FactCollector) -> None:
        self._ledger = ledger
        self._facts = facts
        self._calls: set[str] = set()
        # Weak: a module that the program lets go of has to go.
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self.names: dict[int, tuple[Kind, str, str]] = {}
        """Kind, label and module of real tensors of modules, by the address of their storage."""

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call of a module that no other module makes."""
        known = self._parameters.get(id(module))
        if known is None or known[0]() is not module:
            known = weakref.ref(module), self._name_tensors(module)
            self._parameters[id(module)] = known
            self._facts.model(module)
        own = type(module).__name__
        self._facts.called_with(own, args, kwargs)
        self._facts.given(f"input of {own}", tensors_in(args))
        for name in kwargs:
            self._facts.given(f"{name} of {own}", tensors_in(kwargs[name]))
        given = list(_geometries(args))
        given += [
            f"{name} {found}" for name in sorted(kwargs) for found in _geometries(kwargs[name])
        ]
        self._calls.add(f"{known[1]} {' '.join(given)}\n")

    def fingerprint(self) -> str:
        """Return the fingerprint of what was met, "" where the program works on nothing known."""
        lines = sorted(self._calls)
        devices = self._ledger.devices.values()
        brought = (device.entries[index - 1] for device in devices for index in device.earlier)
        lines += sorted(_line(entry) for entry in brought if not entry.label)
        if not lines:
            made = (entry for device in devices for entry in device.entries.values())
            lines = sorted(_line(entry) for entry in made if _is_random(entry))
        return _digest(lines) if lines else ""

    def _name_tensors(self, module: nn.Module) -> int:
        """Give a module's parameters and buffers their names; return the parameters' bytes."""
        nbytes = 0
        for name, parameter in module.named_parameters():
            nbytes += self._name(module, parameter, Kind.PARAMETER, name)
        for name, buffer in module.named_buffers():
            self._name(module, buffer, Kind.BUFFER, name)
        return nbytes

    def _name(self, module: nn.Module, tensor: Tensor, kind: Kind, name: str) -> int:
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            return 0
        for part in wrapped_tensors(tensor) if is_wrapper(tensor) else [tensor]:
            try:
                address = storage_address(part)
            except (NotImplementedError, RuntimeError):  # what ``torch.func`` puts in its place
                return 0
            owner = owner_of(module, name)
            record = self._ledger.records.get(address)
            if record is None:
                self.names.setdefault(address, (kind, name, owner))
            else:
                record.ledger.name(record.index, kind, name, owner)
        return tensor.numel() * tensor.element_size()


def owner_of(root: nn.Module, name: str) -> str:
    """Return the path of the module that a parameter's ``name`` stands in, as origins write it."""
    path = name.rpartition(".")[0]
    return f"{type(root).__name__}.{path}" if path else type(root).__name__


def _geometries(value: Any) -> Iterator[str]:
    return (f"{tensor.dtype}{shape_text(tensor)}" for tensor in tensors_in(value))


def _line(entry: Allocation) -> str:
    dtype = f"torch.{entry.dtype}" if entry.dtype else None
    return f"{dtype}{list(entry.shape)}\n"


def _is_random(entry: Allocation) -> bool:
    return entry.origin.operator.partition("::")[2].partition(".")[0] in _RANDOM


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


class OptimizerStates:
    """Finds the state of optimizers that make a step."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._first: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Tensor]]
        self._first = weakref.WeakKeyDictionary()
        """The first tensor of an optimizer's state: another one where other state was loaded."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer that has made a step."""
        first = next(_tensors_of(optimizer), None)
        known = self._first.get(optimizer)
        if first is None or (known is not None and known() is first):
            return
        self._first[optimizer] = weakref.ref(first)
        for tensor in _tensors_of(optimizer):
            for address in _addresses(tensor):
                record = self._ledger.records.get(address)
                if record is not None:
                    record.ledger.note_state(record.index)


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return tensors_in(list(optimizer.state.values()))


def _addresses(tensor: Tensor) -> list[int]:
    """Return those of the storages of a tensor or of what it wraps; [] where it has none."""
    try:
        parts = wrapped_tensors(tensor) if is_wrapper(tensor) else [tensor]
        return [storage_address(part) for part in parts]
    except (NotImplementedError, RuntimeError):  # sparse
        return []
