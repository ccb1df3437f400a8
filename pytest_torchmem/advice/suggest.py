"""Changes of a step that lower its peak, each traced, by bytes saved and operations paid."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeAlias

import torch

from pytest_torchmem.advice import changes
from pytest_torchmem.profile.module_paths import prefixes
from pytest_torchmem.profile.profile import MemoryProfile, Suggestion
from pytest_torchmem.units import parse_size

Trace: TypeAlias = Callable[..., MemoryProfile]
"""``trace``, whose step is given already: called with the options that are others."""


class Trials:
    """Traces of a step with changes, against the profile of the step as it is."""

    def __init__(self, before: MemoryProfile, again: Trace) -> None:
        self._again = again
        self.observed = changes.Observed()
        self.follows_python = before.level == "eager"
        """Whether the program's functions and modules are called; compiled ones are not."""
        observing = changes.observing if self.follows_python else changes.observing_graphs
        with observing(self.observed):
            self.before = again()
        self._flops = operations(self.before)

    def of(self, change: changes.StepChange) -> Suggestion | None:
        """Trace the step with a change; ``None`` where the step does not bear it."""
        profile = None
        refused = suppress(RuntimeError, TypeError, ValueError, AssertionError)
        with refused, ExitStack() as stack:
            for enter in change.entered:
                stack.enter_context(enter())
            profile = self._again(**change.options)
        if profile is None:
            return None
        figure = change.figure
        saved = getattr(self.before, figure) - getattr(profile, figure)
        flops = operations(profile) - self._flops
        return Suggestion(change.text, saved, flops, figure, profile)


def operations(profile: MemoryProfile) -> int:
    return sum(call.work.flops for call in profile.calls or ())


_MOST_SETS = 10
"""Kinds of modules that are tried, those that keep the most for the backward."""
_LEAST = 100
"""Modules that keep less than this part of the peak are not tried."""
_BISECTED = 3

Chosen = dict[changes.Layers, int]


class Checkpoints:
    """Traces of a step in which modules of some kinds compute their forward again."""

    def __init__(
        self, trials: Trials, limit: int | None, others: changes.StepChange | None = None
    ) -> None:
        self._trials, self._limit = trials, limit
        self._others = () if others is None else (others,)
        self._layers = trials.observed.layers

    def found(self, most: int = _MOST_SETS) -> Iterator[Suggestion | None]:
        """Yield the ``most`` kinds one by one, then what fits at the fewest operations."""
        single: list[tuple[changes.Layers, Suggestion]] = []
        for layers in self._candidates()[:most]:
            found = self._traced({layers: len(self._layers[layers])})
            yield found
            if found is not None and found.saved > 0:
                single.append((layers, found))
        if self._limit is None or not single:
            return
        enough = [one for one in single if _fits(one[1], self._limit)]
        enough.sort(key=lambda one: one[1].flops)
        for layers, found in enough[:_BISECTED]:
            yield self._fewest({}, layers, found)
        yield self._together(single)

    def _candidates(self) -> list[changes.Layers]:
        """Return the kinds of modules whose forward keeps most for the backward."""
        kept = Counter(self._trials.observed.kept)
        for row in self._trials.before.node_table().rows if self._trials.follows_python else ():
            for path in prefixes(row.module.partition(".")[2]):
                kept[path] += row.fwd_out_saved
        every = self._layers.items()
        by_layers = {layers: sum(kept[path] for path in paths) for layers, paths in every}
        least = self._trials.before.peak // _LEAST
        largest = sorted(by_layers, key=lambda layers: -by_layers[layers])
        return [layers for layers in largest if by_layers[layers] > least][:_MOST_SETS]

    def _together(self, single: list[tuple[changes.Layers, Suggestion]]) -> Suggestion | None:
        """Combine changes, the cheapest for its saving first, until the step fits."""
        single = sorted(single, key=lambda one: (one[1].flops / one[1].saved, -one[1].saved))
        chosen: Chosen = {}
        for layers, _ in single:
            others = {one: count for one, count in chosen.items() if not self._nested(one, layers)}
            if any(self._nested(layers, one) for one in others):
                continue
            chosen = {**others, layers: len(self._layers[layers])}
            if len(chosen) == 1:
                continue  # traced by itself
            found = self._traced(chosen)
            if found is not None and _fits(found, self._limit):
                return self._fewest(others, layers, found)
        return None

    def _nested(self, inner: changes.Layers, outer: changes.Layers) -> bool:
        """Return whether modules of one kind are within modules of the other."""
        return inner[0].startswith(f"{outer[0]}.") or inner[0] == outer[0]

    def _fewest(self, others: Chosen, layers: changes.Layers, every: Suggestion) -> Suggestion:
        """Return what fits with as few modules of the last kind as it takes."""
        few, enough, best = 0, len(self._layers[layers]), every
        while few + 1 < enough:
            middle = (few + enough) // 2
            some = self._traced({**others, layers: middle})
            if some is not None and _fits(some, self._limit):
                enough, best = middle, some
            else:
                few = middle
        return best

    def _traced(self, chosen: Chosen) -> Suggestion | None:
        paths = [path for layers, count in chosen.items() for path in self._layers[layers][:count]]
        parts = []
        for layers, count in chosen.items():
            number, of = len(self._layers[layers]), f"{self._kind(layers)}of {layers[0]}"
            every = f"each {of} ({number})" if number > 1 else layers[0]
            parts.append(every if count == number else f"{count} {of}")
        how = changes.checkpointed if self._trials.follows_python else changes.graphs_checkpointed
        change = changes.StepChange(
            f"checkpoint {' and '.join(parts)}: "
            "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)",
            (partial(how, paths),),
        )
        return self._trials.of(changes.joined([*self._others, change]))

    def _kind(self, layers: changes.Layers) -> str:
        """Return the class of modules whose paths look like those of others of another class."""
        alike = [one for one in self._layers if one[0] == layers[0]]
        return f"{layers[1]} " if len(alike) > 1 else ""


