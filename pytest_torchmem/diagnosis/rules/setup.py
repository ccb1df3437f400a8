"""Causes that the facts of a step name: its inputs, modes, parameters and optimizers changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from pytest_torchmem.diagnosis.causes import (
    Cause,
    Evidence,
    cause,
    largest,
    placed_in,
    rule,
    shown_by,
    times,
    within,
)
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.diagnosis.rules.layer_texts import (
    is_switched,
    new_modules,
    set_otherwise,
)
from pytest_torchmem.diagnosis.rules.lifetimes import left_at_end
from pytest_torchmem.profile.facts import (
    AUTOCAST,
    CALLS,
    COMPILED,
    FORMATS,
    FROZEN,
    IN_PLACE,
    INPUTS,
    LAYERS,
    MODES,
    MODULES,
    OPTIMIZERS,
    PACKED,
    SETTINGS,
    SIZES,
    STATES,
    TIED,
    UNCACHED,
    FactChange,
    Geometry,
    InMode,
    Layer,
    lacking,
    new_in,
)
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.module_paths import ALL, fold, prefixes, read_numbers

OF_TRAINING = (Role.GRADIENT.value, Role.OPTIMIZER_STATE.value, Role.OPTIMIZER_TEMPORARY.value)
_DECIDES = {
    "CUBLAS": (Role.LIBRARY.value, Role.WORKSPACE.value),
    "CUDNN": (Role.WORKSPACE.value,),
    "cudnn.enabled": (),
    "cudnn": (Role.WORKSPACE.value,),
}
"""By parts of settings' names: what they decide, where that is not everything."""
_NOTHING = "nothing of that"
_OF_NO_INPUT = (Role.PARAMETER.value, Role.BUFFER.value, Role.LIBRARY.value)
_SLACK = 2
"""For kernels that take more with other sizes."""


@rule("process settings", "{setting} is {now}, and was {before}", sure=True)
def other_settings(evidence: Evidence) -> Cause | None:
    """Which kernels run, or what a library of NVIDIA takes, is set otherwise."""
    found = []
    for change in evidence.about(SETTINGS):
        roles = next((own for part, own in _DECIDES.items() if part in change.name), ())
        now, before = change.now or "not set", change.before or "not set"
        rows = evidence.came(*roles)
        found.append(cause("process settings", rows, setting=change.name, now=now, before=before))
    return largest(found)


@rule("inputs", "the input changed, {change}", sure=True)
def inputs_changed(evidence: Evidence) -> Cause | None:
    """A batch, a sequence or a type of the inputs is another one."""
    inputs = (one for one in evidence.about(INPUTS) if one.before and one.now)
    changed = [one for one in inputs if not _is_made_by_itself(evidence, one)]
    changed = changed or [one for one in evidence.about(INPUTS) if _is_one_more(one)]
    if not changed or not _can_explain(evidence, changed):
        return None
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    text = _step_of_input(changed[0]) + more + _fewer_calls(evidence, changed[0].name)
    return cause("inputs", evidence.came(), change=text)


def _can_explain(evidence: Evidence, changes: Iterable[FactChange]) -> bool:
    """Tell whether inputs that grew so can have made the figure grow so: nothing that is computed
    of them grows faster than the square of their numbers, as attention does.
    """
    grown = 1.0
    for change in changes:
        types, now = ({one.dtype for one in side} for side in (change.before, change.now))
        if not types or types != now:
            return True  # another type
        before, after = (max(prod(one.shape) for one in side) for side in change[2:])
        grown = max(grown, after / max(before, 1))
    found, alive = evidence.difference, evidence.before.alive
    groups = alive.groups if alive is not None else ()
    apart = sum(one.nbytes(found.moment) for one in groups if one.what.role in _OF_NO_INPUT)
    return found.change <= _SLACK * (grown**2 - 1) * (found.before - apart)


def _is_made_by_itself(evidence: Evidence, change: FactChange) -> bool:
    """Tell whether a module has made what it is given, as it does a cache."""
    module = change.name.partition(" of ")[2].partition("[")[0]
    made = evidence.ran.first_made(change.now[-1]) if module else None
    return made is not None and bool(made.module) and within(module, made.module)


