"""The messages of checks: what, where, by how much, what grew, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_torchmem.checks.findings import (
    AboveCap,
    Changed,
    DoesNotFit,
    EstimateOff,
    Finding,
    GrowsFaster,
    Leaks,
    Missing,
    Outcome,
    OverBudget,
)
from pytest_torchmem.checks.gpu import RealRun
from pytest_torchmem.checks.growth import word_of
from pytest_torchmem.diagnosis.diagnose import Diagnosis
from pytest_torchmem.diagnosis.difference import MomentDifference
from pytest_torchmem.diagnosis.steps import FEWEST
from pytest_torchmem.figures import MEASURED, label, phase_of, title
from pytest_torchmem.printable import printable, printable_lines
from pytest_torchmem.reports import growth
from pytest_torchmem.reports.layout import joined, wrapped
from pytest_torchmem.reports.tables import allocation_table, comparison_table, table
from pytest_torchmem.snapshots.compare import Change, Comparison, Verdict, main_change
from pytest_torchmem.units import format_change, format_percent, format_size, format_step

if TYPE_CHECKING:
    from pytest_torchmem.checks.limits import Overrun
    from pytest_torchmem.checks.result import CheckResult, TraceResult
    from pytest_torchmem.profile.timeline import Allocation
    from pytest_torchmem.reports.summary import Check
    from pytest_torchmem.snapshots.format import Key

_MOST_SIZES = 5
_MOST_LINES = 26
"""Before the tables: 25, and the empty one that ends them."""

Parts = list[str]
"""A headline, and the sections below it."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of one finding: at first in short, and the tables that come last."""

    parts: Parts
    details: Parts = field(default_factory=list)
    headline: str = ""
    cause: tuple[str, str] | None = None
    """Why and where, for what grew."""
    size: str = ""
    """By how much, and on which device."""
    where: str = ""
    """What was checked, of what has no cause; ``first`` is then the headline without it."""
    first: str = ""
    number_first: bool = False
    diagnosis: Diagnosis | None = None
    """Of what grew: its rows are among ``parts``."""

    def again(self, first: Told) -> Parts:
        """Return what is left to say where ``first`` has been told."""
        if self.cause is None:
            return self.parts
        why = self.cause[0]
        if self.cause == first.cause or (why and first.cause and why == first.cause[0]):
            return [wrapped(f"{self.size}: for the same reason" if why else self.size)]
        return self.parts[:1]


def message(result: CheckResult) -> str:
    """Return what was found, "" for a check that found nothing to say."""
    told = [one for found in result.findings if (one := _told(found, result)) is not None]
    parts = _short([part for one in told for part in one.parts], told)
    return _shown([*parts, *(part for one in told for part in one.details)])


def _short(parts: Parts, told: Sequence[Told]) -> Parts:
    """Return what stands before the tables, with fewer rows where these make it too long."""
    diagnosis = next((one.diagnosis for one in told if one.diagnosis is not None), None)
    if diagnosis is None or (section := growth.section(diagnosis)) not in parts:
        return parts
    most = growth.MOST_ROWS
    while most > 1 and sum(part.count("\n") + 2 for part in parts) > _MOST_LINES:
        most -= 1
        fewer = growth.section(diagnosis, most)
        parts = [fewer if part == section else part for part in parts]
        section = fewer
    return parts


def _shown(parts: Iterable[str]) -> str:
    """Return a message of ``parts``; what they quote moves no cursor and hides nothing."""
    return printable_lines("\n\n".join(parts))


def _told(found: Finding, result: CheckResult) -> Told | None:
    text = _TEXTS.get(found.outcome if type(found) is Finding else type(found))
    if text is None:
        return None
    told = text(found, result)
    if isinstance(told, Told):
        return told
    first, *others = told
    where, number_first = where_of(result.key), _begins_with_number(found)
    parts = [_placed(where, first, number_first), *others]
    return Told(parts, where=where, first=first, number_first=number_first)