_EXPANDABLE = "expandable_segments:True"
_MOST = 3
"""Lines, buffers and kinds of modules that are tried for one change, the largest ones."""
_SHARES = (0.5, 0.2)
"""Of the activations of compiled code."""
_WORTH = 1000
"""What saves less than this part of the figure is left out, unless the budget is met by it."""


def suggest(
    again: Trace,
    allocator: str,
    before: MemoryProfile,
    budget: int | str | None = None,
    checkpoints: int | None = None,
) -> list[Suggestion]:
    """Return changes that lower the peak, the best first (``MemoryProfile.suggestions``).

    ``again`` traces the step, with other options than it was traced with; ``allocator`` are those
    of the caching allocator. With a number of ``checkpoints`` only as many kinds of modules are
    tried, or the optimizer where its step is the highest.
    """
    limit = None if budget is None else parse_size(budget)
    trials = Trials(before, again)
    if checkpoints is not None:
        if trials.before.optimizer_peak == trials.before.peak:
            return _sorted(map(trials.of, _optimizers(trials)), limit)
        return _sorted(Checkpoints(trials, None).found(checkpoints), limit)
    tried = [(change, trials.of(change)) for change in changes_of(trials, allocator)]
    found = [one for _, one in tried]
    found += Checkpoints(trials, limit).found()
    free = [change for change, one in tried if one is not None and change.is_free and one.saved > 0]
    if free and not any(one is not None and _fits(one, limit) for one in found):
        together = changes.joined(free)
        found += [trials.of(together)] if len(free) > 1 else []
        if limit is not None:
            more = [one for one in Checkpoints(trials, limit, together).found() if one is not None]
            enough = [one for one in more if _fits(one, limit)]
            found += enough or sorted(more, key=lambda one: one.profile.peak)[:1]
    return _sorted(found, limit)


def _sorted(found: Iterable[Suggestion | None], limit: int | None) -> list[Suggestion]:
    kept = [one for one in found if one is not None and _helps(one, limit)]
    return sorted(kept, key=lambda one: (not _fits(one, limit), one.flops, -one.saved))


def _helps(one: Suggestion, limit: int | None) -> bool:
    """Whether a change saves more than bytes that nobody would change a line for."""
    before: int = one.saved + getattr(one.profile, one.figure)
    is_enough = limit is not None and _fits(one, limit) and before > limit
    return one.saved > 0 and (one.saved * _WORTH >= before or is_enough)


def _fits(one: Suggestion, limit: int | None) -> bool:
    return limit is not None and one.figure == "peak" and one.profile.peak <= limit


