"""The registry of causes: small functions that look at the evidence of a growth.

A rule that recognises its cause returns the words of its sentence and the row that shows it. What
is sure comes from facts of the step (``profile/facts.py``); what is likely, from the rows.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from pytest_torchmem.diagnosis.difference import MomentDifference, Row, moved_lines
from pytest_torchmem.diagnosis.provenance import NOTHING_RAN, Provenance
from pytest_torchmem.errors import warn_of_defect
from pytest_torchmem.printable import listed
from pytest_torchmem.profile.facts import Counts, FactChange, InMode, Topic, changed_facts, lacking
from pytest_torchmem.profile.module_paths import EveryNumber, fold, prefixes, unfold
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Role
from pytest_torchmem.snapshots.alive import Alive, Group, What
from pytest_torchmem.snapshots.format import Entry

T = TypeVar("T")
_LAST = 2
"""The rank of causes that are told where nothing else is."""
WEIGHTY = 0.1
"""The part of a growth that a cause has to explain in order to be told."""
_MUCH = 1 / 4
"""The part that a likely cause has to explain beside another one."""
_OF_TYPES = ("type", "copy", "float64")
"""Causes by which numbers take twice the bytes, or more."""
_MAIN = 1 / 3
"""The part that a likely cause has to explain for others not to be looked for."""
_OF_A_MOMENT = (Role.GRADIENT_TEMPORARY, Role.OPTIMIZER_TEMPORARY, Role.WORKSPACE)
MADE = (Role.SAVED, Role.ACTIVATION, Role.HELD, Role.RECOMPUTED)
"""What the forward of a step makes."""
KEPT = (Role.EARLIER, Role.HELD, Role.OTHER)
"""What somebody keeps, who is nearer to the cause."""
_KEEPING_RULES = ("earlier steps", "held", "held between")
"""Those that find who keeps it."""
CONVERTS = "aten::_to_copy"
"""The operator of ``Tensor.to``: what it makes has another type, or is on another device."""

_OF_FORWARD = (*MADE, Role.EARLIER)
_STANDING = {Kind.PARAMETER: "parameter", Kind.BUFFER: "buffer", Kind.INPUT: "input"}
_OF_NO_INPUT = (Role.PARAMETER, Role.BUFFER, Role.LIBRARY)
_SLACK = 2
"""For kernels that take more with other sizes."""
_LONG = 30
"""A path of more letters is told without the model's name, which stands in the line below it."""


class Counted(NamedTuple):
    """How often something was called, such as an operator by the forward, then and now."""

    before: int
    now: int

    @property
    def rose(self) -> bool:
        return self.now > self.before

    @property
    def fell(self) -> bool:
        return self.now < self.before


@dataclass(frozen=True, slots=True)
class Cause:
    """Why memory grew: what a rule found."""

    rule: str
    values: Mapping[str, str] = field(default_factory=dict)
    """What stands for the names in the rule's sentence."""
    row: Row | None = None
    """The row that shows it: its module, operator and line."""
    nbytes: int = 0
    """The bytes of the growth that it explains."""
    origin: Origin | None = None
    """Who is to blame, where that is another one than who made the row."""
    rows: tuple[Row, ...] = ()
    """The rows that it explains."""
    larger: float = 1
    """By what factor they have more numbers for it, whatever their type."""
    aside: str = ""
    """In words what is known beside: what refers to much of them, another class of the module."""

    @property
    def text(self) -> str:
        """The cause as a part of a sentence."""
        return RULES[self.rule].sentence.format(**self.values) + self.aside

    @property
    def is_specific(self) -> bool:
        """Whether it is more than what is told where nothing else is."""
        return RULES[self.rule].rank < _LAST


