"""One growth explained: the moment, what is different there, and the causes.

Memory may also grow from step to step: what is alive at the end of one and was not before it. A
step ends where the forward of the next begins, so that gradients which are set to none in between
do not count. Where no forward of a module tells steps apart, it ends with an optimizer's step,
without one with a backward, and without that where the same module is called again. The first step
makes what later ones need, such as an optimizer's state.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile

from pytest_torchmem.diagnosis import rules  # noqa: F401
from pytest_torchmem.diagnosis.causes import CODE, RULES, Cause, Evidence, Watched, find_causes
from pytest_torchmem.diagnosis.difference import (
    OF_BACKWARD,
    MomentDifference,
    Row,
    difference,
    difference_between,
)
from pytest_torchmem.diagnosis.names import with_names_of
from pytest_torchmem.diagnosis.provenance import NOTHING_RAN, Provenance
from pytest_torchmem.figures import HOST, PEAK, PHASE_PEAKS, RESERVED
from pytest_torchmem.printable import listed
from pytest_torchmem.profile.facts import CodeChange, Counts, Topic
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.profile.timeline import Allocation, Origin, Phase, Role, Timeline
from pytest_torchmem.snapshots.alive import Alive, What, alive_at, positions_of
from pytest_torchmem.snapshots.format import Entry, Told

_MOST_SHOWN = 3
"""Rows whose lines may be to blame, and lines of a call that are told."""
_LINE = re.compile(r"[^\s(),]+:\d+")
_WORD = re.compile(r"[^\W\d]\w{2,}")
_NUMBER = re.compile(r"\b\d{2,}\b")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What grew at the moment that grew most, and why where it can be told."""

    difference: MomentDifference
    causes: tuple[Cause, ...] = ()
    inputs: tuple[tuple[str, str, str], ...] = field(default=())
    """Inputs that changed: name, then and now."""
    callers: Mapping[str, str] = field(default_factory=dict)
    """Outermost modules of installed libraries, and the program's lines that call them."""
    library_lines: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By modules and lines of installed libraries: the program's that call them."""
    functions: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    """By module, operator and line: the function of another name that the source calls there."""
    written: Origin | None = None
    """The operator of the forward whose backward made what stands for the growth."""
    leads: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """By modules and lines: the lines at which these are called in, the nearest first."""
    told: tuple[Told, ...] = ()
    """What runs said of this very growth, the largest part first: they knew more than snapshots."""
    changed: tuple[CodeChange, ...] = ()
    """Code that is another one than in the snapshot, what is most likely meant first."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Attributes that are modules, and what their names were."""
    was_peak: str = ""
    """The phase's peak that the overall peak was in the snapshot, if it is another one now."""

    @property
    def places(self) -> dict[tuple[str, str], set[What]]:
        """Modules and lines that may be to blame, those of the causes and of the largest rows, and
        what the first of these rows there is.
        """
        rows = (*(cause.row for cause in self.causes), *self.difference.came[:_MOST_SHOWN])
        origins = (self.written, *(cause.origin for cause in self.causes))
        shown = [row for row in rows if row is not None and row.what.line]
        places = [(fold(one.module)[0], one.line) for one in origins if one and one.line]
        own = {row.place: {row.what} for row in reversed(shown)}
        return {place: own.get(place, set()) for place in (*places, *(row.place for row in shown))}

    @property
    def words(self) -> set[str]:
        """The names in the first cause, without the words of the sentences of rules; without a
        cause those of the leading row's module and of what it is there; and that row's sizes.
        """
        own = {word for rule in RULES.values() for word in _WORD.findall(rule.sentence)}
        said, row = " ".join(cause.text for cause in self.causes[:1]), self.leading_row
        if not said and row is not None:
            said = f"{row.what.module} {row.what.source.removeprefix('aten::')}"
        tensors = [one for one in (row.what, row.before) if one] if row is not None else []
        sizes = {str(size) for one in tensors for size in one.shape}
        return sizes.union(_WORD.findall(said), _NUMBER.findall(said)) - own

    @property
    def code(self) -> str:
        """The pattern of code that makes the causes, or such a row."""
        row = self.leading_row
        names = [cause.rule for cause in self.causes] or [row.what.role if row else ""]
        return "|".join(filter(None, (CODE.get(one, "") for one in names)))

    @property
    def switch(self) -> str:
        """The attribute with its class that may be the reason, "" if none is another one."""
        return next((cause.values.get("switch", "") for cause in self.causes[:1]), "")

    @property
    def lines(self) -> list[str]:
        """The lines that the first cause names."""
        return [line for cause in self.causes[:1] for line in _LINE.findall(cause.text)]

    @property
    def leading_row(self) -> Row | None:
        """The row that stands for the growth: that of the first cause, else one of code that
        changed, else the largest.
        """
        named = (cause.row for cause in self.causes[:1])
        came = self.difference.came
        changed = {place for one in self.changed for place in one.places}
        large = (row for row in came if 2 * row.change >= came[0].change)
        likely = (row for row in large if row.what.line in changed)
        return next((row for row in (*named, *likely, *came) if row is not None), None)

    @property
    def place(self) -> tuple[str, str]:
        """The module's pattern and the line that are to blame."""
        row, made = self.leading_row, self.origin
        if made is not None:
            return fold(made.module)[0], made.line
        return row.place if row is not None else ("", "")

    @property
    def origin(self) -> Origin | None:
        """Who is to blame, where that is another one than who made the leading row."""
        named, row = next((cause.origin for cause in self.causes[:1]), None), self.leading_row
        return named or (self.written if row and row.what.role in OF_BACKWARD else None)