def _begins_with_number(found: Finding) -> bool:
    """Tell whether the headline of a finding is a number, which comes before where it was found."""
    return isinstance(found, OverBudget) and found.overruns[0].value is not None


def _placed(where: str, first: str, number_first: bool) -> str:
    return f"{first}, {where}" if number_first else f"{where}: {first}"


def advice(result: CheckResult, command: str) -> str:
    """Return what to do about it with ``command``, which accepts what the test does now."""
    asked = (_ADVICE.get(one.outcome) for one in result.findings if not isinstance(one, AboveCap))
    first = next(filter(None, asked), "")
    return f"{first}: {printable(command)}" if first else ""


def where_of(key: Key) -> str:
    """Return what was checked, in one line: the name of the check and the device."""
    return f"{key.name}, {key.where}" if key.name else key.where


def together(failures: Sequence[Check], said: dict[tuple[str, str], str] | None = None) -> str:
    """Return one message for all devices of a check, the worst first; what is the same for several
    comes once.

    ``said`` has the tests that told a cause in full: others with the same only refer to them.
    """
    told = [one for check in _worst_first(failures) for one in _all_told(check)]
    elsewhere = _told_by(told, failures[0].nodeid, {} if said is None else said)
    if elsewhere:
        heads = dict.fromkeys(one.parts[0] for one in told)
        advice = dict.fromkeys(check.advice for check in failures if check.advice)
        return "\n\n".join([*heads, f"The same as in {elsewhere}", *advice])
    parts, details = told[0].parts[:], [part for one in told for part in one.details]
    for one in told[1:]:
        parts += one.again(told[0]) if told[0].cause else one.parts
    parts = _merged(told) if not any(one.cause for one in told) else parts
    what_to_do = dict.fromkeys(check.advice for check in failures if check.advice)
    return _shown([*_short([*dict.fromkeys(parts), *what_to_do], told[:1]), *details])


def _told_by(told: Sequence[Told], nodeid: str, said: dict[tuple[str, str], str]) -> str:
    """Return the test that told the causes of ``told`` in full, "" where one of them is new."""
    causes = [one.cause for one in told]
    tests = [said.setdefault(cause, nodeid) if cause and any(cause) else "" for cause in causes]
    return tests[0] if all(test not in ("", nodeid) for test in tests) else ""


def headlines(failures: Sequence[Check]) -> str:
    """Return the first lines of the messages of all devices of a check as one line."""
    told = [one for check in _worst_first(failures) for one in _all_told(check)[:1]]
    if any(one.cause for one in told):
        return printable("; ".join(dict.fromkeys(one.headline for one in told)))
    said: dict[tuple[str, bool], list[str]] = {}
    for one in told:
        said.setdefault((one.first, one.number_first), []).append(one.where)
    texts = (_placed(", ".join(where), *first) for first, where in said.items())
    return printable("; ".join(texts).replace("\n", " "))


def _all_told(check: Check) -> list[Told]:
    found = (_told(finding, check.result) for finding in check.result.findings)
    return [one for one in found if one is not None]


def _worst_first(failures: Sequence[Check]) -> list[Check]:
    def grown(check: Check) -> int:
        broken = [c for c in check.result.changes if c.verdict is Verdict.GREW]
        main = main_change(broken)
        return (main.now or 0) - (main.before or 0) if main is not None else 0

    return sorted(failures, key=lambda check: -grown(check))


def _merged(told: Sequence[Told]) -> list[str]:
    """Return the parts of several devices' messages, those that say the same once."""
    said: dict[tuple[str, bool, tuple[str, ...]], list[str]] = {}
    for one in told:
        said.setdefault((one.first, one.number_first, tuple(one.parts[1:])), []).append(one.where)
    messages = [
        [_placed(", ".join(where), first, number_first), *others]
        for (first, number_first, others), where in said.items()
    ]
    shared = [part for part in messages[0] if all(part in message for message in messages)]
    return [part for message in messages for part in message if part not in shared] + shared


