"""Causes in how long tensors live: what is still there that was not."""

from collections.abc import Iterable, Sequence

from pytest_torchmem.diagnosis import causes
from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, is_kept, rule, shown_by
from pytest_torchmem.diagnosis.difference import OF_BACKWARD, Row
from pytest_torchmem.diagnosis.provenance import STANDING
from pytest_torchmem.figures import END, HOST, PEAK, RETAINED
from pytest_torchmem.printable import counted
from pytest_torchmem.profile.facts import Calls, Topic
from pytest_torchmem.profile.module_paths import have_common
from pytest_torchmem.profile.timeline import Kind, Origin, Phase, Role
from pytest_torchmem.snapshots.alive import What

_FORWARD = ("forward_peak", "retained")
_OF_GRAPHS = (Role.EARLIER, Role.HELD, Role.SAVED)
_OF_MODELS = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.GRADIENT_TEMPORARY)


@rule("backwards", "{now}, and was {before}: graphs add up until it runs", sure=True)
def fewer_backwards(evidence: Evidence) -> Cause | None:
    """Losses are added up, and one backward goes through the graphs of all of them."""
    backwards = _backwards(evidence)
    rows = [*evidence.came(Role.SAVED, Role.ACTIVATION, Role.HELD)]
    called = [evidence.counted(row.what.source) for row in rows]
    if not (backwards.now and backwards.fell) or any(one and one.fell for one in called):
        return None
    if evidence.known_tensors.isdisjoint(row.what[1:5] for row in rows):
        return None  # as those of several graphs are
    before, now = map(causes.times, backwards)
    words = {"now": f"backward runs {now}", "before": f"run {before}"}
    return cause("backwards", rows, **words)


@rule("graph kept", "a backward with {option}=True at {line} {news} its graph{holder}", sure=True)
def graph_kept(evidence: Evidence) -> Cause | None:
    """A backward is asked to leave its graph what it has saved, or to make another graph."""
    for option in ("create_graph", "retain_graph"):
        were, calls = evidence.sides(Topic.BACKWARD, option, Calls())
        if not evidence.then(Topic.BACKWARD) or calls.number <= were.number:
            continue
        of_gradients = OF_BACKWARD if option == "create_graph" else ()
        rows = [*evidence.came(*_OF_GRAPHS, *of_gradients)]
        line = next(iter(calls.lines), "some line")
        holder = "" if of_gradients else _holder(evidence, rows).replace(causes.GRAPH, "")
        at = f" at {' and '.join(were.lines)}" if evidence.new_lines([line], were.lines) else ""
        ran = (
            f"runs {causes.times(calls.number)}, and ran {causes.times(were.number)}{at}: it keeps"
        )
        news = ran if were.number else "is new, and keeps"
        return cause("graph kept", rows, option=option, line=line, news=news, holder=holder)
    return None


@rule("per sample", "gradients are taken of {samples}", sure=True)
def gradients_of_each_sample(evidence: Evidence) -> Cause | None:
    """``torch.func.grad`` runs within ``torch.vmap``, for a ``chunk_size`` of samples at once."""
    before, now = evidence.sides(Topic.BACKWARD, "vmap", Calls())
    calls, were = now.number, before.number
    if not evidence.then(Topic.BACKWARD) or not calls or calls == were:
        return None
    more = f"more samples at once, {causes.times(calls)} instead of {causes.times(were)}"
    samples = more if calls < were else "each sample"
    place = Origin(Phase.FORWARD, "", "torch.vmap", next(iter(now.lines), ""))
    return cause("per sample", evidence.came(), None, place, samples=samples)


def _backwards(evidence: Evidence) -> causes.Counted:
    """Return how often a backward ran, then and now."""
    before, now = evidence.sides(Topic.BACKWARD, "calls", Calls())
    return causes.Counted(before.number, now.number)


def _runs_more_backwards(evidence: Evidence) -> bool:
    backwards = _backwards(evidence)
    return backwards.before > 0 and backwards.rose