def _with_peak(entry: Entry) -> Entry:
    """Return an entry with what was alive at the overall peak, where that was a phase's."""
    alive, figures = entry.alive, entry.figures
    if alive is None or PEAK in alive.moments or PEAK not in figures:
        return entry
    same = _phase_at_peak(entry, alive.moments)
    return replace(entry, alive=alive.with_moment(PEAK, same)) if same else entry


def _phase_at_peak(entry: Entry, moments: Iterable[str] = PHASE_PEAKS) -> str:
    """Return the moment that the overall peak is, "" where it is in no phase."""
    figures = entry.figures
    return next((name for name in moments if figures.get(name) == figures.get(PEAK)), "")


def diagnose(
    before: Entry,
    now: Entry,
    moment: str,
    alive: Alive | None = None,
    profile: MemoryProfile | None = None,
    watched: Watched | None = None,
) -> Diagnosis:
    """Return what grew at ``moment`` and why.

    ``alive`` is everything that is alive now, where more is known than the entry keeps, and
    ``profile`` what ran.
    """
    whole, was = alive or now.alive or Alive(), ""
    if moment == PEAK and (was := _phase_at_peak(before)) == _phase_at_peak(now):
        was = ""
    before = _with_peak(before) if moment == PEAK else before
    before, now, names = with_names_of(before, now)
    ran = NOTHING_RAN
    if profile is not None and moment != HOST:  # whose allocations are others
        made = profile.calls or (), dict(profile.broadcasts), profile.functions
        ran = Provenance(profile.timeline, *made, profile.host_timeline)
    were, are = (side.facts.get(Topic.OPERATORS, {}) for side in (before, now))
    more = [name for name in are if were and are[name].called > were.get(name, Counts()).called]
    found = difference(before, whole, moment, ran.groups_of(more))
    if moment == RESERVED:  # of which no rows tell
        found = replace(found, now=now.figures[moment])
    last = _made_last(profile, moment) if profile is not None else None
    evidence = Evidence(before, now, found, whole, ran, watched or Watched(), names, last)
    said = _diagnosed(evidence, find_causes(evidence), profile)
    return replace(said, told=_told_since(before, now), was_peak=was)