def _is_one_more(change: FactChange) -> bool:
    """Tell whether the step itself is given something new, and not a module that it calls."""
    return bool(change.now) and not change.before and " of " not in change.name


def _fewer_calls(evidence: Evidence, name: str) -> str:
    """Return in words that the module of an input is called less often, with more at once."""
    for change in evidence.about(CALLS):
        before, now = change.before.number, change.now.number
        if name.endswith(f" of {change.name}") and 0 < now < before:
            return f", in {now} {'call' if now == 1 else 'calls'} instead of {before}"
    return ""


def _step_of_input(change: FactChange) -> str:
    before, now = (shown_geometries(side) for side in (change.before, change.now))
    if not before:
        return f"{change.name} {now} is new"
    if len(change.now) == 1 and change.now[0].dtype == change.before[0].dtype:
        now = now.removeprefix(change.now[0].dtype)
    return f"{change.name} {before} → {now}"


def shown_geometries(geometries: Iterable[Geometry]) -> str:
    """Return what a step is given by one name as people read it."""
    return "; ".join(map(str, geometries))


_OF_LOSSES = frozenset({"target", "targets", "reduction"})
"""What operators of torch are given that are losses (native_functions.yaml)."""
_PART_OF_LOSS = "aten::_log_softmax"
"""The large part of a cross entropy, and given nothing of that kind (``cross_entropy_loss``)."""


@rule("loss", "another loss is computed: {operator} is called {now}, and was {before}", sure=True)
def another_loss(evidence: Evidence) -> Cause | None:
    """The same outputs go into one more loss, or a penalty."""
    calls = evidence.about(CALLS)
    counts = {name: one for name, one in evidence.counts().items() if _is_loss(name)}
    rising = [name for name, one in counts.items() if one.before and one.rose]
    if not rising or calls or evidence.about(INPUTS):
        return None
    makers = evidence.makers_before(rising[0])
    if any(within(new, one) for new, _ in new_modules(evidence) for one in makers):
        return None  # a new module makes what it is called with, and says why
    places = [origin for name in rising for origin in evidence.ran.places(name) if origin.line]
    rows = [row for row in evidence.came() if row.what.line in {one.line for one in places}]
    known = {*evidence.moved_lines().values()}
    new = (one for one in places if one.operator == rising[0] and one.line not in known)
    one = counts[rising[0]]
    now, before = times(one.now), times(one.before)
    found = cause("loss", rows, operator=rising[0], now=now, before=before)
    return found and replace(found, origin=next(new, None))


def _is_loss(operator: str) -> bool:
    if operator == _PART_OF_LOSS:
        return True
    import torch  # the plugin is imported without it, and says so where it is not there

    from pytest_torchmem.torch_private.dispatch.operators import schema

    namespace, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.partition(".")[0], None)
    schemas = (schema(getattr(packet, one)) for one in packet.overloads()) if packet else ()
    return any(_OF_LOSSES & {one.name for one in each.arguments} for each in schemas)


@rule("autocast", "{module} runs without autocast, and ran with {mode}", sure=True)
def autocast_left(evidence: Evidence) -> Cause | None:
    """A module is no longer called within autocast."""
    left = [
        (change.name, one.numbers, one.detail)
        for change, one in lost_modes(evidence, AUTOCAST)
        if one.detail != "off" and not _autocasts_to(one.detail, change.now)
    ] or [
        (change.name, one.numbers, "it")
        for change in evidence.about(MODES)
        for one in new_in(change.now, change.before)
        if (one.name, one.detail) == (AUTOCAST, "off")
    ]
    return largest(
        cause(
            "autocast",
            rows_of(evidence, name),
            module=evidence.module(name, numbers),
            mode=mode,
        )
        for name, numbers, mode in left
    )


@rule(
    "autocast uncached",
    "autocast casts the parameters of {module} anew in each call (cache_enabled=False)",
    sure=True,
)
def autocast_uncached(evidence: Evidence) -> Cause | None:
    """Autocast has no cache any more: ``cache_enabled=False``."""
    return largest(
        cause(
            "autocast uncached",
            [row for row in rows_of(evidence, change.name) if row.what.source == "aten::_to_copy"],
            module=evidence.module(change.name, lost.numbers),
        )
        for change, lost in lost_modes(evidence, AUTOCAST)
        if any(one[:-1] == (AUTOCAST, lost.detail + UNCACHED) for one in change.now)
    )