@rule("gradients kept", "{gradients} are alive {when}: {why}")
def gradients_kept(evidence: Evidence) -> Cause | None:
    """``zero_grad(set_to_none=False)``, or none at all: gradients stay between two steps. Or there
    are more backwards in one, and the program keeps the gradients of each.
    """
    moment = evidence.difference.moment
    is_between = moment == PEAK and _runs_more_backwards(evidence)
    if moment not in (*_FORWARD, "backward_peak", END) and not is_between:
        return None
    phase = {END: "end", PEAK: "step", "backward_peak": "backward"}.get(moment, "forward")
    rows = _gradients(evidence)
    if phase == "backward":  # where they are made anyway: only what was there all along counts
        there = [one.what for one in evidence.alive.groups if "forward_peak" in one.counts]
        rows = [row for row in rows if row.now in there]
    rows = [row for row in rows if not _is_new_gradient(evidence, row)]
    if phase == "backward" and not rows and _stay_gradients(evidence):
        rows = [*evidence.came()]  # what the backward makes is added to them
    zeroed = evidence.ran.zeroed_gradients()
    if zeroed is not None and phase == "forward" and zeroed.phase is Phase.FORWARD:
        zeroed = None  # it comes too late for it
    if zeroed is not None:
        why = "they are set to zero, and not to none"
    elif holder := causes.holder_of(evidence, rows):
        why = holder
    else:
        why = "nothing sets them to none before it"
    when, gradients = f"in the {phase}", "gradients of an earlier backward"
    if phase == "end":
        groups = (one for one in evidence.alive.groups if one.what.role == Role.GRADIENT)
        number = sum(one.counts.get(END, 0) for one in groups)
        when, gradients = "at the end of the step", f"gradients ({counted(number, 'tensor')})"
    return cause("gradients kept", rows, None, zeroed, when=when, gradients=gradients, why=why)


@rule("gradients together", "gradients of {modules} are alive together, and were not", last=True)
def gradients_together(evidence: Evidence) -> Cause | None:
    """Gradients that another step is to use, or none, are there in a step of an optimizer."""
    moment, sides = evidence.difference.moment, (evidence.known_groups, evidence.alive.groups)
    then, now = (
        dict.fromkeys(
            one.what.module.partition(".")[0]
            for one in side
            if one.what.role == Role.GRADIENT and moment in one.counts
        )
        for side in sides
    )
    is_meant = moment in ("optimizer_peak", "backward_peak")
    if not is_meant or not then or not then.keys() < now.keys():
        return None
    rows = evidence.came(Role.GRADIENT)
    return cause("gradients together", rows, modules=" and ".join(now))


def _stay_gradients(evidence: Evidence) -> bool:
    """Tell whether gradients are there at the end of the forward, where there were none."""
    sides = (evidence.known_groups, evidence.alive.groups)
    gradients = ([one for one in side if one.what.role == Role.GRADIENT] for side in sides)
    then, now = (sum(one.counts.get(RETAINED, 0) for one in side) for side in gradients)
    return then == 0 < now


def _gradients(evidence: Evidence) -> list[Row]:
    """Return the gradients that came, but for those of parameters that came, too."""
    more = {(row.what.module, row.what.shape) for row in evidence.came(Role.PARAMETER)}
    rows = evidence.came(Role.GRADIENT)
    return [row for row in rows if (row.what.module, row.what.shape) not in more]


@rule("freed late", "gradients of {modules} are no longer freed within the backward")
def freed_after_the_backward(evidence: Evidence) -> Cause | None:
    """A hook that freed gradients early is gone (``register_post_accumulate_grad_hook``)."""
    alive, step = evidence.before.alive, "optimizer_peak"
    if alive is None or step not in alive.moments or _runs_more_backwards(evidence):
        return None
    known = (one for one in alive.groups if one.what.role == Role.GRADIENT)
    few = {one.what[1:5]: one.counts.get(step, 0) for one in known}
    rows = [
        row for row in _gradients(evidence) if few.get(row.what[1:5], row.count_now) < row.count_now
    ]
    names = [evidence.short(name) for name in dict.fromkeys(row.module for row in rows)]
    return cause("freed late", rows, modules=causes.some(names) or "parameters")


