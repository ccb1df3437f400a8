"""Causes that the facts of a step name: its inputs, modes, parameters and optimizers changed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from math import prod

from pytest_torchmem.diagnosis import causes
from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, fact_rule, rule, times, within
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.diagnosis.rules.layers import new_modules, set_otherwise
from pytest_torchmem.diagnosis.rules.lifetimes import left_at_end
from pytest_torchmem.diagnosis.rules.types import double_precision
from pytest_torchmem.figures import RESERVED
from pytest_torchmem.printable import listed
from pytest_torchmem.profile import facts
from pytest_torchmem.profile.facts import AUTOCAST, Calls, FactChange, Topic, parts_of
from pytest_torchmem.profile.module_paths import ALL, common_parent, fold, prefixes, read_numbers
from pytest_torchmem.profile.timeline import Role
from pytest_torchmem.snapshots.alive import What

OF_TRAINING = (Role.GRADIENT, Role.OPTIMIZER_STATE, Role.OPTIMIZER_TEMPORARY)
_DECIDES = {
    "CUBLAS": (Role.LIBRARY, Role.WORKSPACE),
    "CUDNN": (Role.WORKSPACE,),
    "cudnn.enabled": (),
    "cudnn": (Role.WORKSPACE,),
}
"""By parts of settings' names: what they decide, where that is not everything."""
_MOST_SHOWN = 3
_OF_OPTIMIZER = (Role.OPTIMIZER_STATE, Role.OPTIMIZER_TEMPORARY)

Values = Iterator[dict[str, str]]
_Shaped = What | facts.Sized


def _otherwise(absent: str) -> causes.Told:
    """Return what a fact is and was, or what stands for it where there is none."""
    return lambda change: [{"now": change.now or absent, "before": change.before or absent}]


def _lost(name: str) -> causes.Told:
    return lambda change: (one._asdict() for one in causes.lost_of(change, name))


def _autocast_left(change: FactChange) -> Values:
    kept = {one.detail.removesuffix(facts.UNCACHED) for one in change.now if one.name == AUTOCAST}
    for one in causes.lost_of(change, AUTOCAST):
        if one.detail != "off" and one.detail.removesuffix(facts.UNCACHED) not in kept:
            yield one._asdict()
    for one in facts.new_in(change.now, change.before):
        if (one.name, one.detail) == (AUTOCAST, "off"):
            yield {"numbers": one.numbers, "detail": "it"}


def _uncached(change: FactChange) -> Values:
    now = [one.detail for one in change.now if one.name == AUTOCAST]
    for one in causes.lost_of(change, AUTOCAST):
        if one.detail + facts.UNCACHED in now:
            casts, how = "casts", "anew in each call (cache_enabled=False)"
        elif one.detail.endswith(facts.UNCACHED) and one.detail.removesuffix(facts.UNCACHED) in now:
            casts, how = "keeps its casts of", "until its region ends (cache_enabled=True)"
        else:
            continue
        yield {"numbers": one.numbers, "casts": casts, "how": how}


def _called_in_more(change: FactChange) -> Values:
    now = next((one.detail for one in change.now if one.name == facts.IN_PART), "")
    for one in causes.lost_of(change, facts.IN_PART):
        if _share(now) > _share(one.detail):
            yield {**one._asdict(), "now": f"{now} calls" if now else "each call"}


def _share(detail: str) -> float:
    """Return the part of calls that is written as ``2 of 20``, all of them where nothing is."""
    part, _, whole = detail.partition(" of ")
    return int(part) / max(int(whole), 1) if part.isdecimal() and whole.isdecimal() else 1.0


def _reentrant(change: FactChange) -> Values:
    same = [one for one in change.now if one.name == "recomputed" and one in change.before]
    now, before = (_is_in("no_grad", side) for side in (change.now, change.before))
    if same and now is not before:
        yield {"numbers": same[0].numbers, "now": str(now), "before": str(before)}


def _parts(change: FactChange, most: int | None = None) -> tuple[str, str]:
    """Return what came and what went of a list, or of settings."""
    sides = (parts_of(one) if isinstance(one, dict) else one for one in (change.before, change.now))
    before, now = sides
    came = [one for one in now if one not in before]
    gone = [one for one in before if one not in now]
    return ", ".join(came[:most]), ", ".join(gone[:most])


def _settings(change: FactChange) -> Values:
    came, gone = _parts(change)
    yield {"now": came or "nothing of that", "before": gone or "not"}


def _state(change: FactChange) -> Values:
    came, gone = _parts(change)
    if came:
        has = "has" if gone or not change.before else "also has"
        yield {"has": has, "came": came, "before": f", and had {gone}" if gone else ""}


