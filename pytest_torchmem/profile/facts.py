"""What a snapshot keeps of a step beside its figures: what it was run with, and its course.

So a later run can say which facts changed. In a file they are lists and objects.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import starmap
from math import isfinite
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pytest_torchmem.profile.module_paths import are_among, join_numbers, only_in
from pytest_torchmem.profile.timeline import OperatorCall, Phase, Timeline, equal_parts, phases

Scalar = bool | int | float | str
_OF_TORCH = "nn."
_OUTSIDE_OF_BRACKETS = re.compile(r", (?![^(\[]*[)\]])")


class Geometry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{[*self.shape]}"


class InMode(NamedTuple):
    """A mode that modules are called in, such as ``autocast`` to ``bfloat16``."""

    name: str
    detail: str = ""
    numbers: str = ""
    """Which modules of the pattern, as ``write_numbers`` writes it."""

    @property
    def text(self) -> str:
        return f"{self.name} {self.detail}".rstrip()


def is_width(name: str) -> bool:
    """Tell whether a setting of a layer of torch is a width, if it is a number."""
    return name.isdecimal() or name in ("in_features", "out_features")


class Layer(NamedTuple):
    """What modules are: ``["nn.Conv2d", {"0": 3, "1": 32, "stride": "(2, 2)"}, "0-3"]``."""

    kind: str
    """The class; one of torch begins with ``nn.``."""
    settings: Mapping[str, Scalar]
    """What a layer of torch says of itself, what has no name by its place; else the attributes."""
    numbers: str = ""

    @property
    def name(self) -> str:
        return self.kind.removeprefix(_OF_TORCH)

    @property
    def is_of_torch(self) -> bool:
        return self.kind.startswith(_OF_TORCH)

    @property
    def widths(self) -> list[Scalar]:
        """How many numbers it takes and makes: ``Conv2d(3, 32, …)``, ``in_features=3``."""
        sizes = self.settings.items()
        return [size for name, size in sizes if is_width(name) and type(size) is int]

    @property
    def text(self) -> str:
        parts = ", ".join(parts_of(self.settings))
        if self.is_of_torch:
            return f"{self.name}({parts})"
        return f"{self.name}: {parts}" if parts else self.name


class Sized(NamedTuple):
    """A shape that layers are given, or that parameters have; ``packed`` sequences are of one."""

    kind: str
    shape: tuple[int, ...]
    numbers: str = ""

    @property
    def text(self) -> str:
        return f"{self.kind} {[*self.shape]}".lstrip()


class Calls(NamedTuple):
    """How often something was called, and by which lines."""

    number: int = 0
    lines: tuple[str, ...] = ()


class Counts(NamedTuple):
    """How often the forward called an operator that makes tensors."""

    called: int = 0
    not_recorded: int = 0
    """How often autograd did not record it."""
    in_backward: int = 0
    """How often a backward came to it."""
    largest: int = 0
    """The bytes of the largest tensor that it made there, 0 where that is not known."""


EMPTY_CACHE = "torch.cuda.empty_cache"
"""Whose calls are counted beside those of modules."""
CHECKPOINT = "checkpoint of "
"""The start of the names of checkpoints that span several modules: ``checkpoint of Net.blocks.*``;
they are counted as well."""
IN_MODE = "under {}, of {}"
"""The names of modules of whose calls some are in a mode (``no_grad``, eval, autocast): these are
counted by themselves."""
AUTOCAST = "autocast"
"""The mode of modules within autocast, to the type that is its detail, or ``"off"``."""
PACKED = "saved tensors by"
"""The mode of modules within hooks of saved tensors, such as those of ``save_on_cpu``."""
UNCACHED = " without cache"
"""The end of the type of an autocast that keeps no casts: ``"bfloat16 without cache"``."""
IN_PART = "called in"
"""The mode of modules that some calls of the module around them call, such as ``"2 of 20"``."""
NO_BACKWARD = "no backward"
"""The mode of modules that no backward of the step comes to, though it comes to others."""


_KINDS: dict[str, Any] = {}
"""What facts of each topic are, in the order in which causes look at them."""


def _topic(name: str, kind: Any) -> str:
    _KINDS[name] = kind
    return name


class Topic:
    """The topics of facts, as snapshots name them."""

    SETTINGS = _topic("settings", str)
    """Settings beside torch's that decide figures: ``{"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}``."""
    INPUTS = _topic("inputs", tuple[Geometry, ...])
    """What the step works on: ``{"input 0": [["int64", [4, 512]]]}``."""
    ARGUMENTS = _topic("arguments", tuple[str, ...])
    """How outermost modules are called: ``{"Bert": ["labels", "output_hidden_states=True"]}``."""
    CALLS = _topic("calls", Calls)
    """How often outermost modules are called, and where: ``{"Net": [2, ["a.py:12"]]}``; others
    where that is more than once in a call of the module around them."""
    MODES = _topic("modes", tuple[InMode, ...])
    """Modules that are called in another mode than what calls them, and the modules of a step in
    another than the usual one: ``{"GPT.blocks.*": [["recomputed", "", "0-11"]]}``."""
    FROZEN = _topic("frozen", str)
    """Modules and parameters that do not train, with their numbers: ``{"GPT.blocks.*": "0-3"}``."""
    TIED = _topic("tied", str)
    """Which parameters are one: ``{"GPT.head.weight": "GPT.embed.weight"}``."""
    MODULES = _topic("modules", tuple[str, ...])
    """Settings of outermost modules: ``{"LlamaForCausalLM": ["attention sdpa"]}``."""
    CONFIGURATION = _topic("configuration", Mapping[str, Scalar])
    """What the configuration of an outermost module says: ``{"GPT": {"n_head": 12}}``."""
    LAYERS = _topic("layers", tuple[Layer, ...])
    """What modules are, with their numbers: ``{"Net.*": [["nn.ReLU", {}, "0-3"]]}``."""
    GIVEN = _topic("given", tuple[Sized, ...])
    """What layers with parameters are called with first: ``{"Net.head": [["", [8, 128], ""]]}``."""
    SIZES = _topic("sizes", tuple[Sized, ...])
    """Parameters that no layer of their own is called with: ``{"Vit.pos": [["", [197], ""]]}``."""
    FORMATS = _topic("memory formats", str)
    """Models with parameters, and inputs, in channels last: ``{"ResNet": "channels last"}``."""
    COMPILED = _topic("compiled", Calls)
    """How many graphs ``torch.compile`` made, and where: ``{"graphs": [2, ["train.py:12"]]}``; and
    how many of them broke off: ``{"breaks": [1, ["model.py:9"]]}``."""
    OPTIMIZERS = _topic("optimizers", tuple[str, ...])
    """``{"AdamW": ["foreach", "amsgrad"]}``."""
    STATES = _topic("optimizer states", tuple[str, ...])
    """What optimizers keep of each parameter: ``{"AdamW": ["exp_avg", "exp_avg_sq"]}``."""
    BACKWARD = _topic("backward", Calls)
    """How often there was one, and with what: ``{"calls": [4, []], "vmap": [4, ["a.py:9"]]}``.

    ``vmap`` counts those of ``torch.func.grad`` within ``torch.vmap``."""
    IN_PLACE = _topic("in place", int)
    """How often modules called operators that write to their arguments: ``{"aten::add_": 2}``."""
    OPERATORS = _topic("operators", Counts)
    """The forward's calls of each operator, ``Counts``: ``{"aten::addmm": [12, 0, 12]}``."""
    CODE = _topic("code", str)
    """Two letters for each line of the program's functions that the test leads to, and versions of
    the libraries that these name: ``{"losses.py: focal_loss": "aXk7", "timm": "1.0.20"}``."""


