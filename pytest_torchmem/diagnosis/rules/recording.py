"""Causes in what autograd records, and in how far a backward goes."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from pytest_torchmem.diagnosis import causes
from pytest_torchmem.diagnosis.causes import MADE, Cause, Evidence, cause, is_kept, rule, within
from pytest_torchmem.diagnosis.difference import OF_BACKWARD, Row
from pytest_torchmem.diagnosis.rules import layers, lifetimes, setup
from pytest_torchmem.diagnosis.rules.operators import short_names
from pytest_torchmem.profile.facts import IN_MODE, NO_BACKWARD, Calls, Topic
from pytest_torchmem.profile.module_paths import prefixes, unfold
from pytest_torchmem.profile.timeline import Origin, Role
from pytest_torchmem.snapshots.alive import Group

_RECOMPUTED = ("recomputed", "recomputed in part")


@rule("gradients recorded", "{module} runs with gradients, and ran without{in_}{kept}", sure=True)
def runs_with_gradients(evidence: Evidence) -> Cause | None:
    """A teacher, a target network or an evaluation is no longer under ``no_grad``."""
    found = []
    for change, lost in setup.lost_modes(evidence, "no_grad"):
        if any(one.name in _RECOMPUTED for one in change.before):
            continue  # so runs what a checkpoint with ``use_reentrant=True`` is given
        module = evidence.module(change.name, lost.numbers)
        rows, origin = evidence.of_module(change.name), None
        if not rows:
            own = (one for one in evidence.alive.groups if within(change.name, one.what.module))
            rows, origin = _another_forward(evidence, own)
        held = (row for row in rows if row.what.role != Role.SAVED and is_kept(evidence, row))
        kept = causes.holder_of(evidence, held).partition(causes.GRAPH)[2]
        kept = f"; {kept} keeps its graph" if kept and not kept.startswith("the variable ") else ""
        calls = evidence.then(Topic.CALLS)
        some, every = (calls.get(n) for n in (IN_MODE.format(lost.text, change.name), change.name))
        part = f" in {some.number} of {every.number} calls" if some and every else ""
        words = {"module": module, "in_": part, "kept": kept}
        found.append(cause("gradients recorded", rows, None, origin, **words))
    return causes.largest(found)


@rule(
    "mode of calls", "{module} runs {mode} in {some} of {all} calls, and did in {before}", sure=True
)
def mode_of_some_calls(evidence: Evidence) -> Cause | None:
    """A part of a module's calls is no longer under ``no_grad``, or within autocast."""
    then, now = evidence.then(Topic.CALLS), evidence.present(Topic.CALLS)
    modes = evidence.then(Topic.MODES)
    for name in sorted(now):
        mode, is_of, module = name.rpartition(", of ")
        if not is_of or module not in now:
            continue
        every, some = now[module].number, now[name].number
        in_all = any(f"under {one.text}" == mode for one in modes.get(module, ()))
        before = then.get(name, Calls(every if in_all else 0)).number
        if some < before and every == then.get(module, now[module]).number:
            words = {"some": str(some), "all": str(every), "mode": mode}
            words["before"] = str(before) if before < every else "all"
            return cause("mode of calls", evidence.of_module(module), module=module, **words)
    return None


@rule("eval of calls", f"{{module}} {setup.IN_EVAL.format('{now}', '{before}')}", sure=True)
def more_calls_in_eval_mode(evidence: Evidence) -> Cause | None:
    """What is asked of a module in training mode alone, such as to be checkpointed, is not done."""
    for module, now, before in setup.calls_in_eval_mode(evidence):
        rows = () if setup.checkpointing_lost(evidence) else evidence.of_module(module)
        found = cause("eval of calls", rows, module=module, now=now, before=before)
        were = (one for one in evidence.known() if one.role == Role.RECOMPUTED)
        kept = {row.what.module for row in rows if row.what.role == Role.SAVED}
        if found and any(one.module in kept for one in were):
            found = replace(found, aside=", where nothing is checkpointed")
        return found and causes.placed_in(module, found)
    return None