def _other_parts(change: FactChange, verb: str) -> Values:
    """Yield what is passed or said otherwise, a few of it."""
    came, gone = _parts(change, _MOST_SHOWN)
    if change.now and (came or gone):
        was = f", and {verb} {gone}" if came and gone else ""
        yield {"now": came or f"no {gone}", "before": was}


def _by_setting(evidence: Evidence, change: FactChange) -> Iterable[Row]:
    graphs = [bool(of(Topic.COMPILED)) for of in (evidence.then, evidence.present)]
    if change.name.startswith("torch.compile") and graphs[0] is not graphs[1]:
        return ()  # that it compiles, or no longer does, is to blame
    return evidence.came(*next((own for part, own in _DECIDES.items() if part in change.name), ()))


def _of_modules_not_thawed(evidence: Evidence, change: FactChange) -> Iterable[Row]:
    """Return what shows a training mode: of what was frozen, or ran without gradients, too, that
    is the lesser news.
    """
    own, others = change.name, [one.name for one in thawed(evidence)]
    others += [one.name for one, _ in lost_modes(evidence, "no_grad")]
    is_lesser = any(within(own, one) or within(one, own) for one in others)
    return () if is_lesser else evidence.of_module(own)


def _inside_or_all(evidence: Evidence, change: FactChange) -> Iterable[Row]:
    """Return what is in a module, where the snapshot has layers; everything, if that is nothing."""
    if Topic.LAYERS not in evidence.before.facts:
        return ()
    inside = [row for row in evidence.came() if within(change.name, row.what.module)]
    return inside or evidence.came()


fact_rule(
    "process settings",
    "{name} is {now}, and was {before}",
    Topic.SETTINGS,
    _otherwise("not set"),
    _by_setting,
)
fact_rule(
    "autocast", "{module} runs without autocast, and ran with {detail}", Topic.MODES, _autocast_left
)
fact_rule(
    "autocast uncached",
    "autocast {casts} the parameters of {module} {how}",
    Topic.MODES,
    _uncached,
    lambda evidence, change: (
        row for row in evidence.of_module(change.name) if row.what.source == causes.CONVERTS
    ),
)
fact_rule(
    "training mode",
    "{module} is in training mode, and was in eval mode",
    Topic.MODES,
    _lost("eval"),
    _of_modules_not_thawed,
)
fact_rule(
    "called in part",
    "{module} runs in {now} of the module around it, and ran in {detail}",
    Topic.MODES,
    _called_in_more,
)
fact_rule("packed", "{module} no longer runs within {detail}", Topic.MODES, _lost(facts.PACKED))
fact_rule(
    "reentrant",
    "{module} is checkpointed with use_reentrant={now}, and was with {before}",
    Topic.MODES,
    _reentrant,
)


@rule("compiled", "torch.compile {change}{at}", sure=True)
def compiled_otherwise(evidence: Evidence) -> Cause | None:
    """More graphs save more between them, and what is not compiled saves what operators save."""
    before, now = evidence.sides(Topic.COMPILED, "graphs", Calls())
    if now.number == before.number or 0 < now.number < before.number:
        return None
    at = "".join(f" at {line}" for line in (now if now.number else before).lines)
    change = "compiles nothing more" if before.number else "is new"
    if before.number and now.number:
        known, breaks = evidence.sides(Topic.COMPILED, "breaks", Calls())
        new = evidence.new_lines(breaks.lines, known.lines)
        change = f"makes {now.number} graphs, and made {before.number}"
        at = f": a graph breaks at {causes.some(new)}" if new else at
    return cause("compiled", evidence.came(), at=at, change=change)


fact_rule(
    "memory format",
    "{name} is {now}, and was {before}",
    Topic.FORMATS,
    _otherwise("contiguous"),
    lambda evidence, _: evidence.came(),
    sure=False,
)
fact_rule(
    "state",
    "the state of {name} {has} {came}{before}",
    Topic.STATES,
    _state,
    lambda evidence, _: () if evidence.about(Topic.OPTIMIZERS) else evidence.came(*_OF_OPTIMIZER),
)
fact_rule("settings", "{name} has {now}, and had {before}", Topic.MODULES, _settings)
fact_rule(
    "arguments",
    "{module} is called with {now}{before}",
    Topic.ARGUMENTS,
    lambda change: _other_parts(change, "was with"),
    _inside_or_all,
    sure=False,
)
fact_rule(
    "configuration",
    "{module} has {now}{before}",
    Topic.CONFIGURATION,
    lambda change: _other_parts(change, "had") if change.before else (),
    _inside_or_all,
    sure=False,
)


