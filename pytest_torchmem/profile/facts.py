"""What a snapshot keeps of a step beside its figures: what it was run with, and its course.

A snapshot keeps the facts of its step, so that a later run can say which of them changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pytest_torchmem.profile.timeline import Timeline

INPUTS = "inputs"
"""What the step works on: ``{"input 0": "int64[4, 512]"}``."""
MODES = "modes"
"""Modules that are called in another mode than what calls them, and the modules of a step in
another than the usual one: ``{"Teacher": "no_grad", "GPT.blocks.*": "recomputed, 0-11"}``."""
PACKED = "saved tensors by "
"""The mode of modules within hooks of saved tensors: ``"saved tensors by save_on_cpu"``."""
UNCACHED = " without cache"
"""The end of a mode of autocast that keeps no casts: ``"autocast bfloat16 without cache"``."""
NO_BACKWARD = "no backward"
"""The mode of modules that no backward of the step comes to, though it comes to others."""
PARAMETERS = "parameters"
"""What is frozen, and which parameters are one: ``{"GPT.head.weight": "is GPT.embed.weight"}``."""
GIVEN = "given"
"""The shapes of what layers with parameters are called with first: ``{"Net.head": "[8, 128]"}``."""
FORMATS = "memory formats"
"""Models with parameters, and inputs, that are channels last: ``{"ResNet": "channels last"}``."""
SIZES = "sizes"
"""Parameters that no layer of their own is called with: ``{"Vit.position": "[197, 768]"}``."""
COMPILED = "compiled"
"""How many graphs ``torch.compile`` made, and where: ``{"graphs": "2, train.py:12"}``."""
CALLS = "calls"
"""How often outermost modules are called, and where: ``{"Net": "2, train.py:12, train.py:15"}``."""
MODULES = "modules"
"""Settings of outermost modules: ``{"LlamaForCausalLM": "attention sdpa"}``."""
CONFIGURATION = "configuration"
"""What the configuration of an outermost module says: ``{"GPT": "n_head=12, n_layer=3"}``."""
SETTINGS = "settings"
"""Settings that decide figures and are not torch's: ``{"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}``."""
OPTIMIZERS = "optimizers"
"""``{"AdamW": "foreach"}``."""
STATES = "optimizer states"
"""What optimizers keep of each parameter: ``{"AdamW": "exp_avg, exp_avg_sq"}``."""
IN_PLACE = "in place"
"""How often modules called operators that write to what they are given."""
ARGUMENTS = "arguments"
"""How outermost modules are called: ``{"Bert": "labels, output_hidden_states=True"}``."""
LAYERS = "layers"
"""What modules are, with the numbers of those that are so: ``{"Net.layers.*": "ReLU() @0-3"}``."""
BACKWARD = "backward"
"""How often there was one, and with what: ``{"calls": "4", "retain_graph": "4, train.py:12"}``.

``vmap`` counts those of ``torch.func.grad`` within ``torch.vmap``."""
OPERATORS = "operators"
"""How often the forward called each operator: ``{"forward": "aten::addmm 12, aten::gelu 4"}``."""
NOT_RECORDED = "not recorded"
"""How often autograd did not record it, by the same topic: a list like the forward's."""
IN_BACKWARD = "in backward"
"""How often a backward came to it: a list like the forward's."""
EVERY, NONE = "all", "none"
"""A list that is the forward's, and one of nothing."""
TOPICS = (
    SETTINGS,
    INPUTS,
    ARGUMENTS,
    CALLS,
    MODES,
    PARAMETERS,
    MODULES,
    CONFIGURATION,
    LAYERS,
    GIVEN,
    SIZES,
    FORMATS,
    COMPILED,
    OPTIMIZERS,
    STATES,
    BACKWARD,
    IN_PLACE,
    OPERATORS,
)

Facts = Mapping[str, Mapping[str, str]]
ADDED = frozenset({CALLS, COMPILED, FORMATS, GIVEN, SETTINGS, SIZES, STATES})
"""Topics that snapshots of before lack: nothing is known to have changed of what one lacks.

A snapshot that has one of them lacks the others because its step had nothing of the kind.
"""
_ADDED_NAMES = frozenset({NOT_RECORDED, IN_BACKWARD})
"""Names of the operators' topic that snapshots of before lack."""