def _another_forward(
    evidence: Evidence, groups: Iterable[Group]
) -> tuple[list[Row], Origin | None]:
    """Return all that came, and the largest that another forward keeps, if that is much."""
    moment = evidence.difference.moment
    kept = [one for one in groups if one.what.role in MADE and one.nbytes(moment)]
    if not kept or sum(group.nbytes(moment) for group in kept) < causes.WEIGHTY * evidence.growth:
        return [], None
    first = max(kept, key=lambda group: group.nbytes(moment)).what
    places = (one for one in evidence.ran.places(first.source) if one.line == first.line)
    return [*evidence.came()], next(places, None)


@rule("trained", "{modules} {trained}, and {were} frozen{moved}", sure=True)
def no_longer_frozen(evidence: Evidence) -> Cause | None:
    """Parameters that were frozen require gradients."""
    there = evidence.called_modules
    lost = [
        one
        for one in setup.thawed(evidence)
        if (one.name in there or one.name.rpartition(".")[0] in there or not there)
        and not _only_new_are_trained(evidence, one.name)
    ]
    lost.sort(key=lambda one: -causes.total(evidence.of_module(one.name)))
    rows = [row for one in lost for row in evidence.of_module(one.name)]
    if not rows:
        rows = [*evidence.came(*setup.OF_TRAINING)] if lost else []
    parts = [part for change in lost for part in _trained_parts(evidence, change.name)]
    numbers = {change.name: change.before for change in lost}
    names = [evidence.numbered(part, numbers.get(part, "")) for part in dict.fromkeys(parts)]
    are, were = ("are trained", "were") if names[1:] else ("is trained", "was")
    around_first = (path for part in parts[:1] for path in prefixes(part))
    words = causes.some(names) + "".join(map(evidence.was, around_first))
    into = [name for one in lost for name, was in evidence.names.items() if within(one.name, was)]
    made = {one.what.module for one in evidence.alive.groups if one.what.role in setup.OF_TRAINING}
    thawed = (*into, *(one.name for one in lost))
    if not any(within(name, module) for name in thawed for module in made):  # as of a detached one
        are = "require gradients" if names[1:] else "requires gradients"
    moved = f"; its parts are in {evidence.short(into[0].rpartition('.')[0])} now" if into else ""
    values = {"modules": words, "trained": are, "were": were, "moved": moved}
    found = cause("trained", dict.fromkeys(rows), **values)
    if found is None or lost[1:] or within(lost[0].name, causes.shown_by(found.rows).what.module):
        return found
    return causes.placed_in(lost[0].name, found)


def _trained_parts(evidence: Evidence, module: str) -> list[str]:
    """Return a module, or what of it has gradients where others of its parts are still frozen."""
    frozen = evidence.present(Topic.FROZEN)
    if not any(name.startswith(f"{module}.") for name in frozen):
        return [module]
    parameters = (name for name in evidence.present(Topic.SIZES) if name not in frozen)
    found = [name for name in parameters if name.rpartition(".")[0] == module]
    depth = module.count(".") + 1
    for group in _gradients_in(evidence, module):
        own = group.what.module.split(".")
        if group.what.module == module:
            continue  # of these parameters
        below = depth + 1 + ("*" in own[depth + 1 : depth + 2])
        found.append(".".join(unfold(group.what.module, group.numbers).split(".")[:below]))
    return found or [module]


def _gradients_in(evidence: Evidence, module: str) -> list[Group]:
    groups = (one for one in evidence.alive.groups if one.what.role == Role.GRADIENT)
    return [one for one in groups if within(module, one.what.module)]


def _only_new_are_trained(evidence: Evidence, module: str) -> bool:
    """Tell whether all that has gradients in a module is in new modules, such as adapters."""
    trained = [group.what.module for group in _gradients_in(evidence, module)]
    new = [pattern for pattern, _ in layers.new_modules(evidence)]
    return bool(trained) and all(any(within(one, path) for one in new) for path in trained)


@rule("reached", "the backward goes through {modules} now, and did not")
def backward_reaches(evidence: Evidence) -> Cause | None:
    """A ``detach`` is gone, another output has a loss, or something before a module is trained."""
    if no_longer_frozen(evidence) or runs_with_gradients(evidence):
        return None  # which says the same, and why
    lost = [(change.name, one.numbers) for change, one in setup.lost_modes(evidence, NO_BACKWARD)]
    own = [*dict.fromkeys(row for name, _ in lost for row in evidence.of_module(name))]
    anew = evidence.new_operators
    if any(row.what.role in MADE and row.what.source in anew for row in own):
        return None  # what the module calls now has another backward
    rows = [*dict.fromkeys([*own, *(evidence.came(*OF_BACKWARD) if lost else ())])]
    modules = causes.some([evidence.module(name, numbers) for name, numbers in lost])
    return cause("reached", rows, causes.shown_by(own or rows), modules=modules) if rows else None