UNREACHED, UNCHANGED = "not reached before", "  # unchanged"
"""What is said of lines that may be as they were, as no test led to them, or that are."""


class CodeRow(NamedTuple):
    """A line of a difference of code."""

    sign: str
    """"+" of a line that is there now, "-" of one that is gone, " " of one between them."""
    number: int
    """Of the line, or of the one that stands in its place now; 0 of a library."""
    text: str
    note: str = ""
    """What it was, where that does not stand before it."""


class CodeChange(NamedTuple):
    """Lines of the program that a snapshot has otherwise; or a library, of another version."""

    file: str
    rows: tuple[CodeRow, ...]
    meant: int
    """The position of the row that is most likely meant."""
    likely: tuple[int, ...] = ()
    """The positions of lines with what may be the cause, the likeliest first."""
    where: str = ""
    """The function, where it is new or gone."""

    def __str__(self) -> str:
        return "\n".join(self.lines(len(self.rows)))

    @property
    def place(self) -> str:
        """Where the line is that is most likely meant: ``losses.py:17``."""
        number = self.rows[self.meant].number
        return f"{self.file}:{number}" if number else self.file

    @property
    def places(self) -> list[str]:
        """Where the lines are that came."""
        return [f"{self.file}:{one.number}" for one in self.rows if one.sign == "+"]

    def around(self, most: int) -> tuple[CodeRow, ...]:
        """Return at most ``most`` rows, those around the one that is most likely meant, with others
        that are likely; none that is gone without the next one, or the other way.
        """
        signs, before = "".join(one.sign for one in self.rows), (most - 1) // 2
        last = min(self.meant, max(0, len(signs) - most))
        firsts = range(max(0, min(last, self.meant - most + 1)), last + 1)

        def cuts(first: int) -> tuple[int, list[bool], int]:
            pairs = signs[max(first - 1, 0) : first + 1], signs[first + most - 1 :][:2]
            lacks = [not first <= at < first + most for at in self.likely]
            return pairs.count("-+"), lacks, abs(self.meant - before - first)

        first = min(firsts, key=cuts)
        ends = self.rows[first].text.lstrip().startswith(("@", "with "))  # what had no other line
        if most == 1 and not ends and (came := re.match("-+[+]", signs[first:])):
            first += came.end() - 1
        elif 0 < first < self.meant and signs[first - 1 : first + 1] == "-+":
            first += 1
        rows = self.rows[first : first + most]
        end = first + len(rows) - 1
        is_cut = signs[end : end + 2] == "-+" and end > self.meant
        is_cut |= signs[end] == " " and end > self.meant and not rows[-2].text.endswith(":")
        return rows[:-1] if is_cut else rows

    def lines(self, most: int) -> list[str]:
        """Return at most ``most`` rows as text: a single one behind its place, others below it."""
        rows = self.around(most)
        sign, number, text, note = rows[0]
        if not number:
            return [f"{self.file} {text}"]
        if not rows[1:] and sign == "+":
            text = text.strip() + note
            note = f"  # {self.where}" if self.where and "  # " not in text else ""
            return [f"{self.file}:{number}: {text}{note}"]
        numbers = [one.number for one in rows if one.sign != "-"] or [number]
        at = f"{min(numbers)}" + (f"-{max(numbers)}" if max(numbers) > min(numbers) else "")
        indent = min(len(one.text) - len(one.text.lstrip()) for one in rows)
        where = f", {self.where}" if self.where else ""
        return [f"{self.file}:{at}{where}", *(f"  {one.sign} {one.text[indent:]}" for one in rows)]


