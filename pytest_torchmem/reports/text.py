"""The messages of checks: what, where, by how much, what grew, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from linecache import getline
from typing import TYPE_CHECKING, Any

from pytest_torchmem.checks import result as results
from pytest_torchmem.checks.request import word_of
from pytest_torchmem.checks.result import CheckResult, Finding, Outcome, PeakContents, TraceResult
from pytest_torchmem.figures import MEASURED, PEAK, PHASE_PEAKS, label, phase_of, title
from pytest_torchmem.printable import first_of, listed, printable, printable_lines
from pytest_torchmem.profile.timeline import Role
from pytest_torchmem.reports import growth, layout
from pytest_torchmem.snapshots.compare import Change, Comparison, Verdict, main_change
from pytest_torchmem.units import format_change, format_percent, format_size

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.diagnose import Diagnosis
    from pytest_torchmem.reports.summary import Check
    from pytest_torchmem.snapshots.format import Key

_MOST_SIZES = 5
MOST_LINES = 25
"""Of a message that is not verbose."""
_FEWEST_LINES = 6
"""Of rows with their title, for which the figures of other devices make room."""

_LINES_OF_CODE = 2, 15
"""The fewest and the most that are told, with their head."""
_LINES_OF_ORIGINS = 19
"""Of what leads to the largest, with the code that changed last and what would help."""
_MOST_FIGURES = 2
"""Those that are told where there is little room."""
_WORTH_A_FIGURE = 10_000
"""The part of the largest change that a figure has to have, unless every one is told."""
_WORTH_A_SENTENCE = 4
"""What would help saves this part of what has to go."""
_SHORTER = (0, 3, 3, 15), (0, 2, 1, 12), (0, 2, 0, 10), (0, 1, 0, 0)
"""What remains of a message with less and less room: empty lines between its parts, place and
causes of the first device, those of others, and how many lines of code have to have room then."""
_ONE_ROW = 3
"""Lines of one row with its title and the sum of the others; its place has a fourth one."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of one finding."""

    first: str
    """The headline, without where it was found unless ``cause`` is there."""
    sections: list[str] = field(default_factory=list)
    rows: growth.Section = field(default_factory=lambda: growth.Section(""))
    """What came and went, or what was alive: as much as has room."""
    changes: Sequence[Change] = ()
    """The figures that did it, and ``all_changes`` every figure."""
    all_changes: Sequence[Change] = ()
    cause: tuple[str, str] | None = None
    """Why and where, for what grew."""
    reason: object = None
    """What is equal for causes that differ in words alone."""
    size: str = ""
    figure: str = ""
    """By how much what grew, in words."""
    short: str = ""
    """The number, the cause and the line, in one line."""
    number_first: bool = False
    """Whether the headline is a number, which comes before where it was found."""
    where: str = ""
    more: Sequence[str] = ()
    """Of what grew the place, and further causes with theirs."""
    code: Callable[[int], str] | None = None
    """Returns the code that changed in at most so many lines."""


def message(result: CheckResult, *, verbose: bool = False) -> str:
    """Return what was found, "" for a check that found nothing to say."""
    return _text(_told(result), (), MOST_LINES, verbose=verbose)


def plain_message(result: CheckResult) -> str:
    """Return what was found, in lines as long as they are: for what is shown in no terminal."""
    with layout.lines_of(layout.PLAIN):
        return message(result)


def advice(result: CheckResult, command: str) -> str:
    """Return the advice for a failure; ``command`` accepts the present figures."""
    found = [one for one in result.findings if not isinstance(one, results.AboveCap)]
    first = next(filter(None, (_ADVICE.get(one.outcome) for one in found)), "")
    is_refused = any(one.fails and one.outcome not in _ADVICE for one in found)
    return f"{first}: {printable(command)}" if first and not is_refused else ""


def where_of(key: Key) -> str:
    """Return what was checked, in one line: the name of the check and the device."""
    return f"{key.name}, {key.where}" if key.name not in ("", key.where) else key.where