def all_of(
    now: Entry, alive: Alive, moment: str, profile: MemoryProfile, watched: Watched | None = None
) -> Diagnosis:
    """Return what is ``alive`` at a moment, as if all of it had come; buffers of libraries last."""
    found = difference_between(Alive((), {}, (moment,)), alive, moment, 0)
    rows = tuple(sorted(found.rows, key=lambda row: row.what.role == Role.LIBRARY))
    found = replace(found, rows=rows)
    evidence = Evidence(now, now, found, alive, watched=watched or Watched())
    return _diagnosed(evidence, (), profile)


def _diagnosed(
    evidence: Evidence, causes: tuple[Cause, ...], profile: MemoryProfile | None
) -> Diagnosis:
    """Return a diagnosis with what the run knows of its places."""
    inputs = evidence.about(Topic.INPUTS)
    said = Diagnosis(
        evidence.difference,
        causes,
        tuple((c.name, "; ".join(map(str, c.before)), "; ".join(map(str, c.now))) for c in inputs),
        dict(profile.callers) if profile is not None else {},
        profile.library_lines if profile is not None else {},
        {
            (fold(origin.module)[0], origin.operator, origin.line): name
            for origin, name in reversed(profile.functions if profile is not None else ())
        },
        leads=_leads(evidence, causes[0] if causes else None),
        renamed=_renamed(evidence),
    )
    row = said.leading_row
    if row is None or row.what.role not in OF_BACKWARD or not row.what.line:
        return said
    written = evidence.ran.written(row.what.module, row.what.source, row.what.line)
    return replace(said, written=written)


def _renamed(evidence: Evidence) -> dict[str, str]:
    """Return names of attributes that are modules with what they were, if none has that now."""
    present = {part for path in evidence.present(Topic.LAYERS) for part in path.split(".")}
    names = ((one.rpartition(".")[2] for one in pair) for pair in evidence.names.items())
    return {new: old for new, old in names if old.isidentifier() and old not in present}


def _leads(evidence: Evidence, cause: Cause | None) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return what leads to lines: where these were there before, another call may be the news; the
    nearest two to others. Nothing where the cause says which calls are meant.
    """
    if cause is not None and cause.values.get("lines"):
        return {}
    then, seen = evidence.moved_lines(), evidence.watched
    calls = (line for one in evidence.then(Topic.CALLS).values() for line in one.lines)
    known = {then.get(line, line) for line in (*calls, *(one.line for one in evidence.known()))}
    found = {}
    for (module, line), paths in seen.callers.items():
        if leads := _nearest(paths)[: None if line in known else 2]:
            found[module, line] = leads
    return found


def _nearest(leads: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the lines that lead to one, the nearest first: several in words where calls part."""
    inside = _common(leads)
    parting = [one[len(inside) :] for one in leads]
    around = _common([one[::-1] for one in parting])[::-1]
    inner = dict.fromkeys(one[-len(around) - 1] for one in parting if len(one) > len(around))
    parted = (listed([*inner]),) if 1 < len(inner) <= _MOST_SHOWN else ()
    return (*inside, *parted, *around)[:_MOST_SHOWN]