@dataclass(frozen=True, slots=True)
class Watched:
    """What a second trace saw of the moment at which the first one was largest."""

    attention: Mapping[str, str] = field(default_factory=dict)
    """By the line that calls it: why attention did not take a faster implementation."""
    holders: Mapping[What, str] = field(default_factory=dict)
    """What refers to a tensor of a group, such as ``Trainer.losses[3]``."""
    savers: Mapping[What, tuple[str, str]] = field(default_factory=dict)
    """The ``autograd.Function`` that saves a tensor of a group for its backward, and its line."""
    callers: Mapping[tuple[str, str], Collection[tuple[str, ...]]] = field(default_factory=dict)
    """By a module and a line: the program's lines that lead to it in its calls, nearest first."""
    ran: bool = False
    """Whether there was a second trace, in which holders were looked for."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rules may look at."""

    before: Entry
    now: Entry
    difference: MomentDifference
    alive: Alive
    """Everything that is alive now, at every moment."""
    ran: Provenance = NOTHING_RAN
    """What the present step ran, where that is known."""
    watched: Watched = field(default_factory=Watched)
    names: Mapping[str, str] = field(default_factory=dict)
    """Of modules with other names than in the snapshot: by the present one what it was."""
    last: Allocation | None = None
    """What was made last before the peak, and so reached it."""

    @property
    def facts(self) -> tuple[FactChange, ...]:
        """The facts that changed; none where the snapshot has no facts."""
        if not self.before.facts:
            return ()
        return tuple(changed_facts(self.before.facts, self.now.facts))

    @property
    def growth(self) -> int:
        """The bytes of everything that came."""
        return total(self.difference.came)

    @property
    def known_groups(self) -> tuple[Group, ...]:
        """What the snapshot has at any of its moments."""
        return self.before.alive.groups if self.before.alive is not None else ()

    def came(self, *roles: str) -> Iterator[Row]:
        """Yield the rows that grew, the largest first; of some ``roles`` alone, if any is given."""
        return (row for row in self.difference.came if not roles or row.what.role in roles)

    def of_sizes(self) -> list[Row]:
        """Return the rows that larger sizes can explain, and neither new operators nor types."""
        new = self.new_operators
        types = {what.dtype for what in self.known()} or {row.what.dtype for row in self.came()}
        return [
            row
            for row in self.came()
            if row.what.source not in new
            and row.what.dtype in types
            and (row.before is None or row.before.dtype == row.what.dtype)
        ]

    def of_module(self, pattern: str) -> list[Row]:
        """Return the rows of a module and of those in it, and of inputs that it keeps.

        A module that is called in one that it is no part of has its class in the path there.
        """
        given = self.ran.given_to(pattern)
        return [
            row
            for row in self.came()
            if within(pattern, row.what.module)
            or pattern in row.what.module.split(".")
            or (row.what.role == Role.SAVED and row.what[1:5] in given)
        ]

    def makers_before(self, operator: str) -> set[str]:
        """Return the modules that made an operator's inputs, back to known layers."""
        return self.ran.makers_before(operator, self.before.facts.get(Topic.GIVEN, {}))

    def first_with(self, size: int) -> Allocation | None:
        """Return the first tensor with a size, if that is known and no tensor had it before."""
        inputs = (one.shape for own in self.then(Topic.INPUTS).values() for one in own)
        shapes = (*inputs, *(one.shape for one in self.known()))
        return self.ran.first_with(size) if not any(size in shape for shape in shapes) else None

    def first(self, row: Row) -> int:
        """Return the index of the first allocation of a row, -1 where it is not known."""
        order = self.order(row)
        return order if order < sys.maxsize and self.ran is not NOTHING_RAN else -1

    def order(self, row: Row) -> int:
        """Return when the first tensor of a row was made, as a number that grows."""
        return next((one.first for one in self.alive.groups if one.what == row.now), sys.maxsize)

    def counted(self, operator: str) -> Counted | None:
        """Return how often an operator was called; ``None`` where the snapshot does not say."""
        before, now = self.sides(Topic.OPERATORS, operator, Counts())
        return Counted(before.called, now.called) if self.then(Topic.OPERATORS) else None

    def rose(self, operator: str) -> bool:
        """Tell whether it is known that an operator is called more often."""
        counted = self.counted(operator)
        return counted is not None and counted.rose

    @property
    def new_operators(self) -> set[str]:
        """The operators that the forward did not call, as far as that is known."""
        return {name for name, one in self.counts().items() if not one.before}

    @property
    def more_called(self) -> dict[str, Counted]:
        """The operators that the forward calls more often, as far as that is known."""
        return {name: one for name, one in self.counts().items() if one.rose}

    def made_at_most(self, row: Row) -> int:
        """Return the most bytes that a row's operator made at once, if it makes more now; or 0."""
        before, now = self.sides(Topic.OPERATORS, row.what.source, Counts())
        is_more = before.largest < row.what.nbytes <= now.largest
        return before.largest if is_more and row.what.dtype else 0

    def most_of(self, operator: str) -> int:
        """Return the most bytes that an operator made at once in the snapshot, 0 if unknown."""
        return self.sides(Topic.OPERATORS, operator, Counts())[0].largest

    def counts(self, which: str = "called") -> dict[str, Counted]:
        """Return the operators whose count ``which`` changed; nothing where it is not known."""
        before, now = self.then(Topic.OPERATORS), self.present(Topic.OPERATORS)
        found = {
            name: Counted(*(getattr(side.get(name, Counts()), which) for side in (before, now)))
            for name in ({**before, **now} if before else ())
        }
        return {name: one for name, one in found.items() if one.before != one.now}

    def short(self, path: str) -> str:
        """Return a module's path as sentences have it: a long one without the only model's name."""
        groups = (*self.alive.groups, *self.known_groups)
        roots = {one.what.module.partition(".")[0] for one in groups if one.what.module}
        root, dot, below = path.partition(".")
        return below if dot and len(path) > _LONG and roots == {root} else path

    def module(self, pattern: str, numbers: str) -> str:
        """Return a module's path with its numbers, and what it was called."""
        return self.numbered(pattern, numbers) + self.was(pattern)

    def numbered(self, pattern: str, numbers: str) -> str:
        """Return a module's path with its numbers, or a star where it is all of them."""
        every = EveryNumber()
        for group in (*self.alive.groups, *self.known_groups):
            every.add(group.what.module, group.numbers)
        return self.short(unfold(pattern, every.marked(pattern, numbers)))

    def was(self, pattern: str) -> str:
        """Return in words what a module was called, "" for one of the same name."""
        name = self.names.get(pattern, "").removesuffix(".*").rpartition(".")[2]
        return f" ({name} in the snapshot)" if name and name not in pattern.split(".") else ""

    def known(self) -> Iterator[What]:
        """Yield what the snapshot has at any of its moments."""
        return (one.what for one in self.known_groups)

    @property
    def known_tensors(self) -> set[tuple[str, str, str, tuple[int, ...]]]:
        """By module, operator, type and shape, what the snapshot has, whatever its role."""
        return {what[1:5] for what in self.known()}

    def moved_lines(self) -> dict[str, str]:
        """Return by the lines of the snapshot what they are now, where that can be told."""
        return moved_lines(self.known_groups, self.alive.groups)

    def new_lines(self, now: Sequence[str], before: Sequence[str]) -> list[str]:
        """Return the lines that are none of those before, wherever these are now."""
        moved = self.moved_lines()
        known = {moved.get(line, line) for line in before}
        return [line for line in now if line not in known]

    def gone(self, module: str, source: str) -> Iterator[What]:
        """Yield what an operator made in a module, and makes no more."""
        now = {group.what[1:5] for group in self.alive.groups}
        return (
            one
            for one in self.known()
            if (one.module, one.source) == (module, source) and one[1:5] not in now
        )

    def can_explain(self, factor: float, standing: Collection[str] = _OF_NO_INPUT) -> bool:
        """Tell whether sizes larger by a factor, at most by its square, can explain the growth of
        all but what is ``standing``.
        """
        found = self.difference  # in attention it grows by the square
        groups = (one for one in self.known_groups if one.what.role in standing)
        apart = sum(one.nbytes(found.moment) for one in groups)
        return found.change <= _SLACK * (factor**2 - 1) * (found.before - apart)

    def narrower(self, row: Row) -> What | None:
        """Return what was there in the place of a row, of the same shape and fewer bytes: of the
        same operator, or else no fewer of the same role in the same module.
        """
        now = row.what
        known = (row.before,) if row.before else (*self.gone(now.module, now.source),)
        if not row.before:
            known += tuple(
                one.what
                for one in self.difference.rows
                if one.now is None and one.count_before >= row.count_now and one.what[:2] == now[:2]
            )
        smaller = (was for was in known if was.shape == now.shape and was.nbytes < now.nbytes)
        others = (was for was in smaller if was.dtype and now.dtype and was.dtype != now.dtype)
        return next(others, None)

    def then(self, topic: str) -> Mapping[str, Any]:
        """Return the facts of a topic in the snapshot."""
        return self.before.facts.get(topic, {})

    def present(self, topic: str) -> Mapping[str, Any]:
        """Return the present facts of a topic."""
        return self.now.facts.get(topic, {})

    def sides(self, topic: str, name: str, absent: T) -> tuple[T, T]:
        """Return a fact of a topic then and now, ``absent`` where it is none."""
        return self.then(topic).get(name, absent), self.present(topic).get(name, absent)

    @property
    def has_other_inputs(self) -> bool:
        """Whether an input is new or another one: what is computed of it may be larger."""
        return any(change.now for change in self.about(Topic.INPUTS))

    def about(self, topic: str) -> list[FactChange]:
        """Return the changed facts of a topic; no modes of what is no longer called."""
        called = self.called_modules if topic == Topic.MODES else ()
        return [c for c in self.facts if c.topic == topic and (not called or c.name in called)]

    @property
    def called_modules(self) -> set[str]:
        """The patterns of modules that are called now, as far as that is known."""
        return {path for name in self.present(Topic.LAYERS) for path in prefixes(name)}


