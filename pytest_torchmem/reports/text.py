"""The messages of checks: what, where, by how much, what grew, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_torchmem.checks.findings import (
    AboveCap,
    Changed,
    DoesNotFit,
    EstimateOff,
    Finding,
    GrowsFaster,
    Missing,
    Outcome,
    OverBudget,
)
from pytest_torchmem.checks.gpu import RealRun
from pytest_torchmem.checks.growth import word_of
from pytest_torchmem.figures import MEASURED, phase_of, title
from pytest_torchmem.reports.tables import allocation_table, comparison_table, table
from pytest_torchmem.snapshots.compare import Change, Comparison, Verdict, main_change
from pytest_torchmem.units import format_change, format_percent, format_size, format_step

if TYPE_CHECKING:
    from pytest_torchmem.checks.limits import Overrun
    from pytest_torchmem.checks.result import CheckResult, TraceResult
    from pytest_torchmem.profile.timeline import Allocation
    from pytest_torchmem.reports.summary import Check
    from pytest_torchmem.snapshots.explain import Growth
    from pytest_torchmem.snapshots.format import Key

_MOST_SIZES = 5

Parts = list[str]
"""A headline, and the sections below it."""


def message(result: CheckResult) -> str:
    """Return what was found, "" for a check that found nothing to say."""
    where, parts = where_of(result.key), []
    for found in result.findings:
        text = _TEXTS.get(found.outcome if type(found) is Finding else type(found))
        if text is not None:
            parts.append(f"{where}: " + "\n\n".join(text(found, result)))
    return "\n\n".join(parts)


def advice(result: CheckResult, command: str) -> str:
    """Return what to do about it with ``command``, which accepts what the test does now."""
    asked = (_ADVICE.get(one.outcome) for one in result.findings if not isinstance(one, AboveCap))
    first = next(filter(None, asked), "")
    return f"{first}: {command}" if first else ""


def where_of(key: Key) -> str:
    """Return what was checked, in one line: the name of the check and the device."""
    return f"{key.name}, {key.where}" if key.name else key.where


def together(failures: Sequence[Check]) -> str:
    """Return one message for all devices of a check; what is the same for several comes once."""
    said = _by_text(failures, lambda check: check.message)
    messages = [f"{', '.join(where)}: {text}".split("\n\n") for text, where in said.items()]
    shared = [part for part in messages[0] if all(part in message for message in messages)]
    parts = [part for message in messages for part in message if part not in shared]
    parts += [*shared, *dict.fromkeys(check.advice for check in failures if check.advice)]
    return "\n\n".join(parts)


def headlines(failures: Sequence[Check]) -> str:
    """Return the first lines of the messages of all devices of a check as one line."""
    said = _by_text(failures, lambda check: check.message.partition("\n")[0])
    return "; ".join(f"{', '.join(where)}: {first}" for first, where in said.items())


def _by_text(checks: Sequence[Check], text: Callable[[Check], str]) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    for check in checks:
        where = where_of(check.result.key)
        said.setdefault(text(check).removeprefix(f"{where}: "), []).append(where)
    return said


def _changed(found: Changed, result: CheckResult) -> Parts:
    comparison, on = found.comparison, found.measured_on
    verb = "shrank" if found.outcome is Outcome.SHRANK else "grew"
    worst = comparison.having(Verdict.SHRANK if verb == "shrank" else Verdict.GREW)
    missing = comparison.having(Verdict.NOT_RUN) if verb == "grew" else ()
    measured = f" measured on {on}" if on else ""
    parts = [
        _never_ran(f"the snapshot has {_one(title(change.figure))}{measured}", change.figure)
        for change in missing
    ]
    if worst:
        parts.insert(0, f"{f'measured on {on}, ' if on else ''}{_step(worst, verb)}")
    parts.insert(1, comparison_table(comparison))
    parts += _growths(found.growths)
    rules = {change.rule for change in worst}
    if len(rules) > 1 and verb == "grew":
        lines = (f"  {title(change.figure)}: {change.rule}" for change in worst)
        parts.append("Exceeded tolerances\n" + "\n".join(lines))
    return [*parts, *_circumstances(comparison, result.trace)]


def _above_cap(found: AboveCap, result: CheckResult) -> Parts:
    rows = [(title(c.figure), *format_step(c.before, c.now)) for c in found.changes]
    headline = f"grew by more than --torchmem-update-max={found.cap} accepts"
    return [headline, table(rows, ("", "snapshot", "now", "change"))]


def _missing(found: Missing, result: CheckResult) -> Parts:
    parts = [f"there is no snapshot of this check in {found.file}"]
    if found.renamed is not None:
        parts.append(
            f"That file has an entry for {found.renamed.test}, which no longer exists, with the "
            "same workload. If you renamed the test, update the whole file: this moves the entry "
            "and keeps your notes in it"
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
    return [
        f"not checked: nothing was allocated on {result.key.device}. Move the model and its inputs "
        'there, or name the right device, such as device="cpu", in the marker or the check'
    ]


def _grows_faster(found: GrowsFaster, result: CheckResult) -> Parts:
    size = found.bound.size
    return [
        f"the peak is {word_of(found.power)} in {size}, and may be {found.bound.word}: "
        f"{found.polynomial} bytes",
        f"What is {word_of(found.power)} in {size} at that peak, at the largest size traced\n"
        f"{allocation_table(found.fastest)}",
    ]


def _over_budget(found: OverBudget, result: CheckResult) -> Parts:
    how = f"measured on {found.measured_on}, " if found.measured_on else ""
    headline = how + "; ".join(map(_overrun, found.overruns))
    allocations = _at_peak(found.overruns, found.contents)
    largest = [f"Largest allocations at that peak\n{allocation_table(allocations)}"]
    return [headline, *(largest if allocations else ())]


def _overrun(overrun: Overrun) -> str:
    limit, name = overrun.limit, title(overrun.limit.figure)
    if overrun.value is None:
        return _never_ran(f"there is a limit for the {name}", limit.figure)
    by = format_change(limit.nbytes, overrun.value).lstrip("+")
    limited = limit.text if "b" in limit.text.lower() else format_size(limit.nbytes)
    return f"{name} {format_size(overrun.value)} exceeds the budget of {limited} by {by}"


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


def _growths(found: Iterable[Growth]) -> Iterable[str]:
    by_peak: dict[str, list[tuple[str, ...]]] = {}
    for growth in found:
        sizes = (growth.before, growth.now, growth.now - growth.before)
        before, now, step = map(format_size, sizes)
        row = (growth.what, growth.name, before, now, f"+{step}", growth.detail, growth.line)
        by_peak.setdefault(growth.peak, []).append(row)
    for peak, rows in by_peak.items():
        headers = ("", "", "snapshot", "now", "change", "mostly", "allocated at")
        yield f"What grew at the {title(peak)}\n{table(rows, headers)}"


def _circumstances(comparison: Comparison, trace: TraceResult) -> Iterable[str]:
    """Return what else is different and may be the cause: the workload, torch, cuDNN."""
    if comparison.workload_changed:
        yield (
            "The workload differs from the snapshot's: the shapes or dtypes of the inputs, or the "
            "sizes of the parameters, have changed"
        )
    if comparison.torch_changed:
        yield (
            f"The snapshot comes from torch {comparison.torch_before} and this run uses torch "
            f"{comparison.torch_now}, which may be the cause"
        )
    if trace.cudnn and trace.cudnn_before and trace.cudnn != trace.cudnn_before:
        yield (
            f"The stored workspaces were told by cuDNN {trace.cudnn_before}, and those of this run "
            f"by cuDNN {trace.cudnn}, which may be the cause"
        )


_TEXTS: Mapping[type[Finding] | Outcome, Callable[[Any, CheckResult], Parts]] = {
    AboveCap: _above_cap,
    Changed: _changed,
    DoesNotFit: _does_not_fit,
    EstimateOff: _estimate_off,
    GrowsFaster: _grows_faster,
    Missing: _missing,
    OverBudget: _over_budget,
    Outcome.NOT_CHECKED: _nothing_allocated,
    Outcome.UNKNOWN_WORKSPACE: _unknown_workspace,
}
"""What makes the text of a finding, by its class or, where that is ``Finding``, its outcome."""
_ADVICE = {
    Outcome.GREW: "If this is intended",
    Outcome.MISSING: "To create it",
    Outcome.SHRANK: "To lock it in",
}
