"""Which modules to checkpoint: what each kind saves and costs, and the fewest for a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from pytest_torchmem.advice.changes import Change, checkpointed, joined
from pytest_torchmem.advice.graph_changes import checkpointed_in_graphs
from pytest_torchmem.advice.module_names import Layers
from pytest_torchmem.advice.trials import Found, Trials

_MOST = 10
"""Kinds of modules that are tried, those that keep the most for the backward."""
_LEAST = 100
"""Modules that keep less than this part of the peak are not tried."""
_BISECTED = 3

Chosen = dict[Layers, int]
"""How many modules of each kind."""


class Checkpoints:
    """Traces of a step in which modules of some kinds compute their forward again."""

    def __init__(self, trials: Trials, limit: int | None, others: Change | None = None) -> None:
        self._trials, self._limit = trials, limit
        self._others = () if others is None else (others,)
        self._layers = trials.observed.layers

    def found(self, most: int = _MOST) -> Iterator[Found | None]:
        """Yield each of the ``most`` kinds by itself, and what fits the limit at the fewest
        operations.
        """
        single: list[tuple[Layers, Found]] = []
        for layers in self._candidates()[:most]:
            found = self._traced({layers: len(self._layers[layers])})
            yield found
            if found is not None and found.saved > 0:
                single.append((layers, found))
        if self._limit is None or not single:
            return
        enough = [one for one in single if one[1].profile.peak <= self._limit]
        enough.sort(key=lambda one: one[1].flops)
        for layers, found in enough[:_BISECTED]:
            yield self._fewest({}, layers, found)
        yield self._together(single)

    def _candidates(self) -> list[Layers]:
        """Return the kinds of modules whose forward keeps most for the backward."""
        kept = Counter(self._trials.observed.kept)
        for row in self._trials.before.node_table().rows if self._trials.follows_python else ():
            path = row.module.partition(".")[2]
            while path:
                kept[path] += row.fwd_out_saved
                path = path.rpartition(".")[0]
        by_layers = {
            layers: sum(kept[path] for path in paths) for layers, paths in self._layers.items()
        }
        least = self._trials.before.peak // _LEAST
        largest = sorted(by_layers, key=lambda layers: -by_layers[layers])
        return [layers for layers in largest if by_layers[layers] > least][:_MOST]

    def _together(self, single: list[tuple[Layers, Found]]) -> Found | None:
        """Add kind after kind, those that cost least for what they save first, until it fits."""
        assert self._limit is not None
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
            if found is not None and found.profile.peak <= self._limit:
                return self._fewest(others, layers, found)
        return None

    def _nested(self, inner: Layers, outer: Layers) -> bool:
        """Return whether modules of one kind are within modules of the other."""
        return inner[0].startswith(f"{outer[0]}.") or inner[0] == outer[0]

    def _fewest(self, others: Chosen, layers: Layers, every: Found) -> Found:
        """Return what fits with as few modules of the last kind as it takes."""
        assert self._limit is not None
        few, enough, best = 0, len(self._layers[layers]), every
        while few + 1 < enough:
            middle = (few + enough) // 2
            some = self._traced({**others, layers: middle})
            if some is not None and some.profile.peak <= self._limit:
                enough, best = middle, some
            else:
                few = middle
        return best

    def _traced(self, chosen: Chosen) -> Found | None:
        return self._trials.of(joined([*self._others, self._change(chosen)]))

    def _kind(self, layers: Layers) -> str:
        """Return the class of modules whose paths look like those of others of another class."""
        alike = [one for one in self._layers if one[0] == layers[0]]
        return f"{layers[1]} " if len(alike) > 1 else ""

    def _change(self, chosen: Chosen) -> Change:
        """Return the change of modules that are chosen."""
        paths = [path for layers, count in chosen.items() for path in self._layers[layers][:count]]
        parts = []
        for layers, count in chosen.items():
            number = len(self._layers[layers])
            if number == 1:
                parts.append(layers[0])
            else:
                of = f"{self._kind(layers)}of {layers[0]}"
                which = f"each {of}" if count == number else f"{count} {of}"
                parts.append(f"{which} ({number})" if count == number else which)
        how = checkpointed if self._trials.follows_python else checkpointed_in_graphs
        return Change(
            f"checkpoint {' and '.join(parts)}: "
            "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)",
            (partial(how, paths),),
        )