def _autocasts_to(dtype: str, modes: Iterable[InMode]) -> bool:
    """Tell whether one of ``modes`` is autocast to a type, cached or not."""
    cached = {one.detail.removesuffix(UNCACHED) for one in modes if one.name == AUTOCAST}
    return dtype.removesuffix(UNCACHED) in cached


@rule("training mode", "{module} is in training mode, and was in eval mode", sure=True)
def training_mode(evidence: Evidence) -> Cause | None:
    """``eval()`` is no longer called; of what was frozen, too, that is the lesser news."""
    trained = [one.name for one in thawed(evidence)]
    return largest(
        cause(
            "training mode",
            rows_of(evidence, change.name),
            module=evidence.module(change.name, lost.numbers),
        )
        for change, lost in lost_modes(evidence, "eval")
        if not any(within(change.name, one) or within(one, change.name) for one in trained)
    )


def thawed(evidence: Evidence) -> list[FactChange]:
    """Return what was frozen and is no more."""
    now = evidence.now.facts.get(FROZEN, {})
    return [change for change in evidence.about(FROZEN) if change.name not in now]


@rule("packed", "{module} no longer runs within {hooks}", sure=True)
def no_longer_packed(evidence: Evidence) -> Cause | None:
    """What a module saves for the backward stays on the device: it is not offloaded any more."""
    return largest(
        cause(
            "packed",
            rows_of(evidence, change.name),
            module=evidence.module(change.name, lost.numbers),
            hooks=lost.detail,
        )
        for change, lost in lost_modes(evidence, PACKED)
    )


@rule("checkpoint", "{module} is no longer checkpointed{why}", sure=True)
def checkpointing_lost(evidence: Evidence) -> Cause | None:
    """Modules keep their activations that a backward recomputed before."""
    lost: dict[str, str] = {}
    for word in ("recomputed in part", "recomputed"):
        for change, one in lost_modes(evidence, word):
            if one not in change.before or one[:-1] not in [other[:-1] for other in change.now]:
                lost[change.name] = one.numbers
    lost = {
        name: numbers for name, numbers in lost.items() if not _is_in_checkpoint(evidence, name)
    }
    if not lost:
        return None
    place = _around(lost)
    rows = rows_of(evidence, place)
    anew = sum(row.change for row in rows if row.what.role == Role.RECOMPUTED.value)
    if 2 * anew > sum(row.change for row in rows):
        return None  # by a checkpoint that spans more
    numbers = lost.get(place) or next(iter(lost.values()))
    shown = evidence.module(place, "/".join(numbers.split("/")[: place.count("*")]))
    own = [change for change in evidence.about(MODES) if change.name in lost]
    whole = [one.name for one in own if _is_in("recomputed", one.before)]
    part = not whole or (place not in whole and _has_others(evidence, place, whole))
    shown = f"a part of {shown}" if part else shown
    return cause("checkpoint", rows, module=shown, why=_why_not_checkpointed(evidence, place))


def _why_not_checkpointed(evidence: Evidence, place: str) -> str:
    """Return in words what of a module is checkpointed still, or the mode that ended it."""
    modes = evidence.now.facts.get(MODES, {})
    inside = [name for name in modes if within(place, name) and name != place]
    kept = [name for name in inside if _is_in("recomputed", modes[name])]
    if kept:
        return f": of it only {evidence.short(_around(kept))} is"
    for change in evidence.about(MODES):
        is_new = _is_in("eval", change.now) and not _is_in("eval", change.before)
        if is_new and (within(change.name, place) or within(place, change.name)):
            return ": it is in eval mode, and was not"
    return ""


def _has_others(evidence: Evidence, place: str, modules: Iterable[str]) -> bool:
    """Tell whether there are modules in one that are none of these, and in none of them."""
    layers = (path for path in evidence.before.facts.get(LAYERS, {}) if path != place)
    inside = (path for path in layers if within(place, path))
    return any(not any(within(one, path) for one in modules) for path in inside)