TOPICS = tuple(_KINDS)

Facts = Mapping[str, Mapping[str, Any]]
Row = TypeVar("Row", InMode, Layer, Sized)


def read_facts(plain: Any) -> Facts:
    """Return facts of builtin types as they are here, those of unknown topics as they stand there.

    Raises ``ValueError`` for what is none of its topic.
    """
    if not isinstance(plain, dict) or not all(isinstance(one, dict) for one in plain.values()):
        raise ValueError("facts are objects by topic and name")
    found: dict[str, dict[str, Any]] = {topic: {} for topic in TOPICS if topic in plain}
    for topic, name, fact in ((t, name, fact) for t in plain for name, fact in plain[t].items()):
        try:
            read = _read(_KINDS[topic], fact) if topic in _KINDS else fact
        except ValueError as error:
            raise ValueError(f'"{topic}": "{name}": {error}') from None
        found.setdefault(topic, {})[name] = read
    return found


def _read(kind: Any, plain: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType and type(plain) in inner:
        return plain
    if origin is tuple and isinstance(plain, list | tuple):
        return tuple(_read(inner[0], one) for one in plain)
    if origin is not None and isinstance(plain, dict) and issubclass(origin, Mapping):
        return {name: _read(inner[1], one) for name, one in plain.items()}
    if origin is None and issubclass(kind, tuple) and isinstance(plain, list | tuple):
        fields = _fields(kind)[: None if kind is not Counts else len(plain)]  # of before, fewer
        return kind(*starmap(_read, zip(fields, plain, strict=True)))
    if type(plain) is not kind or (kind is int and plain < 0):
        raise ValueError(f"{plain!r:.40} is not what stands here")
    return plain


@lru_cache(maxsize=16)
def _fields(kind: type) -> tuple[Any, ...]:
    return tuple(get_type_hints(kind).values())


def scalar(text: str) -> Scalar:
    for kind in (int, float):
        with suppress(ValueError):
            found = kind(text)
            if str(found) == text and isfinite(found):
                return found
    return {"True": True, "False": False}.get(text, text)


@lru_cache(maxsize=1024)
def settings_of(said: str) -> Mapping[str, Scalar]:
    """Return settings such as ``3, 32, stride=(2, 2)`` by name, what has none by its place."""
    found: dict[str, Scalar] = {}
    for place, part in enumerate(_OUTSIDE_OF_BRACKETS.split(said) if said else ()):
        name, _, value = part.rpartition("=")
        found[name or str(place)] = scalar(value)
    return found


def parts_of(settings: Mapping[str, Scalar]) -> list[str]:
    """Return settings as they read: ``name=value``, or the value of what has a place alone."""
    named = settings.items()
    return [str(value) if name.isdecimal() else f"{name}={value}" for name, value in named]


class FactChange(NamedTuple):
    """One fact, then and now, each empty where there was none."""

    topic: str
    name: str
    before: Any
    now: Any


def changed_facts(before: Facts, now: Facts) -> Iterator[FactChange]:
    """Yield the facts that differ, topic by topic, in the order of the present ones."""
    for topic in TOPICS:
        old, new = before.get(topic, {}), now.get(topic, {})
        for name in dict.fromkeys((*new, *old)):
            was, own = old.get(name), new.get(name)
            if was != own:
                kind: Any = type(own if was is None else was)
                yield FactChange(topic, name, was or kind(), own or kind())


def new_in(own: Iterable[Row], others: Iterable[Row]) -> list[Row]:
    """Return what none of the others is, whatever the numbers."""
    known = [other[:-1] for other in others]
    return [one for one in own if one[:-1] not in known]


def lacking(own: Iterable[Row], others: Sequence[Row]) -> list[Row]:
    """Return what of a pattern's modules is not so of others, with the numbers of those."""
    found = []
    for one in own:
        same = next((other for other in others if other[:-1] == one[:-1]), None)
        if same is None:
            found.append(one)
        elif not are_among(one.numbers, same.numbers):
            found.append(one._replace(numbers=only_in(one.numbers, same.numbers)))
    return found


def exchanged(before: Sequence[Row], now: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return former and present facts of a pattern's modules, unchanged modules left out."""
    gone, came = new_in(before, now), new_in(now, before)
    if join_numbers(one.numbers for one in before) != join_numbers(one.numbers for one in now):
        return gone, came  # one is gone or new, and those after it have moved up or down
    return gone or lacking(before, now), came or lacking(now, before)


POINTS = 96
"""Numbers of an outline, over all of its stretches."""
_MOST_STRETCHES = 12
"""Changes of phase beyond which a step is one stretch."""
FULL = 1000
"""What stands for the largest bytes of the step: shares are per mille of it."""


class Stretch(NamedTuple):
    phase: str
    """"" for a step with too many phases to tell them apart."""
    events: int
    """How many allocations and frees there were."""
    shares: tuple[int, ...]
    """The largest bytes alive in each of as many equal parts, per mille of the step's largest."""


def with_largest(facts: Facts, timeline: Timeline, calls: Iterable[OperatorCall]) -> Facts:
    counts: dict[str, Counts] = dict(facts.get(Topic.OPERATORS, {}))
    for call in calls:
        name = call.origin.operator
        if name in counts and call.origin.phase is Phase.FORWARD:
            events = timeline.events[call.start : call.stop]
            made = (timeline.allocations[event - 1] for event in events if event > 0)
            largest = max((one.nbytes for one in made if one.dtype), default=0)
            if largest > counts[name].largest:
                counts[name] = counts[name]._replace(largest=largest)
    return {**facts, Topic.OPERATORS: counts} if counts else facts


Outline = tuple[Stretch, ...]


def outline_of(timeline: Timeline, points: int = POINTS) -> Outline:
    """Return the outline of a timeline in about as many ``points``."""
    live = timeline.live()
    peak = max(live)
    parts = [(start, stop, phase.value) for start, stop, phase in phases(timeline)]
    if not parts or peak <= 0:
        return ()
    if len(parts) > _MOST_STRETCHES:
        parts = [(0, len(timeline.events), "")]
    return tuple(
        Stretch(
            phase,
            stop - start,
            tuple(
                -(-FULL * max(live[first : last + 1]) // peak)
                for first, last in equal_parts(
                    start, stop, min(max(points * (stop - start) // len(live), 2), stop - start)
                )
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
    spans = phases(timeline)
    if [one.phase for one in outline] == [phase.value for _, _, phase in spans]:
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