@rule("called", "{module} is called {now}{given}, and was {before}{lines}")
def called_more_often(evidence: Evidence) -> Cause | None:
    """A model runs once more, or a layer several times in one call of the module around it."""
    found = []
    for change in evidence.about(Topic.CALLS):
        # Of a module in another one, a single call is no fact.
        was = 1 if change.name in evidence.then(Topic.LAYERS) else 0
        before, now = change.before.number or was, change.now.number
        lines, known = change.now.lines, change.before.lines
        new = evidence.new_lines(lines, known) if known else []
        rows = evidence.of_module(change.name) if 0 < before < now else []
        at = [line for line in new or lines if rows and line != causes.shown_by(rows).what.line]
        told = f": at {listed(at)}" if 0 < len(at) <= _MOST_SHOWN else ""
        words = {"now": times(now), "before": times(before), "lines": told}
        words["given"] = _given_too(evidence, change.name)
        module = evidence.short(change.name)
        found.append(cause("called", rows, module=module, **words))
    return causes.largest(found)


def _given_too(evidence: Evidence, module: str) -> str:
    """Return in words with what a module is called that it was not, beside what it was, or ""."""
    name = f"input of {module}"
    before, now = (of(Topic.INPUTS).get(name, ()) for of in (evidence.then, evidence.present))
    new = [str(one) for one in now if one not in before]
    return f", also with {causes.some(new)}" if before and 0 < len(new) < len(now) else ""


@rule("emptied", "{name}() is called {now}, and was {before}{at}", sure=True)
def cache_emptied_less(evidence: Evidence) -> Cause | None:
    """Blocks that are free stay with the program where it gave them back: no tensor tells of it."""
    change = evidence.difference.change
    calls = (one for one in evidence.about(Topic.CALLS) if one.name == facts.EMPTY_CACHE)
    for one in calls if evidence.difference.moment == RESERVED and not evidence.growth else ():
        if one.now.number < one.before.number:
            now = times(one.now.number) if one.now.number else "no more"
            at = f" at {one.before.lines[0]}" if one.before.lines else ""
            words = {"name": one.name, "now": now, "before": times(one.before.number), "at": at}
            return Cause("emptied", words, None, change)
    return None


def thawed(evidence: Evidence) -> list[FactChange]:
    """Return what was frozen and is no more, neither by itself nor in what is in its place."""
    now, layers = evidence.present(Topic.FROZEN), evidence.present(Topic.LAYERS)
    known = evidence.then(Topic.LAYERS)
    return [
        change
        for change in evidence.about(Topic.FROZEN)
        if change.name not in now
        # what was wrapped, as by an adapter, is in its place
        and not any(
            name.startswith(f"{change.name}.") and layers[name] == known.get(change.name)
            for name in now.keys() & layers.keys()
        )
    ]


@rule("inputs", "the input {change}", sure=True)
def inputs_changed(evidence: Evidence) -> Cause | None:
    """A batch, a sequence or a type of the inputs is another one."""
    inputs = (one for one in evidence.about(Topic.INPUTS) if one.before and one.now)
    inputs = (one for one in inputs if not _is_called_anew(evidence, one))
    changed = [one for one in inputs if not _is_made_by_itself(evidence, one)]
    # What the step itself is given that is new, and not a module that it calls.
    new = (one for one in evidence.about(Topic.INPUTS) if one.now and not one.before)
    changed = changed or [one for one in new if " of " not in one.name]
    if not changed or not _can_explain(evidence, changed):
        return None
    others = f"{len(changed) - 1} more input{'s' if changed[2:] else ''}"
    more = f", and {others}" if changed[1:] else ""
    calls = _calls_of(evidence, changed[0].name)
    before, now = next((one for one in calls if 0 < one[1] < one[0]), (0, 0))  # more at once
    fewer = f", in {now} {'call' if now == 1 else 'calls'} instead of {before}" if now else ""
    text = _step_of_input(changed[0]) + more + fewer
    retyped = any(_types(one.before) != _types(one.now) for one in changed)
    if retyped and " of " in changed[0].name and any(lost_modes(evidence, AUTOCAST)):
        return None  # which says why another module makes another type
    new_shapes = [one for one in changed[0].now if one not in changed[0].before]
    is_made = " of " in changed[0].name and bool(new_shapes)
    index = evidence.ran.first_made(new_shapes[0]) if is_made else -1
    types = {dtype for one in changed for dtype in _types(one.now) - _types(one.before)}
    wider = [one for one in evidence.came(Role.PARAMETER) if one.what.dtype in types]
    if retyped and wider:
        text += f", and parameters are {wider[0].what.dtype}, too"
    rows = evidence.came() if retyped else evidence.of_sizes()
    # What was there before the input is not made of it.
    made_by = (*causes.MADE, *causes.KEPT)
    rows = [row for row in rows if row.what.role not in made_by or evidence.first(row) >= index]
    return cause("inputs", rows, change=text)