Finder = Callable[[Evidence], Cause | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A cause that can be recognised."""

    name: str
    sentence: str
    find: Finder
    rank: int
    """Causes that facts prove come first, and those that are only not excluded last."""


_RECORDING = r"no_grad|inference_mode|grad_enabled|detach|requires_grad|freez|frozen|trainable"
_KEEPING = r"append|extend|detach|\.item\(|\bdel |hook|deepcopy|clone"
_TYPES = r"float|half|double|\b(b|bf|fp)?(16|32|64)\b|dtype|\.to\(|autocast|type_as|numpy"
_ZEROING = r"zero_grad|set_to_none|\.grad\b|backward"
CODE = {
    **dict.fromkeys(("gradients recorded", "recorded", "reached", "reached anew"), _RECORDING),
    **dict.fromkeys(("trained", "new gradient", "parameter"), _RECORDING),
    **dict.fromkeys(("held", "held between", "earlier steps", "left", "lives longer"), _KEEPING),
    **dict.fromkeys(("type", "float64", "copy"), _TYPES),
    **dict.fromkeys(("inputs", "given", "larger"), r"pad|len|max|multiple|resize|crop|batch|hop"),
    "mode of calls": rf"{_RECORDING}|autocast",
    "attention": r"attention|attn|mask|softmax|sdpa|flash|is_causal|need_weights",
    "checkpoint": r"checkpoint|recompute|training|\.(eval|train)\(",
    "compiled": r"compile|dynamic|fullgraph",
    "eval of calls": r"\.(eval|train)\(|training",
    "backwards": r"backward|accum|detach|%",
    "graph kept": r"retain_graph|create_graph",
    **dict.fromkeys(("gradients kept", "gradients together"), _ZEROING),
    "freed late": r"hook|\.grad\b",
    "emptied": r"empty_cache|collect",
    "tied": r"\btie|weight|Parameter",
    **dict.fromkeys(("optimizer", Role.OPTIMIZER_STATE), r"foreach|fused|optim|lr="),
    "moved away": r"\.(to|cpu|cuda)\(|offload",
    "twice": r"deepcopy|\bcopy|load",
    **dict.fromkeys(("new tensor", Role.BUFFER), r"register_|Parameter|buffer"),
    "step": r"foreach|_\(",
    Role.SAVED: rf"backward|checkpoint|no_grad|{_KEEPING}",
    Role.ACTIVATION: _RECORDING,
    Role.PARAMETER: _TYPES,
}
"""By rules, and roles of what no rule explains, the patterns of code that makes such a growth:
which of the lines that changed are shown first."""
RULES: dict[str, Rule] = {}
"""By name, in the order in which causes of equal weight are told."""


def rule(
    name: str, sentence: str, *, sure: bool = False, last: bool = False
) -> Callable[[Finder], Finder]:
    """Register a rule; ``sentence`` has names in braces for the values of its causes.

    It is ``sure`` if it finds nothing but what facts prove; ``last`` is told where nothing else is.
    """

    def register(find: Finder) -> Finder:
        if name in RULES:
            raise ValueError(f"there is a rule {name!r} already")
        RULES[name] = Rule(name, sentence, find, 0 if sure else _LAST if last else 1)
        return find

    return register


def cause(
    name: str,
    rows: Iterable[Row],
    row: Row | None = None,
    origin: Origin | None = None,
    /,
    **values: str,
) -> Cause | None:
    """Return the cause that ``rows`` show, best of all ``row``; ``None`` where there are none."""
    found = tuple(row for row in rows if row.change > 0)
    if not found:
        return None
    return Cause(name, values, row or shown_by(found), total(found), origin, found)


Told = Callable[[FactChange], Iterable[Mapping[str, str]]]


def fact_rule(
    name: str,
    sentence: str,
    topic: str,
    told: Told,
    rows: Callable[[Evidence, FactChange], Iterable[Row]] = lambda evidence, change: (
        evidence.of_module(change.name)
    ),
    *,
    sure: bool = True,
) -> None:
    """Register a rule that compares facts of a topic: of the changed ones, that explains most.

    ``told`` yields the values of the sentence for a change, and with them, as ``numbers``, which
    modules of the pattern it is about. The sentence may name ``{module}`` and ``{name}``.
    """

    @rule(name, sentence, sure=sure)
    def find(evidence: Evidence) -> Cause | None:
        return largest(
            cause(
                name,
                rows(evidence, change),
                module=evidence.module(change.name, values.get("numbers", "")),
                **{"name": change.name, **values},
            )
            for change in evidence.about(topic)
            for values in told(change)
        )


def total(rows: Iterable[Row]) -> int:
    """Return by how many bytes rows grew together."""
    return sum(row.change for row in rows)


def some(names: Sequence[str]) -> str:
    """Return names in words, of many the first one."""
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def tensors(count: int, what: What) -> str:
    """Return equal tensors in words: ``3 × float32[4]``."""
    tensor = what.tensor or "memory"
    return f"{count} × {tensor}" if count > 1 else tensor


def largest(found: Iterable[Cause | None]) -> Cause | None:
    """Return what explains most, the first of equal ones."""
    return max((one for one in found if one is not None), key=lambda one: one.nbytes, default=None)


def times(number: int) -> str:
    """Return in words how often: ``"once"``, ``"twice"``, ``"3 times"``."""
    return "once" if number == 1 else "twice" if number == 2 else f"{number} times"


def called(evidence: Evidence, one: Allocation) -> str:
    """Return in words what a tensor is: a parameter, a buffer, an input, or by whom it was made."""
    place = fold(one.origin.module)[0]
    if one.kind in _STANDING and one.label:
        if one.label.startswith("input "):
            return f"the {one.label}"
        owner = f"{evidence.short(place)}." if place else ""
        return f"the {_STANDING[one.kind]} {owner}{one.label.rpartition('.')[2]}"
    made = one.origin.operator
    if not made:
        return f"{one.tensor} that the program has brought with it"
    return f"{made} in {evidence.short(place)}" if place else made


def shown_by(rows: Sequence[Row]) -> Row:
    """Return the row to show: the largest with a line, lasting rather than of a moment."""
    placed = [row for row in rows if row.what.line and row.what.role != Role.LIBRARY]
    largest = max(placed or rows, key=lambda row: row.change)
    lasting = [row for row in placed if row.what.role not in _OF_A_MOMENT]
    first = max(lasting, key=lambda row: row.change, default=largest)
    return first if first.change >= _MAIN * largest.change else largest


def lost_of(change: FactChange, name: str) -> list[InMode]:
    """Return the modes of a name that modules had and have no more."""
    return [one for one in lacking(change.before, change.now) if one.name == name]


def placed_in(pattern: str, found: Cause) -> Cause:
    """Return a cause with a place in the module that it is about: what its forward makes."""
    own = [row for row in found.rows if within(pattern, row.what.module) and row.what.line]
    made = [row for row in own if row.what.role in _OF_FORWARD]
    return replace(found, row=shown_by(made or own)) if own else found


def find_causes(evidence: Evidence) -> tuple[Cause, ...]:
    """Return the weighty causes of a growth: the first, and those that explain much more."""
    found = _in_order(evidence)
    growth = evidence.growth or evidence.difference.change
    explained = {row for one in found[:1] if one.is_specific for row in one.rows}
    kept = [*found[:1]]
    for one in found[1:]:
        if one.values.get("holder") and one.values["holder"] == found[0].values.get("holder"):
            continue  # whoever keeps it is told
        more = total(row for row in one.rows if row not in explained)
        # What has more numbers, and wider ones, has two causes.
        is_known = any(each.rule in _OF_TYPES for each in kept)
        is_new = one.rule in _OF_TYPES and not is_known
        part = 1 / 2 if is_new else 1 - 1 / one.larger if is_known else 0
        if found[0].larger * one.larger > 1:
            more += int(part * sum(row.bytes_now for row in one.rows if row in explained))
        least = WEIGHTY if RULES[one.rule].rank == 0 else _MUCH
        if one.is_specific and more >= least * growth:
            kept.append(one)
            explained.update(one.rows)
    told = [_with_class(evidence, _with_keeper(evidence, one)) for one in kept]
    return (*(_with_switch(evidence, _with_mode(evidence, one)) for one in told[:1]), *told[1:])


def _with_mode(evidence: Evidence, found: Cause) -> Cause:
    """Return a cause with the outermost modules that are in training mode, if they were not: it may
    be the reason.
    """
    outermost = (change for change in evidence.about(Topic.MODES) if "." not in change.name)
    names = [change.name for change in outermost if lost_of(change, "eval")]
    if not names or "training mode" in found.text:
        return found
    verbs = ("are", "were") if names[1:] else ("is", "was")
    words = "{} {} in training mode, and {} in eval mode".format(listed(names), *verbs)
    return replace(found, aside=f"{found.aside}; {words}")


def _with_switch(evidence: Evidence, found: Cause) -> Cause:
    """Return a cause with a switch or a text among the attributes of a module around it that is
    another one, or of a new module what may make such a cause: it may be the reason.
    """
    place = found.row.what.module if found.row is not None else ""
    near = (one for one in evidence.about(Topic.LAYERS) if place and within(one.name, place))
    meant = re.compile(CODE.get(found.rule, "$^"))
    for change, own in ((one, own) for one in near for own in one.now):
        gone = lacking(change.before, change.now)
        was: Mapping[str, Any] = gone[0].settings if gone else {}
        names = [name for name, value in own.settings.items() if type(value) in (bool, str)]
        told = [one for one in names if one in was and was[one] != own.settings[one]]
        told += [one for one in names if not change.before and meant.search(one)]
        if told and not own.is_of_torch and told[0] not in found.text:
            words = f"; {evidence.module(change.name, own.numbers)} has {told[0]}="
            words += f"{own.settings[told[0]]}{f', and had {was[told[0]]}' if was else ''}"
            values = {**found.values, "switch": f"{own.kind}.{told[0]}"}
            return replace(found, values=values, aside=found.aside + words)
    return found


def _with_class(evidence: Evidence, found: Cause) -> Cause:
    """Return a cause with the class of the module whose forward calls other operators, if it was of
    another class of the program's.
    """
    row = found.row
    module = row.what.module if row is not None else ""
    sides = (of(Topic.LAYERS).get(module, ()) for of in (evidence.then, evidence.present))
    kinds = [one.kind for side in sides for one in side[:1] if not one.is_of_torch]
    if row is None or found.is_specific or len({*kinds}) < 2:
        return found
    words = f": {evidence.module(module, row.numbers)} is {kinds[1]}, and was {kinds[0]}"
    return replace(found, aside=found.aside + words)


def _with_keeper(evidence: Evidence, found: Cause) -> Cause:
    """Return a cause with what refers to most of its rows, where that is news."""
    held = [row for row in found.rows if row.what.role != Role.SAVED and is_kept(evidence, row)]
    first = [row for row in held if row is found.row]
    holder = holder_of(evidence, first) or holder_of(evidence, held)
    is_said = holder in found.text or any(one in holder for one in _KEEP_AS_USUAL)
    if is_said or total(held) < _MAIN * found.nbytes:
        return found
    kept = total(row for row in held if holder_of(evidence, [row]) == holder) / found.nbytes
    part = "" if kept > _ALMOST_ALL else "most of it " if 2 * kept > 1 else "a part of it "
    return replace(found, aside=f", {part}kept by {holder}")


_ALMOST_ALL = 0.9
"""The part of a cause's bytes from which on a keeper is said to keep it."""
GRAPH = "the graph of "
_KEEP_AS_USUAL = (GRAPH, "a selective checkpoint")
"""Holders that do what they are there for."""


def is_kept(evidence: Evidence, row: Row) -> bool:
    """Tell whether something refers to a row's tensors that is more than a function's variable."""
    holder = evidence.watched.holders.get(row.now, "") if row.now is not None else ""
    return bool(holder) and not holder.startswith("the variable ")


def holder_of(evidence: Evidence, rows: Iterable[Row]) -> str:
    """Return in words what refers to most bytes of rows, "" if that is not known of any."""
    held = Counter[str]()
    for row in rows:
        if row.now is not None and (holder := evidence.watched.holders.get(row.now)):
            held[holder] += row.bytes_now
    return max(held, key=held.__getitem__, default="")


_FIRST_OF_EQUAL = ("arguments", "gradients recorded")
"""What a call says does something, where an attribute may do nothing; and with gradients layers may
call others than their fast path does."""


def _found(rule: Rule, evidence: Evidence) -> Cause | None:
    """Return what a rule finds; an error of it is no reason to lose what a check has measured."""
    try:
        return rule.find(evidence)
    except Exception as error:
        warn_of_defect(f"the cause {rule.name!r}", error)
        return None


def _in_order(evidence: Evidence) -> list[Cause]:
    growth = evidence.growth or evidence.difference.change
    found = [one for each in RULES.values() if (one := _found(each, evidence)) is not None]
    # Where a peak has moved, much has come and gone: what explains the growth of the figure counts.
    main = int(_MAIN * min(growth, max(evidence.difference.change, 0) or growth))
    weighty = [
        one
        for one in found
        if one.nbytes >= WEIGHTY * growth or (one.is_specific and one.nbytes >= main)
    ]
    ranks = {one.rule: RULES[one.rule].rank for one in weighty}
    ranks |= {one.rule: _LAST + 1 for one in weighty if ranks[one.rule] == 1 and one.nbytes < main}
    if any(rank < _LAST for rank in ranks.values()):
        weighty = [one for one in weighty if one.is_specific]
    elif _LAST not in ranks.values():
        return []  # the largest row says more than a cause of a small part
    kept = {group.what.role for group in evidence.known_groups}.intersection(KEPT)

    def order(one: Cause) -> tuple[float, ...]:
        # Who keeps what nobody kept is nearer to the cause than what makes more of it.
        role = one.row.what.role if one.row is not None else ""
        keeps = role in KEPT and role not in kept and one.rule in _KEEPING_RULES
        is_anew = keeps and 2 * one.nbytes >= growth
        of_equal = one.rule == "copy", one.rule not in _FIRST_OF_EQUAL  # who keeps one says more
        return ranks[one.rule], not is_anew, -one.nbytes, *of_equal

    return sorted(weighty, key=order)  # of equal weight in the order of the rules


def within(pattern: str, module: str) -> bool:
    """Tell whether the path of a module, with or without its numbers, is below another's."""
    own, outer = fold(module)[0], fold(pattern)[0]
    return own == outer or own.startswith(f"{outer}.")
