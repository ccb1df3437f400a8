"""A trace that is run once more, after a check has failed, to see what a profile does not hold.

That is why attention took the way it took, and what refers to tensors that are still alive. What
it takes to see this would be felt by the program, so that the figures are those of the first trace.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.operators.arguments import Attention
from pytest_torchmem.operators.attention.reasons import why_not_fused
from pytest_torchmem.profile.lifetimes import Lifetimes, Role
from pytest_torchmem.torch_private.storages import storage_address

_HELD = (Role.HELD, Role.EARLIER)
_MOST_TENSORS = 20
_DEEPEST = 4
_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


class Watch:
    """What is seen of a trace that is watched."""

    def __init__(self, device: str) -> None:
        self.attention: dict[str, str] = {}
        """By the line that calls attention: why no fused kernel took it."""
        self.holders: dict[int, str] = {}
        """What refers to the tensors of allocations, by their indices in the timeline."""
        self._device = device

    def saw_attention(self, *args: Any, **kwargs: Any) -> None:
        """Take note of a call of scaled dot-product attention."""
        kwargs.pop("scale", None)
        names = ("attn_mask", "dropout_p", "is_causal", "enable_gqa")
        given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
        given |= dict(zip(names, args[3:6], strict=False)) | kwargs
        reason = why_not_fused(
            Attention(*args[:3], *(given[name] for name in names)),
            self._device,
        )
        self.attention.setdefault(Attribution().user_line(), reason)

    def at_end(self, ledger: Ledger) -> None:
        """Take note of what refers to tensors of the forward that are alive at the end."""
        for device in ledger.devices.values():
            if device.device.type != self._device or device.device.index not in (None, 0):
                continue
            timeline = device.timeline()
            lifetimes = Lifetimes.of(timeline)
            held = {
                address: record.index - 1
                for address, record in ledger.records.items()
                if record.ledger is device and record.index <= len(timeline.allocations)
            }
            step = lifetimes.step_at(timeline, len(timeline.events))
            wanted = {
                address: index
                for address, index in held.items()
                if lifetimes.role(index, timeline.allocations[index], step) in _HELD
            }
            self._find(wanted)

    def _find(self, wanted: Mapping[int, int]) -> None:
        everything = gc.get_objects() if wanted else []
        tensors = [value for value in everything if issubclass(type(value), Tensor)]
        del everything  # it refers to all of them
        for tensor in tensors:
            try:
                index = wanted.get(storage_address(tensor))
            except (RuntimeError, NotImplementedError):
                continue
            if index is not None and index not in self.holders:
                self.holders[index] = holder_of(tensor)
            if len(self.holders) >= _MOST_TENSORS:
                break


class _AttentionMode(TorchFunctionMode):
    """Shows calls of attention to a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            self._watch.saw_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(device: str) -> Iterator[Watch]:
    """Watch the traces of the body on a device."""
    watch = Watch(device)
    token = _WATCH.set(watch)
    try:
        with _AttentionMode(watch):
            yield watch
    finally:
        _WATCH.reset(token)


def at_end(ledger: Ledger) -> None:
    """Show what a trace's program leaves to whoever watches."""
    watch = _WATCH.get()
    if watch is not None:
        watch.at_end(ledger)


def holder_of(tensor: Tensor) -> str:
    """Return what refers to a tensor: an attribute, a list, a closure, a variable, or a graph."""
    return _name_of(tensor, set(), 0) or "an autograd graph"


def _name_of(value: object, seen: set[int], depth: int) -> str:
    """Return the name under which something is held, "" where nobody names it."""
    seen.add(id(value))
    referrers = [one for one in gc.get_referrers(value) if id(one) not in seen]
    seen.update(map(id, referrers))
    named = [name for one in referrers if (name := _direct(one, value))]
    if named or depth >= _DEEPEST:
        return min(named, key=lambda name: (name.startswith("the variable"), name), default="")
    for one in referrers:
        if isinstance(one, list | tuple | dict | set | CellType):
            name = _name_of(one, seen, depth + 1)
            if name:
                return name if isinstance(one, CellType | dict) else f"the {_kind(one)} {name}"
    return ""


def _kind(container: object) -> str:
    return type(container).__name__


def _direct(holder: object, value: object) -> str:
    """Return the name that ``holder`` gives to what it refers to, "" where it gives none."""
    if isinstance(holder, FrameType):
        name = _key_of(holder.f_locals, value) if not _is_ours(holder) else ""
        return f"the variable {name} of {holder.f_code.co_name}" if name else ""
    if isinstance(holder, FunctionType):
        return f"the closure of {holder.__qualname__}" if _closes_over(holder, value) else ""
    if isinstance(holder, dict):
        owner = next(
            (one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder),
            None,
        )
        key = _key_of(holder, value)
        return f"{_called(owner)}.{key}" if owner is not None and key else ""
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(holder, type):
        key = _key_of(attributes, value)
        return f"{_called(holder)}.{key}" if key else ""
    return ""


def _called(owner: object) -> str:
    return owner.__name__ if isinstance(owner, ModuleType | type) else type(owner).__name__


def _closes_over(function: FunctionType, value: object) -> bool:
    return any(cell is value for cell in function.__closure__ or ())


def _key_of(names: Mapping[Any, Any], value: object) -> str:
    return next((str(key) for key, one in tuple(names.items()) if one is value), "")


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("pytest_torchmem.")