def _types(geometries: Iterable[facts.Geometry]) -> set[str]:
    return {one.dtype for one in geometries}


def _can_explain(evidence: Evidence, changes: Iterable[FactChange]) -> bool:
    """Tell whether inputs of another type, or by how much they are larger, can explain a growth.
    Of several calls the peak may be in any; as many calls of fewer shapes have larger ones.
    """
    grown = 1.0
    for change in changes:
        if not change.before or _types(change.before) != _types(change.now):
            return True  # another type
        before, after = ([prod(one.shape) for one in side] for side in change[2:])
        pairs = [(max(before), max(after)), *zip(before, after, strict=False)]
        if not _calls_of(evidence, change.name):
            pairs += [(size, max(after)) for size in before if size not in after]
        grown = max(grown, *(now / max(was, 1) for was, now in pairs))
    return evidence.can_explain(grown)


def _is_made_by_itself(evidence: Evidence, change: FactChange) -> bool:
    """Tell whether a module has made what it is given, as it does a cache."""
    module = change.name.partition(" of ")[2].partition("[")[0]
    made = evidence.ran.first_made(change.now[-1]) if module else -1
    origin = evidence.ran.allocation(made).origin if made >= 0 else None
    return origin is not None and bool(origin.module) and within(module, origin.module)


def _is_called_anew(evidence: Evidence, change: FactChange) -> bool:
    """Tell whether a module is called as before, and with other inputs in further calls."""
    is_called_more = any(0 < before < now for before, now in _calls_of(evidence, change.name))
    return is_called_more and {*change.before} < {*change.now}


def _calls_of(evidence: Evidence, name: str) -> list[tuple[int, int]]:
    """Return how often the module of an input was called and is, if that is another number."""
    calls = (one for one in evidence.about(Topic.CALLS) if name.endswith(f" of {one.name}"))
    numbers = ((one.before.number, one.now.number) for one in calls)  # lines may be others, too
    return [(before, now) for before, now in numbers if before != now]


def _step_of_input(change: FactChange) -> str:
    both = {*change.before} & {*change.now}  # in other calls
    gone, came = ([one for one in side if one not in both] for side in (change.before, change.now))
    sides = (gone or change.before, came or change.now)
    before, now = (" and ".join(map(str, side)) for side in sides)
    name = change.name.removeprefix("input ")
    if not before:
        return f"{name} {now} is new"
    if len(change.now) == 1 and change.now[0].dtype == change.before[0].dtype:
        now = now.removeprefix(change.now[0].dtype)
    return f"{name} changed, {before} → {now}"


_OF_LOSSES = frozenset({"target", "targets", "reduction"})
"""What operators of torch are given that are losses (native_functions.yaml)."""
_PART_OF_LOSS = "aten::_log_softmax"
"""The large part of a cross entropy, and given nothing of that kind (``cross_entropy_loss``)."""


@rule("loss", "another loss is computed: {operator} is called {now}, and was {before}", sure=True)
def another_loss(evidence: Evidence) -> Cause | None:
    """The same outputs go into one more loss, or a penalty."""
    calls = [one for one in evidence.about(Topic.CALLS) if one.before.number]
    counts = {name: one for name, one in evidence.counts().items() if _is_loss(name)}
    rising = [name for name, one in counts.items() if one.before and one.rose]
    if not rising or calls or evidence.has_other_inputs:
        return None
    makers = evidence.makers_before(rising[0])
    if any(within(new, one) for new, _ in new_modules(evidence) for one in makers):
        return None  # a new module makes what it is called with, and says why
    places = [origin for name in rising for origin in evidence.ran.places(name) if origin.line]
    rows = [row for row in evidence.came() if row.what.line in {one.line for one in places}]
    known = {*evidence.moved_lines().values()}
    new = [one for one in places if one.operator == rising[0] and one.line not in known]
    whole = {one.line for one in evidence.ran.called_as("cross_entropy")}
    if rising == [_PART_OF_LOSS] and any(not one.module and one.line not in whole for one in new):
        return None  # by itself it is no loss
    softmax = evidence.counted("aten::_softmax")
    if rising == [_PART_OF_LOSS] and softmax is not None and softmax.fell:
        return None  # the logarithm was taken of that
    one = counts[rising[0]]
    now, before = times(one.now), times(one.before)
    return cause(
        "loss", rows, None, next(iter(new), None), operator=rising[0], now=now, before=before
    )


