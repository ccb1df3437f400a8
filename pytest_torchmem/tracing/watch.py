"""A trace that is run once more, after a check has failed, to see what a profile does not hold.

That is why attention took the way it took, and what refers to tensors that are still alive. What it
takes to see this would be felt by the program, so that the figures are those of the first trace.

Tensors alive in garbage that Python has not collected are told with the program's objects in it.
"""

import gc
import os
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, cast

import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pytest_torchmem.interception.attribution import Attribution, is_own
from pytest_torchmem.interception.facts import is_installed
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.operators.attention.dot_product import why_not_fused
from pytest_torchmem.operators.calls import AttentionArguments
from pytest_torchmem.profile.timeline import Allocation
from pytest_torchmem.torch_private.modes import FunctionMode
from pytest_torchmem.torch_private.patches import replaced
from pytest_torchmem.torch_private.tensors import storage_address
from pytest_torchmem.tracing.holders import HeldNames, holding_graphs, tensors_alive
from pytest_torchmem.tracing.trace import WATCH

_MOST_TENSORS = 20


class Watch:
    """What is seen of a trace that is watched."""

    def __init__(self, device: str, wanted: Mapping[int, int], before: int) -> None:
        self.attention: dict[str, str] = {}
        """By the line that calls attention: why no fused kernel took it."""
        self.holders: dict[int, str] = {}
        """What refers to the tensors of allocations, by their indices in the timeline."""
        self.savers: dict[int, tuple[str, str]] = {}
        """The ``autograd.Function`` that saved them for its backward, and its line."""
        self._device = device
        self._wanted = wanted
        """Indices of the allocations that are asked about, and their bytes."""
        self._ledger: Ledger | None = None
        self._before = before
        """The index of the allocation before which to look; -1 for the end of the step."""

    def saw_attention(self, *args: Any, **kwargs: Any) -> None:
        """Take note of a call of scaled dot-product attention."""
        kwargs.pop("scale", None)
        names = ("attn_mask", "dropout_p", "is_causal", "enable_gqa")
        given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
        given |= dict(zip(names, args[3:6], strict=False)) | kwargs
        reason = why_not_fused(
            AttentionArguments(*args[:3], *(given[name] for name in names)), self._device
        )
        self.attention.setdefault(Attribution().user_line(), reason)

    def saw_weights(self) -> None:
        """Take note of a call of multi-head attention that has to return its weights."""
        self.attention.setdefault(Attribution().user_line(), "need_weights=True")

    def saw_saved(self, context: object, tensors: Collection[object]) -> None:
        """Take note of what a function of a program's saves for its backward."""
        ledger = self._ledger
        device = self._device_of(ledger) if ledger is not None else None
        if ledger is None or device is None:
            return
        saver = type(context).__name__.removesuffix("Backward"), Attribution().user_line()
        for tensor in tensors:
            record = ledger.records.get(_address(tensor)) if isinstance(tensor, Tensor) else None
            if record is not None and record.ledger is device and record.index - 1 in self._wanted:
                self.savers.setdefault(record.index - 1, saver)

    def at_begin(self, ledger: Ledger) -> None:
        """Look at what is alive just before an allocation is made, where one is given."""
        self._ledger = ledger
        device = self._device_of(ledger)
        if device is None or self._before < 0:
            return
        before_adding = device.before_adding

        def before(entry: Allocation, stream: int) -> None:
            if device.booked == self._before and not self.holders:
                self._look(ledger, device)
            if before_adding is not None:
                before_adding(entry, stream)

        device.before_adding = before

    def at_end(self, ledger: Ledger) -> None:
        """Look at what is alive at the end, where that is the moment that is asked about."""
        device = self._device_of(ledger)
        if device is not None and self._before < 0:
            self._look(ledger, device)

    def _device_of(self, ledger: Ledger) -> DeviceLedger | None:
        found = (
            one
            for one in ledger.devices.values()
            if one.device.type == self._device and one.device.index in (None, 0)
        )
        return next(found, None) if self._wanted else None

    def _look(self, ledger: Ledger, device: DeviceLedger) -> None:
        """Find out what refers to the allocations that are asked about."""
        alive = {
            address: record.index - 1
            for address, record in ledger.records.items()
            if record.ledger is device
            and device.entries[record.index - 1].nbytes == self._wanted.get(record.index - 1)
        }
        if alive:
            self._name(device, alive)
            self._find_cycles(ledger, alive)

    def _name(self, device: DeviceLedger, alive: Mapping[int, int]) -> None:
        """Name what refers to allocations: ``alive`` has their indices by their addresses."""
        found = tensors_alive()
        names = HeldNames(ignore=found)
        asked = [(index, one) for one in found if (index := alive.get(_address(one))) is not None]
        names.prepare(tensor for _, tensor in asked)
        for index, tensor in asked:
            if index not in self.holders and (name := names.of(tensor)):
                self.holders[index] = name
            if len(self.holders) >= _MOST_TENSORS:
                break
        rest = {index for index in alive.values() if index not in self.holders}
        if rest:
            self.holders |= holding_graphs(found, _nodes_of(device, rest), names)
        names.clear()

    def _find_cycles(self, ledger: Ledger, alive: Mapping[int, int]) -> None:
        """Find out what is alive only because Python has not collected garbage: have it do so."""
        through = collect(_address, alive)
        for address, index in alive.items():
            record = ledger.records.get(address)
            if record is None or record.index - 1 != index:
                name, owner = self.holders.get(index), through.get(address)
                cycle = f"a reference cycle of {owner}" if owner else "a reference cycle"
                self.holders[index] = f"{name}, in {cycle}" if name else cycle


