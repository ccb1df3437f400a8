"""The calls of operators, in order, and the functions of the program's source that made them.

Written down is what is at hand when an operator returns. Its floating-point operations are counted
when somebody asks, once for each plan.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.operators.work import CallWork
from pytest_torchmem.profile.operator_calls import GRAPH_NODE
from pytest_torchmem.profile.timeline import Origin
from pytest_torchmem.torch_private.tensors import current_node

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
                name = _name_of(current_node())
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


def _name_of(node: Any) -> str:
    return "" if node is None else str(node.name())


_LONGEST = 30
"""Letters of a dotted name beyond which its last part is told alone."""
_UNIT = 2
"""Bytes of an instruction."""


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
    if found is None:
        return ""
    first, last, begin, end = found
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if len(lines) != last - first + 1:
        return ""
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