def _is_loss(operator: str) -> bool:
    if operator == _PART_OF_LOSS:
        return True
    import torch  # the plugin is imported without it, and says so where it is not there

    from pytest_torchmem.torch_private.keys import schema

    namespace, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.partition(".")[0], None)
    schemas = (schema(getattr(packet, one)) for one in packet.overloads()) if packet else ()
    return any(_OF_LOSSES & {one.name for one in each.arguments} for each in schemas)


@rule("checkpoint", "{module} is {how}", sure=True)
def checkpointing_lost(evidence: Evidence) -> Cause | None:
    """Modules keep their activations that a backward recomputed before."""
    if found := _other_segments(evidence):
        return found
    lost: dict[str, str] = {}
    for word in ("recomputed in part", "recomputed"):
        for change, one in lost_modes(evidence, word):
            if one not in change.before or one[:-1] not in [other[:-1] for other in change.now]:
                lost[change.name] = one.numbers
    modes = evidence.present(Topic.MODES)
    recomputed = {name for name in modes if _is_in("recomputed", modes[name])}
    # Where a module around one is recomputed as a whole, it is as well.
    lost = {one: lost[one] for one in lost if recomputed.isdisjoint(prefixes(one)[:-1])}
    if not lost:
        return None
    place = common_parent(lost)  # of a function, a checkpoint shows what it calls
    rows = evidence.of_module(place)
    if not rows and place not in evidence.present(Topic.LAYERS):
        rows = [*evidence.came()]  # it is called by itself now
    again = [row for row in rows if row.what.role == Role.RECOMPUTED]
    if 2 * causes.total(again) > causes.total(rows):
        return None  # by a checkpoint that spans more
    numbers = lost.get(place) or next(iter(lost.values()))
    shown = evidence.module(place, "/".join(numbers.split("/")[: place.count("*")]))
    own = [change for change in evidence.about(Topic.MODES) if change.name in lost]
    whole = [one.name for one in own if _is_in("recomputed", one.before)]
    inside = (one for one in evidence.then(Topic.LAYERS) if within(place, one) and one != place)
    has_others = any(not any(within(one, path) for one in whole) for path in inside)
    part = not whole or (place not in whole and has_others)
    shown = f"a part of {shown}" if part else shown
    how = f"no longer checkpointed{_why_not_checkpointed(evidence, place)}"
    return cause("checkpoint", rows, module=shown, how=how)


def _other_segments(evidence: Evidence) -> Cause | None:
    """Return that modules are in other checkpoints, each of several of them."""
    for change in evidence.about(Topic.CALLS):
        before, now, pattern = change.before.number, change.now.number, change.name
        if not before or not now or not pattern.startswith(facts.CHECKPOINT):
            continue
        pattern = pattern.removeprefix(facts.CHECKPOINT)
        calls = evidence.ran.called_as("checkpoint_sequential")
        call = next((one for one in calls if within(fold(one.module)[0], pattern)), None)
        # Of which it does not checkpoint the last segment (torch/utils/checkpoint.py).
        counts = (number + (call is not None) for number in (now, before))
        how = "checkpointed in {} segments, and was in {}".format(*counts)
        module = evidence.module(pattern, "")
        rows = evidence.of_module(pattern)
        return cause("checkpoint", rows, None, call, module=module, how=how)
    return None


def _why_not_checkpointed(evidence: Evidence, place: str) -> str:
    """Return in words what of a module is checkpointed still, or the mode that ended it."""
    modes = evidence.present(Topic.MODES)
    inside = [name for name in modes if within(place, name) and name != place]
    kept = [name for name in inside if _is_in("recomputed", modes[name])]
    if kept:
        return f": of it only {evidence.short(common_parent(kept))} is"
    for change in evidence.about(Topic.MODES):
        is_new = _is_in("eval", change.now) and not _is_in("eval", change.before)
        if is_new and (within(change.name, place) or within(place, change.name)):
            return ": it is in eval mode, and was not"
    around = (one for one in calls_in_eval_mode(evidence) if within(one[0], place))
    return "".join(f": {module} {IN_EVAL.format(*words)}" for module, *words in around)


IN_EVAL = "is in eval mode in {} calls, and was in {}"