def _changed(found: Changed, result: CheckResult) -> Parts | Told:
    comparison, on = found.comparison, found.measured_on
    if found.outcome is Outcome.GREW and comparison.having(Verdict.GREW):
        return _grew(found, result)
    verb = "shrank" if found.outcome is Outcome.SHRANK else "grew"
    worst = comparison.having(Verdict.SHRANK if verb == "shrank" else Verdict.GREW)
    missing = comparison.having(Verdict.NOT_RUN) if verb == "grew" else ()
    measured = f" measured on {on}" if on else ""
    unjudged = comparison.unjudged if verb == "grew" and not on else ()
    parts = _not_run(missing, measured)
    parts += [
        f"not checked: this run has {_one(title(change.figure))}, and the snapshot has none"
        for change in unjudged
    ]
    if worst:
        parts.insert(0, f"{f'measured on {on}, ' if on else ''}{_step(worst, verb)}")
    parts.insert(1, comparison_table(comparison))
    return [*parts, *_tolerances(comparison), *_circumstances(comparison, result.trace)]


def _grew(found: Changed, result: CheckResult) -> Told:
    """Return the message of a growth: the number and the cause, the place, what changed."""
    comparison, where = found.comparison, where_of(result.key)
    diagnosis = found.diagnosis or Diagnosis(MomentDifference("", 0, 0))
    worst = comparison.having(Verdict.GREW)
    change = growth.leading_change(worst, found.diagnosis)
    assert change is not None
    size = f"{format_change(change.before, change.now)} {label(change.figure)}, {where}"
    why, place = growth.why(diagnosis), growth.place(diagnosis)
    headline = joined(size, why, separator=": ")
    circumstances = [wrapped(text) for text in _circumstances(comparison, result.trace, diagnosis)]
    also = [*growth.others(diagnosis.causes[:3])]
    missing = _not_run(comparison.having(Verdict.NOT_RUN), "")
    parts = ["\n".join(filter(None, (wrapped(headline, first=True), wrapped(place)))), *also]
    parts += [growth.section(diagnosis), *missing, *circumstances]
    details = [f"{where}\n{comparison_table(comparison)}", *_tolerances(comparison)]
    said, shown = [*filter(None, parts)], found.diagnosis
    return Told(said, details, headline, (why, place), size, diagnosis=shown)


def _not_run(missing: Sequence[Change], measured: str) -> Parts:
    return [
        _never_ran(f"the snapshot has {_one(title(change.figure))}{measured}", change.figure)
        for change in missing
    ]


def _tolerances(comparison: Comparison) -> Parts:
    by_rule: dict[str, list[str]] = {}
    for change in comparison.told:
        if change.verdict is Verdict.GREW:
            by_rule.setdefault(change.rule, []).append(label(change.figure))
    if not by_rule:
        return []
    lines = (wrapped(f"  {', '.join(names)}: {rule}", "    ") for rule, names in by_rule.items())
    return ["Exceeded tolerances\n" + "\n".join(lines)]


def _above_cap(found: AboveCap, result: CheckResult) -> Parts:
    rows = [(title(c.figure), *format_step(c.before, c.now)) for c in found.changes]
    headline = f"grew by more than --torchmem-update-max={found.cap} accepts"
    return [headline, table(rows, ("", "snapshot", "now", "change"))]


def _missing(found: Missing, result: CheckResult) -> Parts:
    parts = [f"there is no snapshot of this check in {found.file}"]
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
    return parts


def _unknown_workspace(found: Finding, result: CheckResult) -> Parts:
    lines = "\n".join(f"  {warning}" for warning in result.trace.warnings)
    return ["the profile contains unknown workspace (--torchmem-strict)", lines]