def together(
    failures: Sequence[Check], said: dict[tuple[str, str], str], *, verbose: bool, most: int
) -> str:
    """Return one message for all devices of a check, the worst first; what is the same for several
    comes once.

    ``said`` has the tests that told a cause in full: others with the same only refer to them.
    """
    told = [one for check in _worst_first(failures) for one in _told(check.result)]
    nodeid, causes = failures[0].nodeid, [one.cause for one in told]
    tests = [said.setdefault(cause, nodeid) if cause and any(cause) else "" for cause in causes]
    elsewhere = tests[0] if all(test not in ("", nodeid) for test in tests) else ""
    what_to_do = dict.fromkeys(check.advice for check in failures if check.advice)
    if elsewhere and not verbose:
        return _shown([*_heads(told), f"The same as in {elsewhere}", *what_to_do])
    return _text(told, [*what_to_do], most, verbose=verbose)


def headlines(failures: Sequence[Check]) -> str:
    """Return the failures of all devices of a check in one line, which may be cut at its end."""
    told = [one for check in _worst_first(failures) for one in _told(check.result)[:1]]
    found = {one.reason: one.short for one in reversed(told) if one.cause}
    texts = [*reversed(found.values()), *_placed(told).values()]
    return printable("; ".join(texts).replace("\n", " "))


def _text(told: Sequence[Told], advice: Iterable[str], most: int, *, verbose: bool) -> str:
    """Return a message of what is told, of the ``most`` lines unless it is to be ``verbose``."""
    whole, each = _code(told, _LINES_OF_CODE[1]), [one.rows for one in told]
    heads = _heads(told, whole)
    if told[1:]:
        each = [replace(one.rows, title=f"{one.rows.title}, {one.where}") for one in told]
    rows = next((one for one in each if one.rows), growth.Section(""))
    sections = [*dict.fromkeys(part for one in told for part in one.sections)]
    figures = _figures(told, every=verbose)
    if verbose:
        shown = [one.text(most=len(one.rows)) for one in each]
        return _shown([*heads, *filter(None, shown), *sections, *figures, *advice])
    if told[1:] and _lines([*heads, *sections, *advice]) > most - _ONE_ROW:
        sections = told[0].sections
    left = most - _lines([*heads, *sections, *advice])
    if rows.rows and left - _lines(figures) < _FEWEST_LINES:
        of = f", {told[0].where}" if told[1:] else ""  # the headlines have those of others
        figures = _figures(told[:1], every=False, of=of, most=_MOST_FIGURES)
    # A row says more than further causes and than where others are, and code more than its place.
    gap, left = 1, left - _lines(figures)
    for gaps, own, others, least in _SHORTER if left < _ONE_ROW else ():
        pairs = zip(told, [own, *[others] * len(told[1:])], strict=True)
        shorter = [
            replace(one, more=one.more[:n], first=one.first if n or not one.cause else "")
            for one, n in pairs
        ]
        bare, gap = [*_heads(shorter), *sections, *figures, *advice], gaps
        left = most - _lines(bare, gap)
        code = _code(told, max(left - _ONE_ROW, _LINES_OF_CODE[0]))
        heads, left = _heads(shorter, code), left - _lines(code, 0)
        if left >= _ONE_ROW and _lines(code, 0) >= min(least, _lines(whole, 0)):
            break
    left = max(left, _ONE_ROW)
    # Without a snapshot the code says more than what is alive, most of which was there before.
    alive = filter(None, [rows.text(lines=left)])
    middle = (
        [*alive, *sections] if figures or any(one.cause for one in told) else [*sections, *alive]
    )
    return _shown([*heads, *middle, *figures, *advice], gap)


def _code(told: Sequence[Told], most: int) -> list[str]:
    """Return the code that changed, the same for all devices, in at most ``most`` lines."""
    return [*filter(None, (one.code(most) for one in told if one.code is not None))][:1]


def _lines(parts: Iterable[str], gap: int = 1) -> int:
    """Return the lines of parts, each of which ``gap`` empty ones end."""
    return sum(part.count("\n") + 1 + gap for part in parts)


def _shown(parts: Iterable[str], gap: int = 1) -> str:
    """Return a message of ``parts``; what they quote moves no cursor and hides nothing."""
    return printable_lines(("\n" * (gap + 1)).join(parts))


def _told(result: CheckResult) -> list[Told]:
    texts = (
        (_TEXTS.get(found.outcome if type(found) is Finding else type(found)), found)
        for found in result.findings
    )
    told = [text(found, result) for text, found in texts if text is not None]
    return [replace(one, where=where_of(result.key)) for one in told]