@rule("new gradient", "a gradient {tensor} is new: {why}", last=True)
def new_gradient(evidence: Evidence) -> Cause | None:
    """An input, or what the program itself has made, requires a gradient."""
    rows = [row for row in evidence.came(Role.GRADIENT) if _is_new_gradient(evidence, row)]
    if not rows:
        return None
    first = shown_by(rows)
    shape = first.what.shape
    rows += [row for row in evidence.came(Role.GRADIENT_TEMPORARY) if row.what.shape == shape]
    made = evidence.ran.written(first.what.module, first.what.source, first.what.line)
    operator = made.operator if made is not None else first.what.source
    then, now = (of(Topic.OPERATORS).get(operator) for of in (evidence.then, evidence.present))
    read = evidence.ran.read(evidence.first(first))
    why = f"what {operator} is given had none"
    if made is not None and first.what.source == _RETAINED:
        why = f"retain_grad keeps that of what {operator} made"
    elif then and now and then[:3] == now[:3] and not any(one.kind in STANDING for one in read):
        return None  # without a parameter it was recorded for what it is given, which is larger
    return cause("new gradient", rows, first, tensor=first.what.tensor, why=why)


_RETAINED = "aten::clone"
"""What makes it where an operator's output is asked for its gradient (csrc/autograd/variable.cpp,
``VariableHooks::retain_grad``)."""


def _is_new_gradient(evidence: Evidence, row: Row) -> bool:
    """Tell whether nothing of this shape had a gradient: it is not one that is kept longer."""
    if row.what[1:5] in evidence.known_tensors:
        return False
    gradients = {one.shape for one in evidence.known() if one.role == Role.GRADIENT}
    alive = (group.what for group in evidence.alive.groups)
    standing = {one.shape for one in alive if one.role in (Role.PARAMETER, Role.BUFFER)}
    return bool(row.what.shape) and row.what.shape not in gradients | standing


@rule("earlier steps", "{made}{holder}")
def earlier_steps(evidence: Evidence) -> Cause | None:
    """The graph of a step outlives it: a loss that was added up, a hidden state not detached."""
    rows = [row for row in evidence.came(Role.EARLIER) if not _is_larger(evidence, row)]
    in_step = any(row.what.module for row in rows)  # else it may have been made for all steps
    when = "of an earlier step" if in_step else "made before this step"
    counted = _counted(evidence, rows)
    is_more = not counted and any(one.role == Role.EARLIER for one in evidence.known())
    made = f"{'more ' if is_more else ''}tensors {when}{counted} are still alive"
    if rows and evidence.new_operators.issuperset(row.what.source for row in rows):
        when = "in an earlier step" if in_step else "before this step"  # no others were freed
        made = f"{rows[0].what.source} is new, and what it made {when} is still alive"
    if _were_on_host(evidence, rows):
        made = f"tensors {when}{counted} are on the GPU, and were on the CPU"
    if in_step and evidence.difference.moment == "backward_peak":  # which may go through it
        rows += evidence.came(Role.GRADIENT_TEMPORARY)
    return cause("earlier steps", rows, made=made, holder=_holder(evidence, rows))


def _were_on_host(evidence: Evidence, rows: Sequence[Row]) -> bool:
    """Tell whether such a tensor as the first is no longer in host memory."""
    then, now = (
        {one.what[1:5] for one in side if [*one.counts] == [HOST]}
        for side in (evidence.known_groups, evidence.alive.groups)
    )
    gone = {one[2:4] for one in then - now}
    return evidence.now.key.device == "cuda" and bool(rows) and rows[0].what[3:5] in gone


