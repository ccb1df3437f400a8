"""What a trace keeps of its operators, and of what its step works on.

Calls of operators, in order, and the functions of the program's source that made them: what is at
hand when an operator returns is written down. Floating-point operations are counted when somebody
asks, once for each plan.

The fingerprint distinguishes other work (larger inputs, a wider model) from the same work that
needs more, and a renamed test from a new one. It is made of what the program chose and of nothing
that torch, the device or the machine choose: shapes, dtypes and the parameters' bytes. Beside it
stand the names of the step's parameters and optimizer states.
"""

import ast
import hashlib
import linecache
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import attrgetter
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.facts import FactCollector
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.operators.workspace_of import CallWork
from pytest_torchmem.profile.timeline import GRAPH_NODE, Allocation, Kind, Origin
from pytest_torchmem.step.trees import Args, Kwargs, shape_text, tensors_in
from pytest_torchmem.torch_private import tensors as private

_requires_grad = attrgetter("requires_grad")
_ledger, _index = attrgetter("ledger"), attrgetter("index")


class OperatorLog:
    """Writes down calls that no other operator made; what a body calls is its work."""

    def __init__(self, attribution: Attribution, ledger: Ledger) -> None:
        self._devices = ledger.devices
        self._attribution = attribution
        self._recorded: set[int] = set()
        """Numbers of the autograd nodes of calls that were written down."""
        self._bodies: list[list[CallWork]] = []
        """The work so far of the bodies that are running, the innermost last."""

    @contextmanager
    def body(self) -> Iterator[list[CallWork]]:
        """Collect the work of what an operator's body calls."""
        inner: list[CallWork] = []
        self._bodies.append(inner)
        try:
            yield inner
        finally:
            self._bodies.pop()

    def note(
        self,
        tensors: list[Tensor],
        records: list[StorageRecord],
        work: CallWork,
        device: DeviceLedger,
        origin: Origin,
        start: int,
    ) -> None:
        """Write down a call that returned, and before which there were ``start`` events."""
        if self._bodies:
            self._bodies[-1].append(work)
            return
        calls = device.calls
        if calls is None:
            return
        name, number = "", self._attribution.node_number
        if number < 0:
            if -number not in self._recorded:
                node = private.current_node()
                name = "" if node is None else str(node.name())
        elif torch.is_grad_enabled() and True in map(_requires_grad, tensors):
            self._recorded.add(number)
        else:
            number = 0
        if len(self._devices) > 1 and [*map(_ledger, records)].count(device) < len(records):
            records = [record for record in records if record.ledger is device]
        reads = tuple(map(_index, records))
        calls.append(
            (start, len(device.events), origin, number, name, reads, work, GRAPH_NODE.get())
        )


_LONGEST = 30
"""Letters of a dotted name beyond which its last part is told alone."""
_UNIT = 2
"""Bytes of an instruction."""
_CONVERTS = re.compile(rb"\.(?:to|type|cpu|cuda|half|bfloat16|float|double|bool|int|long)\(")


def functions_called(
    sites: Iterable[tuple[Origin, tuple[CodeType, int]]],
) -> Iterator[tuple[Origin, str]]:
    """Yield the functions that call operators of other names, where Python knows (from 3.11)."""
    names: dict[tuple[int, int], str] = {}  # the hash of code is that of its constants
    for origin, (code, instruction) in sites:
        at = id(code), instruction
        if at not in names:
            names[at] = _function_at(code, instruction)
        name = names[at]
        own = origin.operator.partition("::")[2].partition(".")[0]
        called = name.rpartition(".")[2].strip("_")
        if called and called not in (own.strip("_"), "forward"):
            yield origin, name


def _function_at(code: CodeType, instruction: int) -> str:
    """Return the name of what an instruction calls, as the source has it, "" for anything else."""
    if not hasattr(code, "co_positions"):
        return ""
    found = next(islice(code.co_positions(), instruction // _UNIT, None), None)
    if found is None or None in found:
        return ""
    first, last, begin, end = cast(tuple[int, int, int, int], found)
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if len(lines) != last - first + 1 or len(_CONVERTS.findall(b"".join(lines))) > 1:
        return ""  # of several conversions in a line the operator is the same
    lines[-1] = lines[-1][:end]  # before the first is cut, which may be the same
    lines[0] = lines[0][begin:]
    try:
        tree = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since it was imported
        return ""
    return _called_name(tree.func) if isinstance(tree, ast.Call) else ""


def _called_name(function: ast.expr) -> str:
    """Return a dotted name; of a method of what an expression gives, its own: ``.float``."""
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    whole = ast.unparse(function)
    dotted = all(part.isidentifier() for part in whole.split("."))
    if not dotted:
        return f".{function.attr}"
    return whole if len(whole) <= _LONGEST else function.attr


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

    def called(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Take note of a call of a module that no other module makes."""
        known = self._parameters.get(id(module))
        if known is None or known[0]() is not module:
            nbytes = 0
            for name, parameter in module.named_parameters():
                nbytes += self._name(module, parameter, Kind.PARAMETER, name)
            for name, buffer in module.named_buffers():
                self._name(module, buffer, Kind.BUFFER, name)
            known = weakref.ref(module), nbytes
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
            lines = sorted(
                _line(entry)
                for entry in made
                if entry.origin.operator.partition("::")[2].partition(".")[0] in _RANDOM
            )
        return _digest(lines) if lines else ""

    def _name(self, module: nn.Module, tensor: Tensor, kind: Kind, name: str) -> int:
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            return 0
        addresses = _addresses(tensor)
        # as origins write it
        path = name.rpartition(".")[0]
        owner = f"{type(module).__name__}.{path}" if path else type(module).__name__
        for address in addresses:
            record = self._ledger.records.get(address)
            if record is None:
                self.names.setdefault(address, (kind, name, owner))
            else:
                record.ledger.name(record.index, kind, name, owner)
        return tensor.numel() * tensor.element_size() if addresses else 0


def _geometries(value: Any) -> Iterator[str]:
    return (f"{tensor.dtype}{shape_text(tensor)}" for tensor in tensors_in(value))


def _line(entry: Allocation) -> str:
    dtype = f"torch.{entry.dtype}" if entry.dtype else None
    return f"{dtype}{list(entry.shape)}\n"


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
        states = list(optimizer.state.values())
        first, known = next(tensors_in(states), None), self._first.get(optimizer)
        if first is None or (known is not None and known() is first):
            return
        self._first[optimizer] = weakref.ref(first)
        for tensor in tensors_in(states):
            for address in _addresses(tensor):
                record = self._ledger.records.get(address)
                if record is not None:
                    record.ledger.note_state(record.index)


def _addresses(tensor: Tensor) -> list[int]:
    """Return those of the storages of a tensor or of what it wraps; [] where it has none: sparse
    ones, and what ``torch.func`` puts in the place of others.
    """
    try:
        parts = private.wrapped_tensors(tensor) if private.is_wrapper(tensor) else [tensor]
        return [*map(private.storage_address, parts)]
    except (NotImplementedError, RuntimeError):
        return []