def _heads(told: Sequence[Told], code: Sequence[str] = ()) -> list[str]:
    """Return the headlines: those of one cause together, which is told once, with the ``code``."""
    coded = next((one for one in told if one.code is not None), None)
    by_cause: dict[object, list[str]] = {}
    placed, said, figures = _placed(told), set[str](), dict[object, str]()
    for one in told:
        if one.cause is None:
            by_cause.setdefault(one.first, [placed[one.first]])
            continue
        known = by_cause.setdefault(one.reason, [])
        known_figure = figures.setdefault(one.reason, one.figure)
        other = one.figure if one.figure != known_figure or not known else ""
        same = layout.joined(layout.joined(one.size, other, separator=" "), one.where)
        same += ": for the same reason" if one.cause[0] and known else ""
        below = *one.more[:1], *(code if one is coded else ()), *one.more[1:]
        news = [part for part in below if part not in said]
        known += [layout.wrapped(same)] if known or not one.first else [one.first, *news]
        said.update(news)
    return ["\n".join(lines) for lines in by_cause.values()]


def _placed(told: Sequence[Told]) -> dict[str, str]:
    """Return headlines without a cause by themselves, with all that they are about."""
    places: dict[str, dict[str, None]] = {}
    for one in told:
        places.setdefault(one.first, {})[one.where] = None
    found = {}
    for one in told:
        if not one.cause:
            where = ", ".join(places[one.first])
            found[one.first] = (
                f"{one.first}, {where}" if one.number_first else f"{where}: {one.first}"
            )
    return found


def _worst_first(failures: Sequence[Check]) -> list[Check]:
    def grown(check: Check) -> int:
        main = main_change([c for c in check.result.changes if c.verdict is Verdict.GREW])
        return _growth_of(main) if main is not None else 0

    return sorted(failures, key=lambda check: -grown(check))


def _figures(
    told: Sequence[Told], *, every: bool, of: str = "", most: int | None = None
) -> list[str]:
    """Return the figures beyond their tolerance in one table, and the tolerance once; of each at
    ``most`` so many, which changed most.
    """
    tables: dict[str, Sequence[Change]] = {}
    rules: dict[str, dict[str, None]] = {}
    for one in told:
        phases = {(c.before, c.now) for c in one.changes if c.figure in PHASE_PEAKS}
        least = max((_growth_of(c) for c in one.changes), default=0) // _WORTH_A_FIGURE
        # The overall peak is most often that of a phase which is there too.
        changes = [c for c in one.changes if c.figure != PEAK or (c.before, c.now) not in phases]
        changes = [c for c in changes if _growth_of(c) >= least]
        # Among them is the one that the headline names.
        order = sorted(changes, key=lambda c: (label(c.figure) != one.figure, -_growth_of(c)))
        changes = [c for c in changes if c in order[:most]]
        if one.changes:
            tables[one.where] = one.all_changes if every else changes
        for change in filter(lambda change: change.rule, changes):
            rules.setdefault(change.rule, {})[label(change.figure)] = None
    if not tables:
        return []
    rows = layout.comparison_table(tables)
    if not rules:
        return [rows]
    (rule, _), *others = sorted(rules.items(), key=lambda one: -len(one[1]))
    source = rule.partition(",")[1:]
    also = "".join(
        f"; {', '.join(names)}: {other.removesuffix(''.join(source))}" for other, names in others
    )
    which = f"Largest figures{of}; tolerance" if most else "Figures beyond their tolerance of"
    return [layout.wrapped(f"{which} {rule}{also}") + f"\n{rows}"]


def _growth_of(change: Change) -> int:
    return abs((change.now or 0) - (change.before or 0))


def _changed(found: results.Changed, result: CheckResult) -> Told:
    comparison, on = found.comparison, found.measured_on
    shrank = found.outcome is Outcome.SHRANK
    changed = comparison.having(Verdict.SHRANK if shrank else Verdict.GREW)
    if changed and not shrank and not on:
        return _grew(found, result)
    missing = () if shrank else comparison.having(Verdict.NOT_RUN)
    unjudged = () if shrank or on else comparison.unjudged
    parts, measured = [], f"measured on {on}" if on else ""
    if (most := main_change(changed)) is not None:
        by = format_change(most.before, most.now).lstrip("+-")
        what = f"{title(most.figure)} {'shrank' if shrank else 'grew'} by {by}"
        parts += [layout.joined(measured, f"{what}, beyond its tolerance of {most.rule}")]
    parts += _not_run(missing, measured)
    parts += [
        f"not checked: this run has {_one(title(change.figure))}, and the snapshot has none"
        for change in unjudged
    ]
    first, *others = parts
    others += _circumstances(comparison, result.trace)
    every = [one for one in comparison.told if one in (*changed, *missing, *unjudged)]
    return Told(first, others, changes=every, all_changes=comparison.told)