@rule("left", "{what} still there when the step has ended{holder}")
def left_at_end(evidence: Evidence) -> Cause | None:
    """What the step has made, and freed before its end: a model that something refers to."""
    if evidence.difference.moment != END:
        return None
    known = evidence.known_tensors
    rows = [row for row in evidence.came() if row.before is None and row.what[1:5] in known]
    if not rows:
        return None
    roots = {row.what.module.partition(".")[0] for row in rows}
    parameters = any(row.what.role == Role.PARAMETER for row in rows)
    if parameters and len(roots) == 1 and (root := min(roots)):
        what = f"{root} is"
    else:
        first = shown_by(rows)
        what = f"{first.what.tensor or 'memory'} of {first.what.source} is"
    holder = _holder(evidence, rows)
    if not holder and 4 * causes.total(rows) < 3 * evidence.growth:
        return None  # what is new refers to it
    return cause("left", rows, what=what, holder=holder)


@rule("held", "the program keeps {what}{holder}")
def held_by_program(evidence: Evidence) -> Cause | None:
    """A list, an attribute or a closure refers to tensors of the forward, or to what a hook was
    given, or to a model.

    That something refers to a larger tensor than before is no news, nor is the output of a model.
    """
    rows = [
        row
        for row in evidence.came(Role.HELD)
        if (not row.before or row.before.role != Role.HELD) and not evidence.narrower(row)
    ]
    if not rows and evidence.difference.moment != HOST:
        rows = [row for row in evidence.came(Role.ACTIVATION) if _lives_longer(evidence, row)]
        rows = [row for row in rows if is_kept(evidence, row) and not _replaces(evidence, row)]
    is_of_model = any(row.what.module for row in rows[:1])
    what = "what it made in the forward" if is_of_model else "what it made"
    if _were_on_host(evidence, rows):
        what = "on the GPU what was on the CPU"
    elif rows and evidence.new_operators.issuperset(row.what.source for row in rows):
        what = f"what {rows[0].what.source} makes, which is new"
    what += _counted(evidence, rows)
    if not rows:
        named = evidence.watched.holders
        rows = [row for row in evidence.came(*_OF_MODELS) if not row.before and row.now in named]
        what = f"{rows[0].what.role.removeprefix('temporary ')}s" if rows else ""
    holder = _holder(evidence, rows)
    if not holder and evidence.watched.ran:
        return None
    what += _meanwhile(evidence, rows)
    return cause("held", rows, holder=holder, what=what)


def _counted(evidence: Evidence, rows: list[Row]) -> str:
    """Return in words how many tensors of the first row's kind are alive, and were, if any."""
    moment, sides = evidence.difference.moment, (evidence.known_groups, evidence.alive.groups)
    for what in (row.what for row in rows[:1]):
        before, now = (
            sum(one.counts.get(moment, 0) for one in side if one.what[:5] == what[:5])
            for side in sides
        )
        if any(_is_replaced(one, now, what) for one in evidence.difference.rows):
            return f" ({causes.tensors(now, what)}, in the place of smaller ones)"
        if before:
            return f" ({causes.tensors(now, what)} alive, and {before} in the snapshot)"
    return ""


def _is_replaced(row: Row, count: int, by: What) -> bool:
    """Tell whether about as many tensors are gone, for which larger ones may stand."""
    about = count <= 2 * row.count_before <= 2 * count
    is_larger = count * by.nbytes > row.count_before * row.what.nbytes
    return row.now is None and about and is_larger and row.what.dtype == by.dtype


_JOIN = ("aten::cat", "aten::stack")
"""Operators that copy all that a list has into one tensor."""


def _meanwhile(evidence: Evidence, rows: list[Row]) -> str:
    """Return in words what is joined at the peak, if it is as large as all that is kept."""
    last = evidence.last
    if last is None or last.origin.operator not in _JOIN or last.nbytes < causes.total(rows):
        return ""
    return f" while {last.origin.operator} makes {last.tensor}"