@rule(
    "reentrant",
    "{module} is checkpointed with use_reentrant={now}, and was with {before}",
    sure=True,
)
def another_checkpoint(evidence: Evidence) -> Cause | None:
    """A checkpoint keeps the graph of the forward, or runs it under ``no_grad``."""
    for change in evidence.about(MODES):
        same = [one for one in change.now if one.name == "recomputed" and one in change.before]
        reentrant = _is_in("no_grad", change.now)
        if same and reentrant is not _is_in("no_grad", change.before):
            module = evidence.module(change.name, same[0].numbers)
            values = {"module": module, "now": str(reentrant), "before": str(not reentrant)}
            return cause("reentrant", rows_of(evidence, change.name), **values)
    return None


@rule("compiled", "{change}", sure=True)
def compiled_otherwise(evidence: Evidence) -> Cause | None:
    """``torch.compile`` is new or gone, or cuts what it compiles into more graphs."""
    for change in evidence.about(COMPILED):
        before, now = change.before.number, change.now.number
        lines = (change.now if now else change.before).lines
        at = f" at {lines[0]}" if lines else ""
        if not now:
            text = f"torch.compile{at} compiles nothing more"
        elif not before:
            text = f"torch.compile{at} is new"
        elif now > before:
            text = f"torch.compile{at} makes {now} graphs, and made {before}"
        else:
            continue
        return cause("compiled", evidence.came(), change=text)
    return None


def _is_in_checkpoint(evidence: Evidence, name: str) -> bool:
    """Tell whether a module around this one is recomputed as a whole now."""
    modes = evidence.now.facts.get(MODES, {})
    around = prefixes(name)[:-1]
    return any(_is_in("recomputed", modes[path]) for path in around if path in modes)


def _around(modules: Iterable[str]) -> str:
    """Return the module that all are in: of a function, a checkpoint shows what it calls."""
    first, *others = (one.split(".") for one in modules)
    for other in others:
        same = [a == b for a, b in zip(first, other, strict=False)]
        first = first[: same.index(False)] if False in same else first[: len(same)]
    return ".".join(first)


@rule("tied", "{parameter} is no longer tied to {other}", sure=True)
def untied(evidence: Evidence) -> Cause | None:
    """Two parameters that were one are two."""
    for change in evidence.about(TIED):
        if not change.before or change.now:
            continue
        other = change.before
        owner = change.name.rpartition(".")[0]
        own = [row for row in evidence.came(Role.PARAMETER.value) if is_of(row, owner)]
        shapes = {row.what.shape for row in own}
        rows = [
            row
            for row in evidence.came(Role.PARAMETER.value, *OF_TRAINING)
            if row.what.shape in shapes
        ]
        found = cause("tied", rows, parameter=change.name, other=other)
        if found is not None:
            rows = [row for row in rows if is_of(row, owner)]
            values = {"parameter": evidence.short(change.name), "other": evidence.short(other)}
            return replace(found, values=values, row=shown_by(rows))
    return None


@rule("memory format", "{what} is {now}, and was {before}")
def another_memory_format(evidence: Evidence) -> Cause | None:
    """A model or its input is no longer channels last, and what meets is converted."""
    for change in evidence.about(FORMATS):
        now, before = (text or "contiguous" for text in (change.now, change.before))
        return cause("memory format", evidence.came(), what=change.name, now=now, before=before)
    return None


@rule("optimizer", "{change}", sure=True)
def another_optimizer(evidence: Evidence) -> Cause | None:
    """Another optimizer, or another implementation of it."""
    changed = evidence.about(OPTIMIZERS)
    if not changed:
        return None
    rows = evidence.came(Role.OPTIMIZER_STATE.value, Role.OPTIMIZER_TEMPORARY.value)
    before = ", ".join(f"{one.name} ({', '.join(one.before)})" for one in changed if one.before)
    now = ", ".join(f"{one.name} ({', '.join(one.now)})" for one in changed if one.now)
    others = [*evidence.before.facts.get(OPTIMIZERS, {})]
    if others and not before:
        change = f"{now} is another optimizer beside {', '.join(others)}"
    else:
        change = f"the optimizer is {now or 'none'}, and was {before or 'none'}"
    return cause("optimizer", rows, change=change)