def _grew(found: results.Changed, result: CheckResult) -> Told:
    """Return the message of a growth: the number and the cause, the place, what changed."""
    worst = found.comparison.having(Verdict.GREW)
    change = growth.leading_change(worst, found.diagnosis)
    assert change is not None
    told = _explained(
        result,
        found.diagnosis,
        found.comparison,
        (format_change(change.before, change.now), label(change.figure)),
        f"{growth.signed((change.now or 0) - (change.before or 0))} {label(change.figure)}",
    )
    changes = [one for one in found.comparison.told if one in worst]
    return replace(told, changes=changes, all_changes=found.comparison.told)


def _explained(
    result: CheckResult,
    known: Diagnosis | None,
    comparison: Comparison,
    number: tuple[str, str],
    shorter: str,
) -> Told:
    """Return a message that begins with a number and its figure in words, and says why."""
    from pytest_torchmem.diagnosis.diagnose import Diagnosis
    from pytest_torchmem.diagnosis.difference import MomentDifference

    diagnosis = known or Diagnosis(MomentDifference("", 0, 0))
    why, place = growth.why(diagnosis), growth.place(diagnosis)
    beside = growth.told(diagnosis)[1:]
    code = next((one for one in beside if one.why == growth.CODE), None)
    what = f"{layout.joined(*number, separator=' ')}, {where_of(result.key)}"
    headline = layout.wrapped(layout.joined(what, why, separator=": "), first=True)
    others = _not_run(comparison.having(Verdict.NOT_RUN))
    others += _circumstances(comparison, result.trace, diagnosis)
    line = growth.line_of(diagnosis)
    return Told(
        headline,
        [*map(layout.wrapped, others)],
        growth.section(diagnosis),
        cause=growth.same_cause(why, place),
        reason=(diagnosis.causes[0].rule, *(sorted(diagnosis.changed) or diagnosis.place))
        if diagnosis.causes
        else why or place,
        size=number[0],
        figure=number[1],
        short=layout.joined(shorter, layout.joined(why, line), separator=": "),
        more=[
            *filter(None, [layout.wrapped(place)]),
            *(growth.also(one) for one in beside if one is not code),
        ],
        code=partial(growth.lines_of_code, growth.CODE.capitalize(), diagnosis) if code else None,
    )


def _not_run(missing: Sequence[Change], measured: str = "") -> list[str]:
    known = [(layout.joined(_one(title(c.figure)), measured, separator=" "), c) for c in missing]
    return [_never_ran(f"the snapshot has {one}", change.figure) for one, change in known]


def _above_cap(found: results.AboveCap, result: CheckResult) -> Told:
    first = f"grew by more than --torchmem-update-max={found.cap} accepts"
    return Told(first, changes=[replace(change, rule="") for change in found.changes])


def _missing(found: results.Missing, result: CheckResult) -> Told:
    parts = []
    if found.renamed is not None:
        parts.append(
            f"That file has an entry for {printable(found.renamed.test)}, which no longer exists, "
            "with the same workload. If you renamed the test, update the whole file: this moves "
            "the entry and keeps your notes in it"
        )
    if found.moved_from:
        parts.append(
            f"{found.moved_from} has the same check, and its test module no longer exists. If you "
            "renamed the module, an update moves its entries and keeps your notes in them"
        )
    return Told(f"there is no snapshot of this check in {found.file}", parts)


def _unknown_workspace(found: Finding, result: CheckResult) -> Told:
    lines = "\n".join(f"  {warning}" for warning in result.trace.warnings)
    return Told("figures leave something out or assume it (--torchmem-strict)", [lines])