@rule("held between", "{what}")
def held_between(evidence: Evidence) -> Cause | None:
    """What is made after a backward stays: a copy of the weights, an average, a metric."""
    rows = [row for row in evidence.came(Role.OTHER) if not _is_larger(evidence, row)]
    rows = [row for row in rows if not _replaces(evidence, row)]
    if not rows:
        return None
    holder, names = _holder(evidence, rows), evidence.watched.holders
    held = (row for row in rows if holder and row.now and holder.endswith(names.get(row.now, "-")))
    first = next(held, shown_by(rows))
    kinds = {one.kind for one in evidence.ran.read(evidence.first(first))}
    of = _MADE_OF.get(kinds.pop(), "") if len(kinds) == 1 else ""
    if holder and not (holder.startswith(": the variable ") or holder.endswith(" makes")):
        what = f"the program keeps what it made{of} after the backward{holder}"
    else:
        more = causes.tensors(first.count_now - first.count_before, first.what)
        what = f"{first.what.source} makes {more}{of}{holder or ' after the backward'}"
    return cause("held between", rows, first, what=what)


_MADE_OF = {Kind.GRADIENT: " of gradients", Kind.PARAMETER: " of parameters"}


@rule("saved by a function", "{function} saves {tensors} of {made} for its backward, and did not")
def saved_by_a_function(evidence: Evidence) -> Cause | None:
    """An ``autograd.Function`` of the program saves more (``save_for_backward``)."""
    savers = evidence.watched.savers
    rows = [
        row
        for row in evidence.came(Role.SAVED)
        if row.now in savers and _is_more(row) and not is_resized(evidence, row)
    ]
    if not rows or evidence.has_other_inputs:
        return None
    first = shown_by(rows)
    function, line = savers[first.what]
    same = [row for row in rows if savers[row.what][1] == line]
    place = Origin(Phase.FORWARD, first.what.module, f"{function}.save_for_backward", line)
    made = " and ".join(dict.fromkeys(row.what.source for row in same))
    words = {"function": function, "tensors": first.what.tensor, "made": made}
    return cause("saved by a function", same, first, place, **words)


@rule("lives longer", "{what}", last=True)
def lives_longer(evidence: Evidence) -> Cause | None:
    """The forward called the same operators no more often, and what they made is freed later."""
    anew = evidence.ran.places_of(evidence.new_operators)
    made = evidence.came(Role.SAVED, Role.ACTIVATION)
    rows = [row for row in made if _lives_longer(evidence, row) and row.place not in anew]
    if not rows or evidence.has_other_inputs or evidence.difference.moment == HOST:
        return None
    known = evidence.known_tensors  # at another moment
    first = shown_by([row for row in rows if row.what[1:5] in known] or rows)
    count, holder = first.count_now - first.count_before, _holder(evidence, [first])
    counted = evidence.counted(first.what.source)
    is_known = first.what[1:5] in known or (counted is not None and counted.fell)
    what = f"{causes.tensors(count, first.what)} of {first.what.source}"
    is_saved = first.what.role == Role.SAVED
    user = evidence.ran.saver(evidence.first(first)) if is_saved else None
    if user is not None and user.operator != first.what.source:
        what = f"{user.operator} saves {what} for its backward"
    elif is_kept(evidence, first) and not is_known:
        what = f"the program keeps {what}{holder}"
    else:
        verb, are = ("lives", "is") if count == 1 else ("live", "are")
        longer = f"{verb} longer than before"
        if not is_known:  # what is freed at once is in no snapshot
            longer = f"{are} larger than before, or {are} freed later"
        reader = [None, *evidence.ran.readers(evidence.first(first))][-1]
        if reader is not None and evidence.rose(reader.operator) and not holder:
            start = f"{longer}," if is_known else verb
            them = "it" if count == 1 else "them"
            longer = f"{start} until {reader.operator} reads {them}"
            what += f" ({first.what.line})"
            user = reader
        what = f"{what} {longer}{holder}"
    return cause("lives longer", rows, first, user, what=what)