@rule("state", "the state of {optimizer} has {came}, and had {before}", sure=True)
def another_state(evidence: Evidence) -> Cause | None:
    """The same optimizer keeps more of each parameter than it did."""
    for change in evidence.about(STATES):
        came = [name for name in change.now if name not in change.before]
        if not came or (not change.before and evidence.about(OPTIMIZERS)):
            continue
        rows = evidence.came(Role.OPTIMIZER_STATE.value, Role.OPTIMIZER_TEMPORARY.value)
        had = ", ".join(change.before) or "nothing"
        return cause("state", rows, optimizer=change.name, came=", ".join(came), before=had)
    return None


@rule("settings", "{module} has {now}, and had {before}", sure=True)
def another_setting(evidence: Evidence) -> Cause | None:
    """A configuration of transformers asks for another attention, or for more outputs."""
    found = []
    for change in evidence.about(MODULES):
        gone = ", ".join(part for part in change.before if part not in change.now) or "not"
        new = ", ".join(part for part in change.now if part not in change.before)
        rows = rows_of(evidence, change.name)
        found.append(cause("settings", rows, module=change.name, before=gone, now=new or _NOTHING))
    return largest(found)


@rule("in place", "{operator} is no longer in place ({lost} of {calls} calls)", sure=True)
def no_longer_in_place(evidence: Evidence) -> Cause | None:
    """An operator that wrote to what it was given makes a tensor of its own."""
    for change in evidence.about(IN_PLACE):
        calls, left = change.before, change.now
        plain = change.name.removesuffix("_")
        rows = [row for row in evidence.came() if row.what.source.partition(".")[0] == plain]
        if calls > left and rows and not _is_written_anew(evidence, shown_by(rows)):
            lost = str(calls - left)
            return cause("in place", rows, operator=plain, lost=lost, calls=str(calls))
    return None


def _is_written_anew(evidence: Evidence, row: Row) -> bool:
    """Tell whether a row's module, or line, calls operators, too, that nothing called before, not
    even in place.
    """
    own = row.what.source.partition(".")[0]
    in_place = {change.name.removesuffix("_") for change in evidence.about(IN_PLACE)}
    new = (
        name
        for name, one in evidence.counts().items()
        if not one.before and name.partition(".")[0] not in in_place
    )
    return any(
        fold(origin.module)[0] == row.what.module
        and (origin.module or origin.line == row.what.line)
        for name in new
        if name.partition(".")[0] != own
        for origin in evidence.ran.places(name)
    )


@rule("size", "{module}.{parameter} is {now}, and was {before}", sure=True)
def another_size(evidence: Evidence) -> Cause | None:
    """A layer became wider, or a table longer."""
    resized = [
        row
        for row in evidence.came(Role.PARAMETER.value, Role.BUFFER.value)
        if row.before is not None and row.now is not None and row.before.shape != row.now.shape
    ]
    if not resized:
        return _size_of_no_layer(evidence)
    first = max(resized, key=lambda row: row.change)
    assert first.before is not None
    otherwise = set_otherwise(evidence)
    if first.what.module in otherwise or is_switched(evidence, otherwise):
        return None  # settings say why
    found = cause(
        "size",
        evidence.came(),
        module=evidence.short(first.module),
        parameter=first.what.source,
        now=first.what.tensor,
        before=str(list(first.before.shape)),
    )
    return found and placed_in(evidence, first.what.module, found)


def _size_of_no_layer(evidence: Evidence) -> Cause | None:
    """Return what of the parameters became larger that a program uses itself: queries, positions.

    Small ones, too: what is computed of them is not.
    """
    if any(change.before for change in evidence.about(INPUTS)):
        return None
    for change in evidence.about(SIZES):
        before, now = (side[0] if side else None for side in (change.before, change.now))
        if before and now and prod(before.shape) < prod(now.shape):
            owner, _, name = change.name.rpartition(".")
            values = {"module": evidence.short(owner), "parameter": name}
            return cause("size", evidence.came(), now=now.text, before=before.text, **values)
    return None