def _address(tensor: Any) -> int:
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


def _nodes_of(device: DeviceLedger, indices: Collection[int]) -> dict[int, int]:
    """Return the numbers of the autograd nodes of the calls that made allocations, by these."""
    return {
        event - 1: call[3] - 1
        for call in device.calls or ()
        for event in device.events[call[0] : call[1]]
        if event - 1 in indices and call[3] > 0
    }


_ATTENTION: Any = functional.scaled_dot_product_attention
_MULTI_HEAD: Any = functional.multi_head_attention_forward


@contextmanager
def _attention_shown_to(watch: Watch) -> Iterator[None]:
    """Show calls of attention to a watch: those of a program, under whatever name, and torch's own.

    Within what a mode is handed, such as ``multi_head_attention_forward``, the mode is off.
    """

    def shown(*args: Any, **kwargs: Any) -> Any:
        watch.saw_attention(*args, **kwargs)
        return _ATTENTION(*args, **kwargs)

    with replaced(functional, scaled_dot_product_attention=shown), _AttentionMode(watch):
        yield


class _AttentionMode(FunctionMode):
    """Shows calls of attention to a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is _ATTENTION:
            self._watch.saw_attention(*args, **kwargs)
        elif func is _MULTI_HEAD and kwargs.get("need_weights", True):
            self._watch.saw_weights()
        return func(*args, **kwargs)


@contextmanager
def _saving_shown_to(watch: Watch) -> Iterator[None]:
    """Show to a watch what a program's own functions save (torch/autograd/function.py)."""
    saving = FunctionCtx.save_for_backward

    def shown(context: FunctionCtx, *tensors: Tensor) -> None:
        watch.saw_saved(context, tensors)
        saving(context, *tensors)

    with replaced(FunctionCtx, save_for_backward=shown):
        yield


@contextmanager
def watching(
    device: str,
    wanted: Mapping[int, int] | None = None,
    before: int = -1,
    *,
    attention: bool = False,
) -> Iterator[Watch]:
    """Watch the traces of the body on a device: calls of ``attention``, and what refers to the
    allocations of the indices and bytes ``wanted`` before another is made, or at the end.
    """
    watch = Watch(device, wanted or {}, before)
    token = WATCH.set(watch)
    try:
        with _attention_shown_to(watch) if attention else nullcontext(), _saving_shown_to(watch):
            yield watch
    finally:
        WATCH.reset(token)


_STANDARD_LIBRARY = os.path.dirname(os.__file__)
"""``sysconfig`` reads how Python was built to say so."""


def collect(address_of: Callable[[Tensor], int], wanted: Iterable[int]) -> dict[int, str]:
    """Collect garbage; return by the addresses ``wanted`` the program's objects in it that hold
    what is there.
    """
    flags, known = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)  # gc.garbage has then all that was found
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    found = _owners(gc.garbage[known:], address_of, set(wanted))
    del gc.garbage[known:]
    gc.collect()
    return found


def _owners(
    garbage: Collection[object], address_of: Callable[[Tensor], int], left: set[int]
) -> dict[int, str]:
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
        is_program = not is_own(code) and _is_of_program(code.co_filename)
        return cast(FunctionType, one).__qualname__ if is_program else ""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__qualname__ if isinstance(file, str) and _is_of_program(file) else ""


def _is_of_program(file: str) -> bool:
    return not (is_installed(file) or file.startswith((_STANDARD_LIBRARY, "<")))


def _reached(one: object, inside: Container[int]) -> set[int]:
    """Return the ids of what an object leads to through others whose ids are ``inside``."""
    reached, waiting = {id(one)}, [one]
    while waiting:
        new = {id(other): other for other in gc.get_referents(waiting.pop())}
        waiting += [other for key, other in new.items() if key in inside and key not in reached]
        reached.update(new)
    return reached