@rule("kept", "the program keeps {what}{holder}", last=True)
def kept_by_program(evidence: Evidence) -> Cause | None:
    """Something refers to more results on the host, or to what a hook of an optimizer made."""
    on_host = evidence.difference.moment == HOST
    grown = evidence.came() if on_host else evidence.came(Role.OPTIMIZER_STATE)
    rows = [row for row in grown if _is_more(row) and is_kept(evidence, row)]
    if not rows or evidence.has_other_inputs:
        return None
    more, holder = rows[0].count_now - rows[0].count_before, _holder(evidence, rows)
    of = f" of {rows[0].what.source}" if rows[0].what.source else ""
    what = f"{causes.tensors(more, rows[0].what)}{of}{_meanwhile(evidence, rows)}"
    return cause("kept", rows, rows[0], what=what, holder=holder)


def _is_larger(evidence: Evidence, row: Row) -> bool:
    """Tell whether an operator that is called as often made narrower or smaller tensors alone."""
    made = _no_more_often(evidence, row) and evidence.made_at_most(row)
    return bool(made or evidence.narrower(row))


def _replaces(evidence: Evidence, row: Row) -> bool:
    """Tell whether much of what came is in the place of equal tensors that are gone."""
    rows = (one for one in evidence.difference.rows if one.what.role not in _OF_MODELS)
    same = [one.change for one in rows if one.what.tensor == row.what.tensor]
    return 2 * sum(same) < sum(change for change in same if change > 0)


@rule("recomputed", "{tensors} of {operator}, recomputed, {are}{before}")
def more_recomputed(evidence: Evidence) -> Cause | None:
    """A checkpoint spans more of the model: all that it computes anew is alive together."""
    rows = [row for row in evidence.came(Role.RECOMPUTED) if _is_more(row)]
    if not rows or evidence.has_other_inputs:
        return None
    first = max(rows, key=lambda row: row.change)
    same = (one for one in evidence.difference.moved if one.what[1:5] == first.what[1:5])
    before = first.count_before + sum(one.count_before for one in same)
    count = before + first.count_now - first.count_before
    return cause(
        "recomputed",
        rows,
        tensors=causes.tensors(count, first.what),
        operator=first.what.source,
        are="is alive then" if count == 1 else "are alive together",
        before=f", and {'was' if before == 1 else 'were'} {before}" if before else "",
    )


def is_resized(evidence: Evidence, row: Row) -> bool:
    """Tell whether the operator made something of another size or type there, at any moment."""
    own = row.what
    gone = {*evidence.gone(own.module, own.source)}
    return any(
        (one.what.shape, one.what.dtype) != (own.shape, own.dtype)
        and have_common(row.numbers, one.numbers)
        for one in evidence.known_groups
        if one.what in gone
    )


def _no_more_often(evidence: Evidence, row: Row) -> bool:
    """Tell whether a row's operator is called as often, or less often where its output is kept."""
    counted = evidence.counted(row.what.source)
    if counted is None or not 0 < counted.now <= counted.before:
        return not row.what.source and is_kept(evidence, row)  # what ``torch.load`` makes
    return not counted.fell or is_kept(evidence, row)


def _lives_longer(evidence: Evidence, row: Row) -> bool:
    """Tell whether as many tensors were made as before, of the same size, and more are alive; or
    more were, most of which was let go.
    """
    same = _is_more(row) and not is_resized(evidence, row) and not evidence.made_at_most(row)
    counted = evidence.counted(row.what.source)
    was_freed = counted is not None and 2 * row.count_before <= counted.before > 0
    is_kept_now = was_freed and is_kept(evidence, row)
    return same and (is_kept_now or _no_more_often(evidence, row))


def _is_more(row: Row) -> bool:
    """Tell whether there are more of the same tensors, rather than larger ones."""
    before, now = row.before, row.now
    return before is None or (now is not None and before.nbytes == now.nbytes)


def _holder(evidence: Evidence, rows: Iterable[Row]) -> str:
    rows = [*rows]
    holder = causes.holder_of(evidence, rows)
    held = sum(row.bytes_now for row in rows if causes.holder_of(evidence, [row]) == holder)
    is_much = 4 * held >= sum(row.bytes_now for row in rows) or holder.startswith(causes.GRAPH)
    return f": {holder}" if holder and is_much else ""  # else of most it is not known