@rule("new tensor", "the {role} {tensor} is new", sure=True)
def new_tensor(evidence: Evidence) -> Cause | None:
    """A module that was there before has another buffer or parameter, or one of its own."""
    if evidence.before.alive is None or left_at_end(evidence) is not None:
        return None
    named = {(what.module, what.source) for what in evidence.known()}
    facts = evidence.before.facts
    otherwise = {
        c.name for t in (FROZEN, TIED) for c in evidence.about(t) if c.name in facts.get(t, ())
    }
    layers = evidence.before.facts.get(LAYERS, {})
    known = {module for module, _ in named} | set(layers)
    rows = [
        row
        for row in evidence.came(Role.BUFFER.value, Role.PARAMETER.value)
        if row.before is None
        and row.what.module in known
        and ((row.what.module, row.what.source) not in named or _is_in_known(row, layers))
        and f"{row.what.module}.{row.what.source}" not in otherwise
        and not _is_one_more_of(evidence, row)
    ]
    if not rows:
        return None
    first = shown_by(rows)
    if first.what.source:
        name = evidence.short(f"{first.module}.{first.what.source}")
        return cause("new tensor", rows, role=first.what.role, tensor=name)
    found = cause(
        "new tensor", rows, role=first.what.role, tensor=f"{first.what.tensor}, of no module,"
    )
    return found and replace(found, origin=evidence.ran.reader_of(evidence.first(first)))


@rule("twice", "the parameters of {module} are there {now}, and were {before}", sure=True)
def parameters_twice(evidence: Evidence) -> Cause | None:
    """A model is copied, or another one of its kind is made."""
    alive = evidence.before.alive
    if alive is None or left_at_end(evidence) is not None:
        return None
    moment = evidence.difference.moment
    known = {one.what[1:5]: one.counts.get(moment, 0) for one in alive.groups}
    most = {one.what[1:5]: max(one.counts.values(), default=0) for one in alive.groups}
    rows = [
        row
        for row in evidence.came(Role.PARAMETER.value, Role.BUFFER.value)
        if row.before is None
        and known.get(row.what[1:5], 0) > 0
        and known[row.what[1:5]] + row.count_now > most[row.what[1:5]]
    ]
    if not rows or new_tensor(evidence) is not None or untied(evidence) is not None:
        return None
    first = shown_by(rows)
    roots = {row.what.module.partition(".")[0] for row in rows}
    before = known[first.what[1:5]]
    now = before + first.count_now
    if now % before == 0:
        now, before = now // before, 1
    module = min(roots) if len(roots) == 1 else first.module
    return cause("twice", rows, module=module, now=times(now), before=times(before))


def _is_one_more_of(evidence: Evidence, row: Row) -> bool:
    """Tell whether as much was there before in all modules of these numbers: of another model."""
    before = evidence.before.alive.groups if evidence.before.alive is not None else ()
    own = {one.numbers for one in before if one.what[1:5] == row.what[1:5]}
    return bool(own) and own == {
        one.numbers for one in evidence.alive.groups if one.what[1:5] == row.what[1:5]
    }


def _is_in_known(row: Row, layers: Mapping[str, tuple[Layer, ...]]) -> bool:
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


def lost_modes(evidence: Evidence, name: str) -> Iterator[tuple[FactChange, InMode]]:
    """Yield the modes of a name that modules had and have no more, with the numbers of those."""
    for change in evidence.about(MODES):
        for one in lacking(change.before, change.now):
            if one.name == name:
                yield change, one


def _is_in(name: str, modes: Iterable[InMode]) -> bool:
    return any(one.name == name for one in modes)


def rows_of(evidence: Evidence, module: str) -> list[Row]:
    """Return the rows of a module and of what is in it; of all, where it has none of its own."""
    return evidence.of_module(module)


def is_of(row: Row, module: str) -> bool:
    return within(module, row.what.module)


def once(rows: Iterable[Row]) -> list[Row]:
    return [*{id(row): row for row in rows}.values()]