class FactChange(NamedTuple):
    """One fact, then and now, each "" where there was none."""

    topic: str
    name: str
    before: str
    now: str


def lacks_added(own: Facts, other: Facts) -> bool:
    """Tell whether ``own``, of a snapshot of before, lacks what ``other`` has and it could not."""
    if (other.keys() & ADDED) - own.keys():
        return True
    return bool((other.get(OPERATORS, {}).keys() & _ADDED_NAMES) - own.get(OPERATORS, {}).keys())


def changed_facts(before: Facts, now: Facts) -> Iterator[FactChange]:
    """Yield the facts that differ, topic by topic, in the order of the present ones."""
    lacks_topics = ADDED.isdisjoint(before)
    for topic in TOPICS:
        if topic in ADDED and lacks_topics:
            continue
        old, new = before.get(topic, {}), now.get(topic, {})
        for name in (*new, *(name for name in old if name not in new)):
            if topic == OPERATORS and name in _ADDED_NAMES and name not in old:
                continue
            if old.get(name, "") != new.get(name, ""):
                yield FactChange(topic, name, old.get(name, ""), new.get(name, ""))


POINTS = 96
"""Numbers of an outline, over all of its stretches."""
_MOST_STRETCHES = 12
"""Changes of phase beyond which a step is one stretch."""
FULL = 1000
"""What stands for the largest bytes of the step: shares are per mille of it."""


class Stretch(NamedTuple):
    """One time in a phase."""

    phase: str
    """"" for a step with too many phases to tell them apart."""
    events: int
    """How many allocations and frees there were."""
    shares: tuple[int, ...]
    """The largest bytes alive in each of as many equal parts, per mille of the step's largest."""


Outline = tuple[Stretch, ...]


def outline_of(timeline: Timeline, points: int = POINTS) -> Outline:
    """Return the outline of a timeline in about as many ``points``."""
    sizes = [0, *(allocation.nbytes for allocation in timeline.allocations)]
    steps = (sizes[event] if event > 0 else -sizes[-event] for event in timeline.events)
    live = [0, *accumulate(steps)]
    peak = max(live)
    spans = [span for span in timeline.spans() if span[1] > span[0]]
    if not spans or peak <= 0:
        return ()
    parts = [(start, stop, phase.value) for start, stop, phase in spans]
    if len(parts) > _MOST_STRETCHES:
        parts = [(0, len(timeline.events), "")]
    return tuple(
        Stretch(
            phase,
            stop - start,
            tuple(
                -(-FULL * max(live[first : last + 1]) // peak)
                for first, last in _equal(start, stop, points * (stop - start) // len(live))
            ),
        )
        for start, stop, phase in parts
    )


def bytes_along(
    outline: Outline, peak: int, timeline: Timeline, positions: Sequence[int]
) -> list[int]:
    """Return the bytes of another step's ``outline`` at positions of a timeline.

    Where both have the same phases, each is stretched over its own; else the whole over the whole.
    """
    spans = [(start, stop, p.value) for start, stop, p in timeline.spans() if stop > start]
    if [one.phase for one in outline] == [phase for _, _, phase in spans]:
        places = [(start, stop) for start, stop, _ in spans]
    else:
        shares = tuple(share for one in outline for share in one.shares)
        outline = (Stretch("", 0, shares),)
        places = [(0, len(timeline.events))]
    found, number = [], 0
    for position in positions:
        while number + 1 < len(places) and position > places[number][1]:
            number += 1
        (start, stop), shares = places[number], outline[number].shares
        at = (position - start) * len(shares) // max(stop - start, 1)
        found.append(shares[min(max(at, 0), len(shares) - 1)] * peak // FULL)
    return found


def _equal(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield where equal parts of a stretch of events start and stop, at most one for each event."""
    parts = min(max(parts, 2), stop - start)
    for number in range(parts):
        length = stop - start
        yield start + number * length // parts, start + (number + 1) * length // parts