def _does_not_fit(found: results.DoesNotFit, result: CheckResult) -> Told:
    error, contents, gpu = found.error, found.contents, found.error.gpu
    first = f"does not fit on {gpu.name} ({format_size(gpu.memory)}): {error.request}"
    if contents is not None:
        return _too_much(first, contents, result)
    alive = [f"Largest allocations at that point\n{layout.allocation_table(error.live)}"]
    return Told(first, alive if error.live else ["No memory was allocated at that point"])


def _alive(contents: PeakContents) -> growth.Section:
    """Return what is alive at a peak that is too high, and how much of it is too much."""
    head = f"Alive {growth.at(contents.figure)}: {format_size(contents.nbytes)}"
    head += f", of which {format_size(contents.excess)} has to go" if contents.excess > 0 else ""
    found = contents.diagnosis.difference.rows
    rest = contents.nbytes - sum(row.change for row in found)
    why = "reserved by the allocator and in no tensor"
    rows = sorted(growth.rows_of(found), key=lambda row: Role.LIBRARY in row[1])
    return growth.Section(head, tuple(rows), rest, why, are_changes=False)


_MOST_MODULES = 3


def _source(place: str) -> str:
    """Return a line of the program with its text, "" where there is none."""
    file, _, number = place.rpartition(":")
    text = getline(os.path.abspath(file), int(number)) if number.isdecimal() else ""
    return f"{place}: {text.strip()}" if text.strip() else ""


def _origins(contents: PeakContents) -> list[str]:
    """Return what leads to the largest that is alive, the code that changed last or else the lines
    that lead there, sums by module, and what would help.
    """
    diagnosis, parts = contents.diagnosis, dict[str, int]()
    where = layout.joined(growth.place(diagnosis), contents.holder, separator=", kept by ")
    lines = [*dict.fromkeys((diagnosis.place[1], *diagnosis.leads.get(diagnosis.place, ())))]
    for row in diagnosis.difference.rows:
        part = ".".join(row.what.module.split(".")[:2])
        parts[part] = parts.get(part, 0) + row.change
    most = sorted(parts.items(), key=lambda one: -one[1])
    sizes = [f"{part} {format_size(nbytes)}" for part, nbytes in most if part]
    by_part = f"By module: {listed(sizes, _MOST_MODULES)}" if sizes else ""
    outside = f"outside of modules {format_size(parts[''])}" if by_part and "" in parts else ""
    by_part = layout.joined(by_part, outside, separator="; ")
    leading, less = where and f"{_leading(diagnosis)}: {where}", _less(contents)
    said, by_parts = (
        [layout.wrapped(one) for one in some if one]
        for some in ((contents.called, leading), (by_part,))
    )
    room = _LINES_OF_ORIGINS - _lines(["\n".join([*said, *by_parts]), *less])
    code = growth.lines_of_code("Code that changed last, by git", diagnosis, max(room, 2))
    sources = [] if code else filter(None, map(_source, lines))
    said += filter(None, [code, *(layout.wrapped(one, "      ", start="  ") for one in sources)])
    found = "\n".join([*said, *by_parts])
    return [*filter(None, [found]), *less]


def _leading(diagnosis: Diagnosis) -> str:
    """Return in words why the row that leads does."""
    rows, row = diagnosis.difference.rows, diagnosis.leading_row
    if row is None or row.change == max(one.change for one in rows):
        return "Among the largest"
    there = sum(one.change for one in rows if one.what.line == row.what.line)
    return f"{format_size(there)} at a line that changed"


def _less(contents: PeakContents) -> list[str]:
    """Return what would lower a peak, as one sentence."""
    less = contents.less
    if less is None or less.saved * _WORTH_A_SENTENCE < contents.excess:
        return []
    percent = format_percent(less.flops, less.of).lstrip("+") if less.of else ""
    cost = f" for {percent} more FLOPs" if less.flops > 0 and percent else ""
    enough = "which is enough" if less.saved >= contents.excess else "which alone is not enough"
    what = f"What would help: {less.change.partition(': ')[0]}. It saves {format_size(less.saved)}"
    return [layout.wrapped(f"{what}{cost}, {enough}; torchmem advise tries more changes")]


