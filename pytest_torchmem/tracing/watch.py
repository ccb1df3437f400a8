"""A trace that is run once more, after a check has failed, to see what a profile does not hold.

That is what leads to a line, why attention took the way it took, and what refers to tensors that
are still alive (``holders.py``). What it takes to see this would be felt by the program, so that
the figures are those of the first trace.
"""

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pytest_torchmem.interception.attribution import Attribution, callers_of
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.operators.attention.dot_product import why_not_fused
from pytest_torchmem.operators.calls import AttentionArguments
from pytest_torchmem.profile import facts, module_paths, timeline
from pytest_torchmem.step.trees import Args, Kwargs
from pytest_torchmem.torch_private import modes, patches
from pytest_torchmem.torch_private.tensors import OF_COMPILED_GRAPHS
from pytest_torchmem.tracing.holders import HeldNames, address_of, collect, holding_graphs
from pytest_torchmem.tracing.trace import WATCH

_MOST_TENSORS = 20


class Watch:
    """What is seen of a trace that is watched."""

    def __init__(
        self,
        device: str,
        wanted: Mapping[int, int],
        before: int,
        places: Mapping[tuple[str, str], Collection[int]],
    ) -> None:
        self.callers: dict[tuple[str, str], tuple[int, tuple[tuple[str, ...], ...]]]
        self.callers = dict.fromkeys(places, (0, ()))
        """By a module's pattern and a line: the bytes of the largest allocation under both, of
        those that are meant, and what leads to that line then."""
        self._meant = places
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

    def saw_saved(self, context: object, tensors: Collection[object]) -> None:
        """Take note of what a function of a program's saves for its backward."""
        ledger = self._ledger
        device = self._device_of(ledger) if ledger is not None else None
        name = type(context).__name__.removesuffix("Backward")
        if ledger is None or device is None or name == OF_COMPILED_GRAPHS:
            return
        saver = name, Attribution().user_line()
        for tensor in tensors:
            record = ledger.records.get(address_of(tensor)) if isinstance(tensor, Tensor) else None
            if record is not None and record.ledger is device and record.index - 1 in self._wanted:
                self.savers.setdefault(record.index - 1, saver)

    def at_begin(self, ledger: Ledger) -> None:
        """Look at what is alive just before an allocation is made, where one is given."""
        self._ledger = ledger
        device = self._device_of(ledger)
        if device is None:
            return
        before_adding = device.before_adding

        def before(entry: timeline.Allocation, stream: int) -> None:
            self._note_callers(entry, device.booked)
            if device.booked == self._before >= 0 and not self.holders:
                self._look(ledger, device)
            if before_adding is not None:
                before_adding(entry, stream)

        device.before_adding = before

    def _note_callers(self, entry: timeline.Allocation, index: int) -> None:
        module = f"{module_paths.fold(entry.origin.module)[0]}."
        for (pattern, line), (nbytes, known) in self.callers.items():
            if entry.nbytes < nbytes or (pattern and not module.startswith(f"{pattern}.")):
                continue
            if index not in (self._meant[pattern, line] or (index,)):
                continue
            leads = callers_of(line, sys._getframe(2))
            if leads is not None and (entry.nbytes > nbytes or leads not in known):
                same = known if entry.nbytes == nbytes else ()
                self.callers[pattern, line] = entry.nbytes, (*same, leads)

    def at_end(self, ledger: Ledger) -> None:
        """Look at what is alive at the end, where that is the moment that is asked about."""
        device = self._device_of(ledger)
        if device is not None and self._before < 0:
            self._look(ledger, device)

    def _device_of(self, ledger: Ledger) -> DeviceLedger | None:
        if self._device == "cpu":
            ledger.on(torch.device("cpu"))  # of a trace on cuda, which may come to it later
        found = (
            one
            for one in ledger.devices.values()
            if one.device.type == self._device and one.device.index in (None, 0)
        )
        return next(found, None) if self._wanted or self.callers else None

    def _look(self, ledger: Ledger, device: DeviceLedger) -> None:
        """Find out what refers to the allocations that are asked about."""
        alive = {
            address: record.index - 1
            for address, record in ledger.records.items()
            if record.ledger is device
            and device.foreign.get(record.index, device.entries[record.index - 1].nbytes)
            == self._wanted.get(record.index - 1)
        }
        if alive:
            self._name(device, alive)
            # What is alive only because Python has not collected garbage: have it do so.
            through = collect(alive)
            for address, index in alive.items():
                record = ledger.records.get(address)
                if record is None or record.index - 1 != index:
                    name, owner = self.holders.get(index), through.get(address)
                    cycle = f"a reference cycle of {owner}" if owner else "a reference cycle"
                    self.holders[index] = f"{name}, in {cycle}" if name else cycle

    def _name(self, device: DeviceLedger, alive: Mapping[int, int]) -> None:
        """Name what refers to allocations: ``alive`` has their indices by their addresses."""
        found = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
        asked = [(index, one) for one in found if (index := alive.get(address_of(one))) is not None]
        names = HeldNames(ignore=found)  # last: what is a variable by now is none of the program's
        names.referrers.find(tensor for _, tensor in asked)
        for index, tensor in asked:
            if index not in self.holders and (name := names.of(tensor)):
                self.holders[index] = name + _by_a_view(tensor, self._wanted[index])
            if len(self.holders) >= _MOST_TENSORS:
                break
        rest = {index for index in alive.values() if index not in self.holders}
        if rest:
            # the autograd nodes of the calls that made them, or those that add up their gradients
            leaves = {
                index: names.nodes.get(address, -address)
                for address, index in alive.items()
                if index in rest
            }
            self.holders |= holding_graphs(
                found,
                leaves
                | {
                    event - 1: call[3] - 1
                    for call in device.calls or ()
                    for event in device.events[call[0] : call[1]]
                    if event - 1 in rest and call[3] > 0
                },
                names,
            )
        names.referrers.clear()