def calls_in_eval_mode(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """Yield outermost modules that are in eval mode in more of as many calls: in how many now, and
    in how many before.
    """
    for module in evidence.present(Topic.CALLS):
        known, calls = evidence.sides(Topic.CALLS, module, Calls())
        were, are = evidence.sides(Topic.CALLS, facts.IN_MODE.format("eval", module), Calls())
        in_all = _is_in("eval", evidence.present(Topic.MODES).get(module, ()))
        now = are.number or (calls.number if in_all else 0)
        if 0 < were.number < now and calls.number == known.number:
            yield module, f"{now} of {calls.number}", str(were.number)


@rule("tied", "{parameter} is no longer tied to {other}", sure=True)
def untied(evidence: Evidence) -> Cause | None:
    """Two parameters that were one are two."""
    for change in (one for one in evidence.about(Topic.TIED) if one.before and not one.now):
        owners = [name.rpartition(".")[0] for name in (change.name, change.before)]
        came = [*evidence.came(Role.PARAMETER)]  # of either: one may be as large as both were
        owner = next((one for one in owners if any(within(one, r.what.module) for r in came)), "")
        shapes = {row.what.shape for row in came if within(owner, row.what.module)}
        rows = [
            row for row in evidence.came(Role.PARAMETER, *OF_TRAINING) if row.what.shape in shapes
        ]
        if rows:
            first = causes.shown_by([row for row in rows if within(owner, row.what.module)])
            parameter, other = evidence.short(change.name), evidence.short(change.before)
            return cause("tied", rows, first, parameter=parameter, other=other)
    return None


@rule("optimizer", "{change}", sure=True)
def another_optimizer(evidence: Evidence) -> Cause | None:
    """Another optimizer, or another implementation of it."""
    changed = evidence.about(Topic.OPTIMIZERS)
    if not changed:
        return None
    rows = evidence.came(*_OF_OPTIMIZER)
    chosen = (one.before and one.now and one.before[1:] == one.now[1:] for one in changed)
    if all(chosen) and set_otherwise(evidence):
        return None  # torch chose another way, for gradients of layers that are set otherwise
    same = [one for one in changed if one.before and one.now and one.before[0] == one.now[0]]
    for one in same:  # implemented as it was
        for said in _other_parts(one, "had"):
            change = f"{one.name} has {said['now']}{said['before']}"
            return cause("optimizer", rows, change=change)
    before = ", ".join(f"{one.name} ({', '.join(one.before)})" for one in changed if one.before)
    now = ", ".join(f"{one.name} ({', '.join(one.now)})" for one in changed if one.now)
    others, left = ([*of(Topic.OPTIMIZERS)] for of in (evidence.then, evidence.present))
    if others and not before:
        change = f"{now} is another optimizer beside {', '.join(others)}"
    elif left and not now:
        change = f"the optimizer {before} is gone, and {', '.join(left)} is still there"
    else:
        change = f"the optimizer is {now or 'none'}, and was {before or 'none'}"
    return cause("optimizer", rows, change=change)


@rule("in place", "{operator} is no longer in place ({lost} of {calls} calls)", sure=True)
def no_longer_in_place(evidence: Evidence) -> Cause | None:
    """An operator that wrote to what it was given makes a tensor of its own."""
    for change in evidence.about(Topic.IN_PLACE):
        calls, left = change.before, change.now
        plain = change.name.removesuffix("_")
        rows = [row for row in evidence.came() if row.what.source.partition(".")[0] == plain]
        are_more = any(evidence.rose(row.what.source) for row in rows)
        if calls > left and are_more and not _is_written_anew(evidence, causes.shown_by(rows)):
            if double_precision(evidence):  # which cannot be written to what is narrower
                return None
            lost = str(calls - left)
            return cause("in place", rows, operator=plain, lost=lost, calls=str(calls))
    return None


def _is_written_anew(evidence: Evidence, row: Row) -> bool:
    """Tell whether a row's module or line calls operators that nothing called before."""
    own = row.what.source.partition(".")[0]
    in_place = {change.name.removesuffix("_") for change in evidence.about(Topic.IN_PLACE)}
    return any(
        fold(origin.module)[0] == row.what.module
        and (origin.module or origin.line == row.what.line)
        for name in evidence.new_operators
        if name.partition(".")[0] not in {own, *in_place}
        for origin in evidence.ran.places(name)
    )


@rule("size", "{module}.{parameter} is {now}, and was {before}", sure=True)
def another_size(evidence: Evidence) -> Cause | None:
    """A layer became wider, or a table longer."""
    resized = [row for row in evidence.came(Role.PARAMETER, Role.BUFFER) if row.is_resized]
    if not resized:
        return _size_of_no_layer(evidence)
    first = max(resized, key=lambda row: (row.change, -evidence.order(row)))
    most = max(row.what.nbytes / max(row.before.nbytes, 1) for row in resized if row.before)
    if first.before is None or not evidence.can_explain(most, (Role.LIBRARY,)):
        return None
    read = (evidence.ran.read_at(evidence.first(row)) for row in resized)
    since = min((at for at in read if at >= 0), default=0)
    made = evidence.came(*causes.MADE)
    if 2 * sum(row.change for row in made if evidence.order(row) < since) > causes.total(made):
        return None  # most came before any of them was read
    if not _grew_by(evidence, *((row.before, row.what) for row in resized)):
        return None
    otherwise = set_otherwise(evidence)
    layers = evidence.present(Topic.LAYERS)
    own = (layer for one in otherwise for layer in layers.get(one, ()) if not layer.is_of_torch)
    if first.what.module in otherwise or any(layer.settings for layer in own):
        return None  # settings say why
    readers = evidence.ran.readers(evidence.first(first))
    reader = next((one for one in readers if fold(one.module)[0] == first.what.module), None)
    found = cause(
        "size",
        evidence.of_sizes(),
        module=evidence.short(first.module),
        parameter=first.what.source,
        now=first.what.tensor,
        before=str(list(first.before.shape)),
    )
    return found and replace(causes.placed_in(first.what.module, found), origin=reader)


def _grew_by(evidence: Evidence, *resized: tuple[_Shaped | None, _Shaped]) -> bool:
    """Tell whether no more than half of what is larger is so by other factors than parameters."""
    by = {factor for before, now in resized for factor in _factors(before, now)}
    made = [(row, _factors(row.before, row.what)) for row in evidence.came(*causes.MADE)]
    others = [row for row, factors in made if factors and by.isdisjoint(factors)]
    return 2 * causes.total(others) <= causes.total(row for row, _ in made)


def _factors(before: _Shaped | None, now: _Shaped) -> set[Fraction]:
    """Return by what the sizes of a resized tensor were multiplied."""
    if before is None or len(before.shape) != len(now.shape):
        return set()
    pairs = zip(now.shape, before.shape, strict=True)
    return {Fraction(size, was) for size, was in pairs if size != was > 0}


def _size_of_no_layer(evidence: Evidence) -> Cause | None:
    """Return what of the parameters became larger that a program uses itself: queries, positions.

    Small ones, too: what is computed of them is not.
    """
    if any(change.before for change in evidence.about(Topic.INPUTS)):
        return None
    for change in evidence.about(Topic.SIZES):
        before, now = (side[0] if side else None for side in (change.before, change.now))
        is_larger = before and now and prod(before.shape) < prod(now.shape)
        if before and now and is_larger and _grew_by(evidence, (before, now)):
            owner, _, name = change.name.rpartition(".")
            values = {"module": evidence.short(owner), "parameter": name}
            return cause("size", evidence.of_sizes(), now=now.text, before=before.text, **values)
    return None


@rule("new tensor", "the {role} {tensor} new", sure=True)
def new_tensor(evidence: Evidence) -> Cause | None:
    """A module that was there before has another buffer or parameter, or one of its own."""
    if left_at_end(evidence) is not None:
        return None
    named = {(what.module, what.source) for what in evidence.known()}
    otherwise = {
        change.name
        for topic in (Topic.FROZEN, Topic.TIED)
        for change in evidence.about(topic)
        if change.name in evidence.then(topic)
    }
    layers = evidence.then(Topic.LAYERS)
    known = {module for module, _ in named} | set(layers)
    moved = _moved_away(evidence)
    rows = [
        row
        for row in evidence.came(Role.BUFFER, Role.PARAMETER)
        if row.before is None
        and row.what.module in known
        and ((row.what.module, row.what.source) not in named or _is_in_known(row, layers))
        and f"{row.what.module}.{row.what.source}" not in otherwise
        and not _is_one_more_of(evidence, row)
        and row not in moved
    ]
    if not rows:
        return None
    first = causes.shown_by(rows)
    if first.what.source:
        role = first.what.role
        alike = (f"{row.module}.{row.what.source}" for row in rows if row.what.role == role)
        name, *others = dict.fromkeys((f"{first.module}.{first.what.source}", *alike))
        are = f"and {len(others)} more are" if others else "is"
        tensor = f"{evidence.short(name)} {are}"
        return cause("new tensor", rows, role=f"{role}s" if others else role, tensor=tensor)
    reader = next(iter(evidence.ran.readers(evidence.first(first))), None)
    tensor = f"{first.what.tensor}, of no module, is"
    return cause("new tensor", rows, None, reader, role=first.what.role, tensor=tensor)


def _moved_away(evidence: Evidence) -> list[Row]:
    """Return parameters of layers of torch that were called and had gone at every moment."""
    known = {(what.module, what.source) for what in evidence.known()}
    before, now = evidence.then(Topic.LAYERS), evidence.present(Topic.LAYERS)
    return [
        row
        for row in evidence.came(Role.PARAMETER)
        if before.get(row.what.module) == now.get(row.what.module, ())
        and all(one.is_of_torch for one in now[row.what.module])
        and (row.what.module, row.what.source) not in known
    ]


@rule("moved away", "the parameters of {modules} are still there then, and had been moved away")
def no_longer_moved_away(evidence: Evidence) -> Cause | None:
    """A module that is not in use at the peak is no longer sent to the CPU before it."""
    rows = _moved_away(evidence)
    modules = causes.some([*dict.fromkeys(row.what.module.partition(".")[0] for row in rows)])
    return cause("moved away", rows, modules=modules)


@rule("parameter", "{module}.{name} is a parameter, and was a buffer", sure=True)
def no_longer_a_buffer(evidence: Evidence) -> Cause | None:
    """What a module computes with is trained, and a graph is made of all that follows."""
    was = {what[1:5] for what in evidence.known() if what.role == Role.BUFFER}
    own = (one for one in evidence.alive.groups if one.what.role == Role.PARAMETER)
    for group in (one for one in own if one.what[1:5] in was):
        module, what = evidence.module(group.what.module, group.numbers), group.what
        found = cause("parameter", evidence.came(), module=module, name=what.source)
        return found and causes.placed_in(what.module, found)
    return None


@rule("twice", "the parameters of {module} are there {now}, and were {before}", sure=True)
def parameters_twice(evidence: Evidence) -> Cause | None:
    """A model is copied, or another one of its kind is made."""
    if left_at_end(evidence) is not None:
        return None
    moment = evidence.difference.moment
    known, most = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for one in evidence.known_groups:  # of several lines
        known[one.what[1:5]] += one.counts.get(moment, 0)
        most[one.what[1:5]] += max(one.counts.values(), default=0)
    rows = [
        row
        for row in evidence.came(Role.PARAMETER, Role.BUFFER)
        if row.before is None
        and known[row.what[1:5]] > 0
        and known[row.what[1:5]] + row.count_now > most[row.what[1:5]]
    ]
    if not rows or new_tensor(evidence) is not None or untied(evidence) is not None:
        return None
    first = causes.shown_by(rows)
    roots = {row.what.module.partition(".")[0] for row in rows}
    before = known[first.what[1:5]]
    now = before + first.count_now
    if now % before == 0:
        now, before = now // before, 1
    module = min(roots) if len(roots) == 1 else first.module
    return cause("twice", rows, module=module, now=times(now), before=times(before))


def _is_one_more_of(evidence: Evidence, row: Row) -> bool:
    """Tell whether as much was there before in all modules of these numbers: of another model."""
    before, now = (
        {one.numbers for one in side if one.what[1:5] == row.what[1:5]}
        for side in (evidence.known_groups, evidence.alive.groups)
    )
    return bool(before) and before == now


def _is_in_known(row: Row, layers: Mapping[str, tuple[facts.Layer, ...]]) -> bool:
    """Tell whether the modules of a row's numbers, or those around them, were there before."""
    if "*" not in row.what.module or not row.numbers or row.numbers == ALL:
        return False
    for path in (path for path in prefixes(row.what.module)[::-1] if path in layers):
        own = read_numbers(row.numbers)[: path.count("*")]
        there = [read_numbers(one.numbers) for one in layers[path]]
        return bool(own) and all(
            star <= set().union(*(one[place] for one in there if len(one) > place))
            for place, star in enumerate(own)
        )
    return False


@rule("torch", "torch is {now}, and was {before}")
def another_torch(evidence: Evidence) -> Cause | None:
    """Nothing that is known of the step changed but the version of torch."""
    before, now = evidence.before, evidence.now
    if before.torch == now.torch or before.workload != now.workload or evidence.facts:
        return None
    return cause("torch", evidence.came(), before=before.torch, now=now.torch)


def lost_modes(evidence: Evidence, name: str) -> Iterator[tuple[FactChange, facts.InMode]]:
    """Yield the modes of a name that modules had and have no more, with the numbers of those."""
    for change in evidence.about(Topic.MODES):
        for one in causes.lost_of(change, name):
            yield change, one


def _is_in(name: str, modes: Iterable[facts.InMode]) -> bool:
    return any(one.name == name for one in modes)