def _nothing_allocated(found: Finding, result: CheckResult) -> Told:
    if result.key.device == "cuda" and result.key.rank:
        return Told(
            f"not checked: nothing was allocated on the GPU of rank {result.key.rank}, which is "
            'that of its LOCAL_RANK. Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) '
            "first, and move there what fixtures put on cuda:0"
        )
    told = (
        f"not checked: nothing was allocated on {result.key.device}. Move the model and its inputs "
        'there, or name the right device, such as device="cpu", in the marker or the check'
    )
    if result.key.device == "cuda":
        told += (
            ". What chose its device while a module was imported found no GPU: with "
            "--torchmem-fake-cuda there is one"
        )
    return Told(told)


def _grows_faster(found: results.GrowsFaster, result: CheckResult) -> Told:
    grows, allowed = f"{word_of(found.power)} in {found.bound.size}", word_of(found.bound.power)
    largest = layout.allocation_table(found.fastest)
    return Told(
        f"the peak is {grows}, the budget allows {allowed}: {found.polynomial} bytes",
        [f"What is {grows} at that peak, at the largest size traced\n{largest}"],
    )


def _over_budget(found: results.OverBudget, result: CheckResult) -> Told:
    how = f", measured on {found.measured_on}" if found.measured_on else ""
    first, contents = "; ".join(map(_overrun, found.overruns)) + how, found.contents
    number_first = found.overruns[0].value is not None
    if contents is None:
        return Told(first, number_first=number_first)
    return replace(_too_much(first, contents, result), number_first=number_first)


def _too_much(first: str, contents: PeakContents, result: CheckResult) -> Told:
    """Return what a peak over a limit has: what came since the snapshot, if that kept to it."""
    if contents.since is None:
        return Told(first, _origins(contents), _alive(contents))
    told = _explained(result, contents.diagnosis, contents.since, (first, ""), first)
    return replace(told, sections=[*told.sections, *_less(contents)])


def _overrun(overrun: results.Overrun) -> str:
    limit, name = overrun.limit, title(overrun.limit.figure)
    if overrun.value is None:
        return _never_ran(f"there is a limit for the {name}", limit.figure)
    by = format_change(limit.nbytes, overrun.value).lstrip("+")
    limited = limit.text if "b" in limit.text.lower() else format_size(limit.nbytes)
    return f"{format_size(overrun.value)} {name} exceeds the budget of {limited} by {by}"


def _estimate_off(found: results.EstimateOff, result: CheckResult) -> Told:
    run, measured = found.run, found.run.measurement
    worst, figures, estimate = found.peaks[0], measured.figures, measured.estimate
    off = format_percent(estimate[worst] - figures[worst], figures[worst])
    headline = (
        f"trace and {measured.gpu} disagree: {title(worst)} {format_size(estimate[worst])} "
        f"traced, {format_size(figures[worst])} measured ({off}), outside "
        f"--torchmem-measure-tolerance={found.most}"
    )
    rows = [
        (
            title(name),
            format_size(estimate.get(name)),
            format_size(figures[name]),
            format_change(figures[name], estimate.get(name)),
            "too much" if name in found.peaks else "",
        )
        for name in MEASURED
        if name in figures
    ]
    parts = [layout.table(rows, ("", "traced", "measured", "difference", ""))]
    if run.only_measured:
        shown, more = run.only_measured[:_MOST_SIZES], run.only_measured[_MOST_SIZES:]
        sizes = [
            f"  {format_size(nbytes)}" + (f", {number} times" if number > 1 else "")
            for nbytes, number in shown
        ]
        rest = sum(nbytes * number for nbytes, number in more)
        sizes += [f"  {format_size(rest)} in other sizes"] if rest else []
        parts.append("Alive at the highest peak only on the GPU\n" + "\n".join(sizes))
    if run.only_traced:
        alive = layout.allocation_table(run.only_traced)
        parts.append(f"Alive at the highest peak only in the trace\n{alive}")
    if run.unknown_workspaces:
        names = ", ".join(run.unknown_workspaces)
        parts.append(f"The trace does not know the workspace of: {names}")
    return Told(headline, parts)