def _does_not_fit(found: DoesNotFit, result: CheckResult) -> Parts:
    error = found.error
    gpu = error.gpu
    headline = f"does not fit on {gpu.name} ({format_size(gpu.memory)}): {error.request}"
    torch_says = str(error).partition("\n")[0].partition(" If reserved but")[0]
    alive = (
        "Largest allocations at that point\n" + allocation_table(error.live)
        if error.live
        else "No memory was allocated at that point"
    )
    return [headline, f"PyTorch's error\n  {torch_says}", alive]


def _nothing_allocated(found: Finding, result: CheckResult) -> Parts:
    if result.key.device == "cuda" and result.key.rank:
        return [
            f"not checked: nothing was allocated on the GPU of rank {result.key.rank}, which is "
            'that of its LOCAL_RANK. Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) '
            "first, and move there what fixtures put on cuda:0"
        ]
    told = (
        f"not checked: nothing was allocated on {result.key.device}. Move the model and its inputs "
        'there, or name the right device, such as device="cpu", in the marker or the check'
    )
    if result.key.device == "cuda":
        told += (
            ". What chose its device while a module was imported found no GPU: with "
            "--torchmem-fake-cuda there is one"
        )
    return [told]


def _grows_faster(found: GrowsFaster, result: CheckResult) -> Parts:
    size = found.bound.size
    return [
        f"the peak is {word_of(found.power)} in {size}, the budget allows {found.bound.word}: "
        f"{found.polynomial} bytes",
        f"What is {word_of(found.power)} in {size} at that peak, at the largest size traced\n"
        f"{allocation_table(found.fastest)}",
    ]


def _over_budget(found: OverBudget, result: CheckResult) -> Parts:
    how = f", measured on {found.measured_on}" if found.measured_on else ""
    headline = "; ".join(map(_overrun, found.overruns)) + how
    allocations = _at_peak(found.overruns, found.contents)
    largest = [f"Largest allocations at that peak\n{allocation_table(allocations)}"]
    return [headline, *(largest if allocations else ())]


def _overrun(overrun: Overrun) -> str:
    limit, name = overrun.limit, title(overrun.limit.figure)
    if overrun.value is None:
        return _never_ran(f"there is a limit for the {name}", limit.figure)
    by = format_change(limit.nbytes, overrun.value).lstrip("+")
    limited = limit.text if "b" in limit.text.lower() else format_size(limit.nbytes)
    return f"{format_size(overrun.value)} {name} exceeds the budget of {limited} by {by}"


def _at_peak(
    over: Sequence[Overrun], contents: Mapping[str, Sequence[Allocation]]
) -> Sequence[Allocation]:
    for overrun in over:
        if overrun.value is not None and overrun.limit.figure in contents:
            return contents[overrun.limit.figure]
    return max(contents.values(), key=lambda found: sum(a.nbytes for a in found), default=())


def _estimate_off(found: EstimateOff, result: CheckResult) -> Parts:
    measured = found.run.measurement
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
    parts = [headline, table(rows, ("", "traced", "measured", "difference", ""))]
    parts += _only_on_one_side(found.run)
    if found.run.unknown_workspaces:
        names = ", ".join(found.run.unknown_workspaces)
        parts.append(f"The trace does not include the workspace of: {names}")
    return parts


def _only_on_one_side(run: RealRun) -> Iterable[str]:
    if run.only_measured:
        shown, more = run.only_measured[:_MOST_SIZES], run.only_measured[_MOST_SIZES:]
        sizes = [
            f"  {format_size(nbytes)}" + (f", {number} times" if number > 1 else "")
            for nbytes, number in shown
        ]
        rest = sum(nbytes * number for nbytes, number in more)
        sizes += [f"  {format_size(rest)} in other sizes"] if rest else []
        yield "Alive at the highest peak only on the GPU\n" + "\n".join(sizes)
    if run.only_traced:
        alive = allocation_table(run.only_traced)
        yield f"Alive at the highest peak only in the trace\n{alive}"