def _common(leads: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the lines with which all begin."""
    same = takewhile(lambda lines: len({*lines}) == 1, zip(*leads, strict=False))
    return tuple(lines[0] for lines in same)


def _made_last(profile: MemoryProfile, moment: str) -> Allocation | None:
    """Return the allocation that reached the peak of a figure."""
    timeline = profile.host_timeline if moment == HOST else profile.timeline
    at = timeline.peak()[1] if moment == HOST else positions_of(profile).get(moment, 0)
    event = timeline.events[at - 1] if at else 0
    return timeline.allocations[event - 1] if event > 0 else None


def _told_since(before: Entry, now: Entry) -> tuple[Told, ...]:
    """Return what runs said of all that grew since an entry, of the largest growth first."""
    begun = [one[:3] for one in now.grew if before.figures.get(one.moment) == one.before]
    first = [one[:3] for one in now.grew].index(begun[-1]) if begun else len(now.grew)
    return tuple(sorted(now.grew[first:], key=lambda one: one.before - one.now))


FEWEST = 3
"""Steps without which nothing can be said: the first and the last have one end that counts."""
MANY = 8
"""Steps from which on the first half may fill what is bounded, such as a cache."""
_MOMENT = "end"


@dataclass(frozen=True, slots=True)
class StepGrowth:
    """By how much memory grew in each step but the first and the last."""

    steps: int
    """How many steps there were."""
    counted: str = ""
    """What they were told apart by, such as "steps of an optimizer"."""
    grown: tuple[int, ...] = ()
    """In bytes, step by step; of many steps those of the later half."""
    difference: MomentDifference | None = None
    """What is there after the step that grew most, and was not before it."""
    made: tuple[int, ...] = ()
    """Indices of what this step made and left alive, of what grew."""
    end: int = 0
    """The events before the end of the step after it, if there is one."""

    @property
    def most(self) -> int:
        """The bytes by which memory grew in one step."""
        return max(self.grown, default=0)


def step_growth(timeline: Timeline) -> StepGrowth:
    """Return by how much memory grows between the steps of a timeline."""
    steps, counted, ends = ends_of_steps(timeline)
    if steps < FEWEST:
        return StepGrowth(steps, counted)
    live = timeline.live()
    # From one end to the next, what never shrank again counts: steps may take turns, as those of a
    # generator and a discriminator do.
    least = list(accumulate((live[end] for end in reversed(ends)), min))[::-1]
    kept = tuple(now - before for before, now in pairwise(least))
    grown = kept[:-1] if len(kept) > 2 else kept
    first = len(grown) // 2 if steps >= MANY else 0
    worst = max(range(first, len(grown)), key=lambda index: grown[index])
    begin, end = ends[worst : worst + 2]
    before, now = (alive_at(timeline, {_MOMENT: at}, by_step=False) for at in (begin, end))
    # When variables of the step are those of another, and something is made after it.
    last = max(place for place, event in enumerate(timeline.events) if event > 0)
    later = max(one for one in ends[worst + 1 : worst + 3] if one == end or one <= last)
    live_at = timeline.live_indices((begin, end, later))
    earlier, there = {*live_at[begin]}, {*live_at[later]}
    grew = difference_between(before, now, _MOMENT)
    tensors = {(row.what.shape, row.what.dtype) for row in grew.came}
    made = tuple(
        index
        for index in live_at[end]
        if index not in earlier and timeline.allocations[index][3:5] in tensors
    )
    staying = tuple(index for index in made if index in there)
    grown, end = grown[first:], later if staying else end
    return StepGrowth(steps, counted, grown, grew, staying or made, end)


def ends_of_steps(timeline: Timeline) -> tuple[int, str, list[int]]:
    """Return how many steps there are, what tells them apart, and where they end.

    Where the forward of the next step tells, the last one has no end.
    """
    forwards: dict[int, int] = {}
    for (start, _, phase), step in zip(timeline.spans(), timeline.steps(), strict=True):
        if phase is Phase.FORWARD:
            forwards.setdefault(step, start)
    found = [(len(forwards), "forwards", [*forwards.values()][1:])]
    for phase, name in ((Phase.OPTIMIZER, "steps of an optimizer"), (Phase.BACKWARD, "backwards")):
        stops = [stop for _, stop, one in timeline.spans() if one is phase]
        # What is last goes on to the end of the program, where everything is freed.
        found.append((len(stops), name, [stop for stop in stops if stop < len(timeline.events)]))
    calls = list(timeline.module_calls)
    found.append((len(calls), "calls of a module", calls[1:]))
    enough = [one for one in found if one[0] >= FEWEST]
    return enough[0] if enough else max(found, key=lambda one: one[0])