def _leaks(found: results.Leaks, result: CheckResult) -> Told:
    from pytest_torchmem.diagnosis.diagnose import FEWEST, MANY, Diagnosis

    steps, where = found.growth, where_of(result.key)
    if steps.difference is None:
        return Told(
            f"not checked: growth={found.allowed} needs at least {FEWEST} steps, and this run made "
            f"{steps.steps} ({steps.counted}). A step ends with an optimizer's step, a backward or "
            "another call of the same module. Loop in the test, or let the check repeat a function "
            "with torchmem.check(fn, steps=4)"
        )
    diagnosis = found.diagnosis or Diagnosis(steps.difference)
    of_host = " of host memory" if found.on_host else ""
    place, number = growth.place(diagnosis), f"{growth.signed(steps.most)}{of_host}"
    why = f"{found.holder} holds it, " if found.holder else ""
    why = f"{why}growth={found.allowed} allows no more"
    which = "each" if min(steps.grown) == steps.most else "a"
    if which == "a" and steps.steps < MANY:
        why += f"; of {MANY} steps or more only the later half counts"
    headline = f"{number} alive after a step and not before it, {where}: {why}"
    stays = growth.Section("What stays after a step", growth.rows_of(diagnosis.difference.rows))
    return Told(
        layout.wrapped(headline, first=True),
        more=[layout.wrapped(place)],
        code=partial(growth.lines_of_code, "Code that changed", diagnosis),
        rows=stays,
        cause=(headline, place),
        size=headline,
        short=f"{number} after {which} step: {layout.joined(why, growth.line_of(diagnosis))}",
    )


def _never_ran(what: str, figure: str) -> str:
    return f"not checked: {what}, but this run never reached {_one(phase_of(figure))}"


def _one(noun: str) -> str:
    return noun if noun.startswith("memory") else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _circumstances(
    comparison: Comparison, trace: TraceResult, diagnosis: Diagnosis | None = None
) -> Iterable[str]:
    """Return what else is different and may be the cause: the workload, torch, cuDNN."""
    inputs = diagnosis.inputs if diagnosis is not None else ()
    causes = diagnosis.causes if diagnosis is not None else ()
    code = diagnosis.changed if diagnosis is not None else ()
    said = " ".join(cause.text for cause in causes)
    told = any(cause.rule == "inputs" for cause in causes)
    is_specific = any(cause.is_specific for cause in causes[:1])
    alike: dict[tuple[str, str], list[str]] = {}
    for name, *change in inputs:
        if not told and name not in said:
            alike.setdefault((change[0], change[1]), []).append(name)
    changed = "; ".join(_input(names, *change) for change, names in alike.items())
    if comparison.workload_changed and changed and not code:
        yield f"Inputs differ from the snapshot's: {changed}"
    elif comparison.workload_changed and not inputs and not is_specific and not code:
        yield (
            "The workload differs from the snapshot's: the inputs, other tensors that are made "
            "before the step, or the sizes of the parameters"
        )
    if trace.guessed:
        yield (
            "Unknown values decided sizes, so the figures are upper bounds. values='real' computes "
            "the values, and exact figures"
        )
    if comparison.torch_before != comparison.torch_now:
        yield (
            f"The snapshot comes from torch {printable(comparison.torch_before)} and this run uses "
            f"torch {comparison.torch_now}, which may be the cause"
        )
    if trace.cudnn and trace.cudnn_before and trace.cudnn != trace.cudnn_before:
        yield (
            f"The stored workspaces were told by cuDNN {trace.cudnn_before}, and those of this run "
            f"by cuDNN {trace.cudnn}, which may be the cause"
        )


def _input(names: Sequence[str], before: str, now: str) -> str:
    name = first_of(names)
    if not before or not now:
        are = "are" if names[1:] else "is"
        return f"{name} {now or before} {are} {'new' if now else 'gone'}"
    return f"{name} {before} → {now}"


_TEXTS: Mapping[type[Finding] | Outcome, Callable[[Any, CheckResult], Told]] = {
    results.AboveCap: _above_cap,
    results.Changed: _changed,
    results.DoesNotFit: _does_not_fit,
    results.EstimateOff: _estimate_off,
    results.GrowsFaster: _grows_faster,
    results.Missing: _missing,
    results.OverBudget: _over_budget,
    results.Leaks: _leaks,
    Outcome.NOT_CHECKED: _nothing_allocated,
    Outcome.UNKNOWN_WORKSPACE: _unknown_workspace,
}
"""What makes the text of a finding, by its class or, where that is ``Finding``, its outcome."""
_ADVICE = {
    Outcome.GREW: "If this is intended",
    Outcome.MISSING: "To create it",
    Outcome.SHRANK: "To lock it in",
    Outcome.MEASURED_GREW: "",
}
"""How an update is named by the outcomes that it accepts."""