def _leaks(found: Leaks, result: CheckResult) -> Parts | Told:
    steps, where = found.growth, where_of(result.key)
    if steps.difference is None:
        return [
            f"not checked: growth={found.allowed} needs at least {FEWEST} steps, and this run made "
            f"{steps.steps} ({steps.counted}). A step ends with an optimizer's step, a backward or "
            "another call of the same module. Loop in the test, or let the check repeat a function "
            "with torchmem.check(fn, steps=4)"
        ]
    diagnosis = Diagnosis(steps.difference)
    place = growth.place(diagnosis)
    headline = (
        f"{growth.signed(steps.most)} alive after a step and not before it, {where}: "
        + (f"{found.holder} holds it, " if found.holder else "")
        + f"growth={found.allowed} allows no more"
    )
    rows = "\n".join(
        line for row in diagnosis.difference.rows[:_MOST_SIZES] for line in growth.row_lines(row)
    )
    parts = [
        f"{wrapped(headline, first=True)}\n{wrapped(place)}",
        f"What stays after a step\n{rows}",
    ]
    return Told(parts, headline=headline, cause=(headline, place), size=headline)


def _step(changes: Sequence[Change], verb: str) -> str:
    """Return the headline for the change that stands for all ``changes``."""
    most = main_change(changes)
    assert most is not None
    by = format_change(most.before, most.now).lstrip("+-")
    return f"{title(most.figure)} {verb} by {by}, beyond its tolerance of {most.rule}"


def _never_ran(what: str, figure: str) -> str:
    return f"not checked: {what}, but this run never reached {_one(phase_of(figure))}"


def _one(noun: str) -> str:
    return noun if noun.startswith("memory") else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _circumstances(
    comparison: Comparison, trace: TraceResult, diagnosis: Diagnosis | None = None
) -> Iterable[str]:
    """Return what else is different and may be the cause: the workload, torch, cuDNN."""
    inputs = diagnosis.inputs if diagnosis is not None else ()
    if comparison.workload_changed and inputs:
        changed = "; ".join(_input(*one) for one in inputs)
        yield f"The workload differs from the snapshot's: {changed}"
    elif comparison.workload_changed and not _is_told(diagnosis):
        yield (
            "The workload differs from the snapshot's: the shapes or dtypes of the inputs, or the "
            "sizes of the parameters, have changed"
        )
    if comparison.torch_changed:
        yield (
            f"The snapshot comes from torch {printable(comparison.torch_before)} and this run uses "
            f"torch {comparison.torch_now}, which may be the cause"
        )
    if trace.cudnn and trace.cudnn_before and trace.cudnn != trace.cudnn_before:
        yield (
            f"The stored workspaces were told by cuDNN {trace.cudnn_before}, and those of this run "
            f"by cuDNN {trace.cudnn}, which may be the cause"
        )


def _is_told(diagnosis: Diagnosis | None) -> bool:
    """Tell whether a cause says what of the workload is another."""
    return any(cause.is_specific for cause in (diagnosis.causes[:1] if diagnosis else ()))


def _input(name: str, before: str, now: str) -> str:
    if not before or not now:
        return f"{name} {now or before} is {'new' if now else 'gone'}"
    return f"{name} {before} → {now}"


_TEXTS: Mapping[type[Finding] | Outcome, Callable[[Any, CheckResult], Parts | Told]] = {
    AboveCap: _above_cap,
    Changed: _changed,
    DoesNotFit: _does_not_fit,
    EstimateOff: _estimate_off,
    GrowsFaster: _grows_faster,
    Missing: _missing,
    OverBudget: _over_budget,
    Leaks: _leaks,
    Outcome.NOT_CHECKED: _nothing_allocated,
    Outcome.UNKNOWN_WORKSPACE: _unknown_workspace,
}
"""What makes the text of a finding, by its class or, where that is ``Finding``, its outcome."""
_ADVICE = {
    Outcome.GREW: "If this is intended",
    Outcome.MISSING: "To create it",
    Outcome.SHRANK: "To lock it in",
}