@rule("recorded", "autograd records {operators}, and did not{why}", sure=True)
def newly_recorded(evidence: Evidence) -> Cause | None:
    """A ``no_grad`` or a ``detach`` is gone: a graph is made of what had none."""
    is_given = bool(evidence.about(Topic.GIVEN))
    if _is_said(evidence) or (is_given and evidence.about(Topic.CONFIGURATION)):
        return None
    counts = evidence.counts()
    lost = {
        name: one
        for name, one in evidence.counts("not_recorded").items()
        if one.fell and not (name in counts and counts[name].fell)
    }
    if not lost or (len(lost) == 1 and (counts or causes.CONVERTS in lost)):
        return None  # one that is called elsewhere
    rows = _rows_of(evidence, lost)
    origin = None
    if causes.total(rows) < causes.WEIGHTY * evidence.growth:
        own = (one for one in evidence.alive.groups if one.what.source in lost)
        rows, origin = _another_forward(evidence, own)
    has_others = evidence.about(Topic.FROZEN) or evidence.about(Topic.TIED) or is_given
    is_gone = not has_others and not lifetimes.new_gradient(evidence)
    why = ": a no_grad or a detach is gone" if is_gone else ""
    trained = [evidence.short(one.name) for one in evidence.about(Topic.SIZES) if not one.before]
    if trained:
        are = "are new parameters" if trained[1:] else "is a new parameter"
        why = f": {causes.some(trained)} {are}"
    made = [row for row in rows if row.what.role in MADE] if origin is None else []
    first = min(made, key=evidence.order, default=None)  # where the graph begins
    operators = short_names(sorted(lost, key=lambda name: lost[name].now - lost[name].before))
    return cause("recorded", rows, first, origin, operators=operators, why=why)


def _is_said(evidence: Evidence) -> bool:
    """Tell whether it is known already why autograd records more."""
    # A checkpoint may have run its forward under no_grad.
    rules = (no_longer_frozen, runs_with_gradients, mode_of_some_calls, setup.checkpointing_lost)
    return any(find(evidence) for find in rules) or any(layers.new_modules(evidence))


def _rows_of(evidence: Evidence, operators: Collection[str]) -> list[Row]:
    """Return what operators made, and what the backward takes of the lines that called them."""
    places = evidence.ran.places_of(operators)
    return [
        row
        for row in evidence.came(*MADE, *OF_BACKWARD)
        if (row.what.role in MADE and row.what.source in operators)
        or (row.what.role in OF_BACKWARD and row.place in places)
    ]


@rule("reached anew", "the backward comes to {operators}{why}", sure=True)
def backward_comes_to_more(evidence: Evidence) -> Cause | None:
    """A ``detach`` is gone: a backward goes through a graph that was recorded for nothing."""
    if _is_said(evidence) or newly_recorded(evidence) or backward_reaches(evidence):
        return None
    counts = evidence.counts()
    more = {
        name: one
        for name, one in evidence.counts("in_backward").items()
        if one.rose and name not in counts
    }
    rows = _rows_of(evidence, more)
    made = [
        row for row in rows if row.what.source in more and not lifetimes.is_resized(evidence, row)
    ]
    if not made or len(more) < 2:
        return None  # one may be given what it broadcasts, and sums up in its backward
    first = causes.shown_by(made)
    counted = more[first.what.source]
    calls = "1 call" if counted.now == 1 else f"{counted.now} calls"
    operators = f"{calls} of {first.what.source}, and came to {counted.before or 'none'}"
    places = [{one.module.partition(".")[0] for one in evidence.ran.places(name)} for name in more]
    places = [one - {""} for one in places if one != {""}]
    roots = set[str]().union(*places).intersection(*places)
    if len(roots) == 1 < len({*chain(*places)}):  # the one that calls all of them
        operators = f"more of {roots.pop()}, to {operators}"
    why = "" if lifetimes.new_gradient(evidence) else ": a detach is gone"
    return cause("reached anew", rows, first, operators=operators, why=why)