def changes_of(trials: Trials, allocator: str) -> Iterator[changes.StepChange]:
    """Yield everything that is tried of a step but checkpoints."""
    yield from _optimizers(trials)
    if trials.before.device == "cuda" and not allocator:
        text = f"PYTORCH_ALLOC_CONF={_EXPANDABLE}"
        yield changes.StepChange(text, options={"allocator": _EXPANDABLE}, figure="reserved_peak")
    if trials.follows_python:  # AOTAutograd makes the same graph of functions in place and others
        yield from _in_place(trials)
    yield from _losses(trials)
    device = trials.before.device.partition(":")[0]
    if not torch.is_autocast_enabled(device):
        text = f'under torch.autocast("{device}", dtype=torch.bfloat16)'
        yield changes.StepChange(f"the forward {text}", (partial(changes.under_autocast, device),))
    if trials.follows_python:
        yield from _narrower(trials)
    elif trials.before.backward_peak is not None:
        from pytest_torchmem.torch_private.inductor import activations_kept

        for share in _SHARES:
            text = (
                f"torch._functorch.config.activation_memory_budget = {share}: compiled code keeps "
                f"about {share:.0%} of what it keeps for the backward, and computes the rest again"
            )
            yield changes.StepChange(text, (partial(activations_kept, share),))


def _optimizers(trials: Trials) -> Iterator[changes.StepChange]:
    if trials.before.optimizer_peak is not None:
        for option, value in (("foreach", False), ("fused", True)):
            text = f"{option}={value} in the optimizer"
            yield changes.StepChange(
                text, (partial(changes.stepping, option, value),), is_free=option == "fused"
            )
    if trials.observed.zeroing:
        yield changes.StepChange(
            "zero_grad(set_to_none=True)", (changes.set_to_none,), is_free=True
        )


def _in_place(trials: Trials) -> Iterator[changes.StepChange]:
    """Yield in-place functions: at all lines, or at the lines that tolerate them."""
    for name, lines in sorted(trials.observed.in_place.items()):
        every = _overwriting(name, list(lines))
        if len(lines) == 1 or trials.of(every) is not None:
            yield every
            continue
        largest = sorted(lines, key=lambda line: -lines[line])[: 2 * _MOST]
        borne = [line for line in largest if trials.of(_overwriting(name, [line])) is not None]
        if borne:
            yield _overwriting(name, borne)


def _overwriting(name: str, lines: list[str]) -> changes.StepChange:
    where = f" at {lines[0]}" if lines[0] else ""
    more = f" and {len(lines) - 1} other lines" if len(lines) > 1 else ""
    how = f"{name}_" if name in changes.OVERWRITING else "inplace=True"
    text = f"{name} in place ({how}){where}{more}"
    return changes.StepChange(text, (partial(changes.overwriting, name, lines),), is_free=True)


def _losses(trials: Trials) -> Iterator[changes.StepChange]:
    for line, numbers in trials.observed.losses.items():
        where = f" at {line}" if line else ""
        if changes.HAS_FUSED and trials.follows_python:
            yield changes.StepChange(
                f"the loss{where} fused with its linear layer: torch.nn.functional."
                "linear_cross_entropy(..., options=torch.nn.LinearCrossEntropyOptions())",
                (partial(changes.losses_together, numbers, fused=True),),
                is_free=True,
            )
        chunked = partial(changes.losses_together, numbers, fused=False)
        yield changes.StepChange(
            f"the loss{where} and its linear layer in {changes.CHUNKS} chunks of rows, each under "
            "torch.utils.checkpoint.checkpoint",
            (chunked if trials.follows_python else partial(changes.chunked_loss, line),),
        )


def _narrower(trials: Trials) -> Iterator[changes.StepChange]:
    """Yield narrower types of buffers and of conversions."""
    least = trials.before.peak // _LEAST
    for pattern, nbytes in _largest(trials.observed.buffers):
        if nbytes > least:
            text = f"the buffer {pattern} in bfloat16"
            yield changes.StepChange(text, (partial(changes.buffers_narrowed, pattern),))
    widened = {line: nbytes for line, (_, nbytes) in trials.observed.widened.items()}
    for line, nbytes in _largest(widened):
        if nbytes > least and line:
            dtype = trials.observed.widened[line][0]
            text = f"{dtype} kept at {line}, which converts to a wider type"
            yield changes.StepChange(text, (partial(changes.kept_narrow, line),))


def _largest(nbytes: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(nbytes.items(), key=lambda item: -item[1])[:_MOST]
