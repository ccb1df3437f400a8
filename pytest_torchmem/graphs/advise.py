"""What would help: changes of a training step, each traced, by bytes saved and operations paid."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.tracing.trace import trace
from pytest_torchmem.units import parse_size

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change of the step, and what a trace of the changed step gave."""

    change: str
    """What to do, in words."""
    saved: int
    """Bytes by which ``figure`` falls."""
    flops: int
    """Floating-point operations that the step then does more."""
    figure: str
    """``"peak"``, or ``"reserved_peak"`` for a change of the caching allocator."""
    profile: MemoryProfile
    """The profile of the changed step."""


def advise(
    model: nn.Module, *args: Any, budget: int | str | None = None, **options: Any
) -> list[Suggestion]:
    """Return changes that lower the peak of a module's training step, the best first.

    The arguments are those of ``trace``. Each change is made to a copy of the module that shares
    its tensors, or to an option, and traced: checkpoints of repeated layers, activations in place,
    ``foreach=False`` and ``fused=True`` of the optimizer, the forward in bfloat16 (autocast), and
    ``expandable_segments`` of the caching allocator (cuda, by what is reserved). With a ``budget``
    (``"2 GiB"``) for the peak, of repeated layers only as many are checkpointed as it takes, if
    that is enough.

    Changes that fit the budget come first, those that cost the fewest operations before others.
    Changes that save nothing, and those that the step does not bear, are left out. Raises
    ``UsageError`` for a function, and what ``trace`` raises for the step as it is.
    """
    if not isinstance(model, nn.Module):
        raise UsageError("advise() changes modules: pass an nn.Module rather than a function")
    limit = None if budget is None else parse_size(budget)
    trials = _Trials(model, args, options)
    found = [*_checkpoints(trials, limit), *_in_place(trials), *_optimizers(trials)]
    found += _precisions(trials)
    found += _allocator(trials)
    kept = [one for one in found if one is not None and one.saved > 0]
    return sorted(kept, key=lambda one: (not _fits(one, limit), one.flops, -one.saved))


def _fits(one: Suggestion, limit: int | None) -> bool:
    return limit is not None and one.figure == "peak" and one.profile.peak <= limit


class _Trials:
    """The step as it is, and changes of it."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.model, self._args, self.options = model, args, options
        self.before = trace(model, *args, **options)
        self._flops = _operations(self.before)

    def of_module(self, change: str, modify: Callable[[nn.Module], None]) -> Suggestion | None:
        """Trace a copy of the module that ``modify`` has changed."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        changed = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        modify(changed)
        return self._traced(change, changed, self.options)

    def of_options(
        self, change: str, options: Mapping[str, Any], figure: str = "peak"
    ) -> Suggestion | None:
        """Trace the module with other options."""
        return self._traced(change, self.model, {**self.options, **options}, figure)

    def _traced(
        self, change: str, model: nn.Module, options: Mapping[str, Any], figure: str = "peak"
    ) -> Suggestion | None:
        try:
            profile = trace(model, *self._args, **options)
        except (RuntimeError, TypeError, ValueError):  # the step does not bear it
            return None
        saved = getattr(self.before, figure) - getattr(profile, figure)
        return Suggestion(change, saved, _operations(profile) - self._flops, figure, profile)


def _operations(profile: MemoryProfile) -> int:
    total = profile.node_table().total()
    return total.fwd_flops + total.bwd_flops


def _checkpoints(trials: _Trials, limit: int | None) -> Iterator[Suggestion | None]:
    """Yield checkpoints of repeated layers: all of them, or as few as a limit needs."""
    for pattern, paths in _repeated(trials.model).items():
        every = _checkpointed(trials, pattern, paths, len(paths))
        yield every
        if every is None or limit is None or every.profile.peak > limit:
            continue
        few, enough, best = 0, len(paths), None
        while few + 1 < enough:
            middle = (few + enough) // 2
            some = _checkpointed(trials, pattern, paths, middle)
            if some is not None and some.profile.peak <= limit:
                enough, best = middle, some
            else:
                few = middle
        yield best


def _checkpointed(trials: _Trials, pattern: str, paths: list[str], count: int) -> Suggestion | None:
    def modify(model: nn.Module) -> None:
        for path in paths[:count]:
            module = model.get_submodule(path)
            module.__class__ = _checkpointing(type(module))

    which = f"each of {pattern} ({count})" if count == len(paths) else f"{count} of {pattern}"
    return trials.of_module(
        f"checkpoint {which}: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
        modify,
    )


def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules that compute their forward again in the backward."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(kind.forward, self), *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _repeated(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of layers that come several times, by the path with ``*`` for numbers."""
    groups: dict[tuple[str, type], list[str]] = {}
    for path, module in model.named_modules():
        pattern = _NUMBER.sub("*", path)
        if pattern != path and any(True for _ in module.children()):
            groups.setdefault((pattern, type(module)), []).append(path)
    return {pattern: paths for (pattern, _), paths in groups.items() if len(paths) > 1}


def _in_place(trials: _Trials) -> Iterator[Suggestion | None]:
    """Yield activations in place, all of a kind together."""
    kinds = {type(one) for one in trials.model.modules() if getattr(one, "inplace", None) is False}
    for kind in sorted(kinds, key=lambda one: one.__name__):

        def modify(model: nn.Module, kind: type = kind) -> None:
            for module in model.modules():
                if type(module) is kind:
                    module.inplace = True  # type: ignore[assignment]

        yield trials.of_module(f"{kind.__name__}(inplace=True)", modify)


def _optimizers(trials: _Trials) -> Iterator[Suggestion | None]:
    """Yield other implementations of the optimizer's step."""
    optimizer = trials.options.get("optimizer")
    if optimizer is None:
        return
    for option in ({"foreach": False}, {"fused": True}):
        [(name, value)] = option.items()
        changed = partial(optimizer, **option)
        yield trials.of_options(f"{name}={value} in the optimizer", {"optimizer": changed})


def _precisions(trials: _Trials) -> Iterator[Suggestion | None]:
    """Yield the forward in bfloat16, unless the step has chosen a precision itself."""
    device = trials.before.device.partition(":")[0]
    if torch.is_autocast_enabled(device):
        return

    def modify(model: nn.Module) -> None:
        model.__class__ = _in_bfloat16(type(model), device)

    yield trials.of_module(
        f'the forward under torch.autocast("{device}", dtype=torch.bfloat16)', modify
    )


def _in_bfloat16(kind: type[nn.Module], device: str) -> type[nn.Module]:
    """Return a class of modules whose forward runs under autocast."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _allocator(trials: _Trials) -> Iterator[Suggestion | None]:
    """Yield options of the caching allocator."""
    if trials.before.device != "cuda" or trials.options.get("allocator"):
        return
    change = f"PYTORCH_ALLOC_CONF={_EXPANDABLE}"
    yield trials.of_options(change, {"allocator": _EXPANDABLE}, "reserved_peak")