def _by_a_view(tensor: Tensor, nbytes: int) -> str:
    """Return in words that a tensor keeps more than twice what it shows of an allocation."""
    if tensor.layout is not torch.strided or 2 * tensor.nbytes >= nbytes:
        return ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f", by a view {facts.Geometry(dtype, tuple(tensor.shape))}"


_ATTENTION: Any = functional.scaled_dot_product_attention
_MULTI_HEAD: Any = functional.multi_head_attention_forward


@contextmanager
def watching(
    device: str,
    wanted: Mapping[int, int] | None = None,
    before: int = -1,
    *,
    attention: bool = False,
    places: Mapping[tuple[str, str], Collection[int]] | None = None,
) -> Iterator[Watch]:
    """Watch the traces of the body on a device: calls of ``attention``, what leads to ``places`` of
    the program, of the allocations of their indices if they have any, and what refers to the
    allocations of the indices and bytes ``wanted`` before another is made, or at the end.
    """
    places = places or {}
    watch, saving = Watch(device, wanted or {}, before, places), FunctionCtx.save_for_backward

    def attends(*args: Any, **kwargs: Any) -> Any:
        watch.saw_attention(*args, **kwargs)
        return _ATTENTION(*args, **kwargs)

    def called(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if func is _ATTENTION:  # under whatever name a program calls it
            watch.saw_attention(*args, **kwargs)
        elif func is _MULTI_HEAD and kwargs.get("need_weights", True):
            # it has to return its weights
            watch.attention.setdefault(Attribution().user_line(), "need_weights=True")
        return func(*args, **kwargs)

    def saves(context: FunctionCtx, *tensors: Tensor) -> None:  # torch/autograd/function.py
        watch.saw_saved(context, tensors)
        saving(context, *tensors)

    with ExitStack() as stack:
        stack.callback(WATCH.reset, WATCH.set(watch))
        if attention:
            # Within what a mode is handed, such as ``multi_head_attention_forward``, it is off.
            stack.enter_context(patches.replaced(functional, scaled_dot_product_attention=attends))
            stack.enter_context(modes.FunctionMode(called))
        stack.enter_context(patches.replaced(FunctionCtx, save_for_backward=saves))
        yield watch
