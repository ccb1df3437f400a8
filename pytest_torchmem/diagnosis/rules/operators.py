"""Causes in which operators the forward calls: another attention, a cache, or what else is new."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from operator import eq

from pytest_torchmem.diagnosis import causes
from pytest_torchmem.diagnosis.causes import MADE, Cause, Counted, Evidence, cause, rule
from pytest_torchmem.diagnosis.difference import OF_BACKWARD, Row
from pytest_torchmem.diagnosis.rules.types import is_known, makes_no_more
from pytest_torchmem.figures import HOST
from pytest_torchmem.printable import listed
from pytest_torchmem.profile.facts import Counts, Topic
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Role
from pytest_torchmem.snapshots.alive import What
from pytest_torchmem.units import format_size

_KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
}
"""The operators of fused attention, by what they are called."""
_MASK = 3
"""The place of their mask, after queries, keys and values (native_functions.yaml)."""
_ORDER = ("flash", "cuDNN", "memory-efficient")
_SOFTMAX = ("aten::_safe_softmax", "aten::_softmax")


@rule("attention", "attention fell from {before} to {now}{reason}", sure=True)
def attention_fell(evidence: Evidence) -> Cause | None:
    """A call of attention that a fused kernel took takes another way, which keeps more."""
    sources = [what.source for what in evidence.known()]
    if evidence.then(Topic.OPERATORS):  # what is called as often: the softmax is another one
        sources = [name for name, one in evidence.counts().items() if one.fell]
    kernels = {_KERNELS.get(name) for name in sources}
    before = next((name for name in _ORDER if name in kernels), "")
    if not before:
        return None
    for row in evidence.came():
        source = row.what.source.partition(".")[0]
        is_math = source in _SOFTMAX and row.what.dtype
        now = "math" if is_math else _KERNELS.get(source, "")
        if not now or now == before:
            continue
        at_line = [one for one in evidence.came() if one.place == row.place]
        if source == "aten::_softmax":  # math is ``_safe_softmax``; attention.cpp
            now = "eager, a softmax of its own"
        reason = _reason(evidence, row.what.line)
        begun = _begin_of_type(evidence, source) if reason.startswith(": the dtype is ") else None
        reason += f", beginning with {begun.operator}" if begun is not None else ""
        return cause("attention", at_line, row, begun, before=before, now=now, reason=reason)
    return _by_calls(evidence, before)


def _begin_of_type(evidence: Evidence, kernel: str) -> Origin | None:
    """Return which operator first made as many numbers of the type of a kernel's queries, or any,
    if that is new.
    """
    queries = next(evidence.ran.given_as(0, (kernel,)), -1)
    for as_many in (True, False) if queries >= 0 else ():
        made = evidence.ran.allocation(evidence.ran.first_of_type(queries, as_many=as_many))
        is_no_news = is_known(evidence, made) or makes_no_more(evidence, made.origin.operator)
        if made.origin.line and not is_no_news:
            return made.origin
    return None


def _by_calls(evidence: Evidence, before: str) -> Cause | None:
    """Return that another kernel is called, where it grew what is beside it, such as a mask."""
    more = evidence.more_called
    operators = [name for name in more if name in _KERNELS]
    operators += [name for name in _SOFTMAX[:1] if name in more]
    if not operators:
        return None
    places = list(evidence.ran.places(operators[0]))
    modules, lines = {fold(one.module)[0] for one in places}, {one.line for one in places}
    rows = [row for row in evidence.came() if row.what.module in modules or row.what.line in lines]
    masks = _masks(evidence)  # of other new operators these are the news
    others = {name for name in more if name not in operators}
    rows = [one for one in rows if one.what.source not in others or evidence.first(one) in masks]
    reason = next((found for line in sorted(lines) if (found := _reason(evidence, line))), "")
    now = _KERNELS.get(operators[0], "math")
    return cause("attention", rows, before=before, now=now, reason=reason)


def _reason(evidence: Evidence, line: str) -> str:
    reason = evidence.watched.attention.get(line, "")
    return f": {reason}" if reason else ""


@rule("cache", "a cache of keys and values is kept in training")
def cache_kept(evidence: Evidence) -> Cause | None:
    """Keys and values of each layer are joined to those of a cache, which keeps them.

    Two that are alike in each module that has attention: a skip connection joins tensors, too.
    """
    attends = {
        group.what.module
        for group in evidence.alive.groups
        if group.what.source in _KERNELS or group.what.source.partition(".")[0] in _SOFTMAX
    }
    rows = [
        row
        for row in evidence.came(Role.SAVED, Role.HELD, Role.ACTIVATION)
        if row.what.source.startswith("aten::cat")
        and len(row.what.shape) in (3, 4)
        and row.what.module in attends
    ]
    joined = evidence.counted("aten::cat")
    if joined is not None and not joined.rose:
        return None  # there was a cache before
    alike = Counter[tuple[str, tuple[int, ...]]]()
    for row in rows:
        alike[row.what.module, row.what.shape] += row.count_now
    rows = [row for row in rows if alike[row.what.module, row.what.shape] % 2 == 0]
    return cause("cache", rows)


_GATHERS = "_c10d_functional::all_gather"


@rule("gathered", "{module} gathers {tensor} from all ranks ({operator}), and {did}")
def newly_gathered(evidence: Evidence) -> Cause | None:
    """What was in parts on the ranks is whole on each of them, and so is what is made of it."""
    for name, one in evidence.more_called.items():
        made = evidence.ran.largest(name) if name.startswith(_GATHERS) else None
        if made is None:
            continue
        rows = [row for row in evidence.came() if prod(row.what.shape) == prod(made.shape)]
        own = [row.what for row in rows if row.what.module == fold(made.origin.module)[0]]
        values = {
            "module": evidence.short(made.origin.module) or "the step",
            "tensor": (own[0] if own else made).tensor,
            "did": f"did {causes.times(one.before)}" if one.before else "did not",
        }
        return cause("gathered", rows, None, made.origin, operator=name, **values)
    return None


_ALLOCATE = ("aten::empty", "aten::empty_strided")
"""What replaces nothing. Compiled code allocates by the last (torch/_inductor, wrapper.py)."""


@rule("operators", "{came}{gone}", last=True)
def other_operators(evidence: Evidence) -> Cause | None:
    """The forward calls operators that it did not call, or calls them more often."""
    counts = evidence.counts()
    more = evidence.more_called
    rows = [  # but for what was made before and is larger, which calls do not explain
        row
        for row in _rows_of(evidence, more)
        if not (row.is_resized and row.before and row.before[1:4] == row.what[1:4])
    ]
    if not rows:
        return None
    first = causes.shown_by(rows)
    root = _root_of(evidence, more, first)
    own = _names_of(evidence, more, rows, first)
    origin = None
    if root is not None:
        origin = root.origin._replace(operator=evidence.ran.caller(root))
        own = [*dict.fromkeys([origin.operator, *own])]
    fell = {name for name, one in counts.items() if one.fell}
    gone = _replaced(evidence, counts, own, first.what.module)
    instead = f" in the place of {short_names(gone)}" if gone else ""
    if evidence.then(Topic.COMPILED) and _ALLOCATE[-1] in fell and not counts[own[0]].before:
        instead = f" {'are' if own[1:] else 'is'} no longer compiled"
    makes = _makes(evidence, own, first)
    if first.what.role in OF_BACKWARD and first.what.dtype:
        makes = f" ({first.what.tensor} in the backward)"
    text = f"{short_names(own)}{makes}" if instead else _calls(evidence, own, more, first)
    if root is None and first.what.role in OF_BACKWARD and more[own[0]].before:
        places = (one for one in evidence.ran.places(own[0]) if one.phase is Phase.FORWARD)
        origin = [None, *places][-1]
    return cause("operators", rows, first, origin, came=text, gone=instead)


def _replaced(
    evidence: Evidence, counts: Mapping[str, Counted], own: Sequence[str], module: str
) -> list[str]:
    """Return the operators called less often that others may stand for: those known in the same
    module or around it, or, if nothing of theirs was worth keeping, called about as often.
    """
    alive = dict[str, set[str]]()  # what was worth keeping in the snapshot, by its modules
    for what in evidence.known():
        alive.setdefault(what.source, set()).add(what.module)
    came = {_base(name) for name in own}  # of an operator that takes a number now it is no news
    came |= {_base(row.what.source) for row in evidence.came(*MADE)}
    gone = {name: one for name, one in counts.items() if one.fell and _is_worth(evidence, name)}
    gone |= {
        one.name: Counted(one.before, one.now)
        for one in evidence.about(Topic.IN_PLACE)
        if one.now < one.before
    }
    rises = sum(counts[name].now - counts[name].before for name in own)

    def is_replaced(name: str) -> bool:
        other = counts.get(_WITH_A_SUM.get(name, ""))
        if _base(name) in (*came, *_ALLOCATE) or (other is not None and other.rose):
            return False
        if name not in alive:
            return gone[name].before - gone[name].now <= _ABOUT * rises
        return any(causes.within(one, module) or causes.within(module, one) for one in alive[name])

    if wholly := {name for name in gone if not gone[name].now and is_replaced(name)}:
        gone = {name: gone[name] for name in wholly}  # of others it is less sure
    order = {name: (name not in alive, -evidence.most_of(name), name) for name in gone}
    return sorted(filter(is_replaced, gone), key=order.__getitem__)


def _is_worth(evidence: Evidence, name: str) -> bool:
    """Tell whether an operator that is called less often made what others may make now: numbers,
    and no more than it makes still but for a few calls.
    """
    was, now = evidence.sides(Topic.OPERATORS, name, Counts())
    is_still = was.largest == now.largest and _ABOUT**2 * (was.called - now.called) < was.called
    return was.largest > 0 and not is_still and not name.startswith(_DECIDE)


_WITH_A_SUM = dict.fromkeys(("aten::mm", "aten::add_"), "aten::addmm") | {"aten::addmm": "aten::mm"}
"""The same product of a layer, by how its input lies in memory (LinearAlgebra.cpp, ``linear``)."""
_ABOUT = 2
"""As fused attention stands for two products."""
_DECIDE = tuple(f"aten::{one}" for one in ("bitwise_", "eq.", "ge.", "gt.", "le.", "lt.", "ne."))
"""Operators that make booleans."""


@rule("elsewhere", "{operators} {run} on the {now}, and ran on the {before}", sure=True)
def runs_elsewhere(evidence: Evidence) -> Cause | None:
    """A tensor has been moved, and what is computed with it is on its device, too."""
    on_host = evidence.difference.moment == HOST
    there = [one.what for one in evidence.known_groups if ([*one.counts] == [HOST]) is not on_host]
    same, tensors = {one[1:5] for one in there}, {one.tensor for one in there}
    rows = [row for row in evidence.came(*MADE) if row.what[1:5] in same and not row.before]
    if not rows or all(row.what.source == causes.CONVERTS for row in rows):
        return None
    names = [*dict.fromkeys(row.what.source for row in rows)]
    copies = (row for row in evidence.came(*MADE) if row.what.source == causes.CONVERTS)
    rows += [row for row in copies if row.what.tensor in tensors and row not in rows]
    devices = ("CPU", "GPU") if on_host else ("GPU", "CPU")
    words = {"operators": short_names(names), "run": "run" if names[1:] else "runs"}
    words |= {"now": devices[0], "before": devices[1]}
    return cause("elsewhere", rows, min(rows, key=evidence.order), **words)


def _root_of(evidence: Evidence, more: Mapping[str, Counted], row: Row) -> Allocation | None:
    """Return the first ancestor of as many bytes as a row, through new operators, elsewhere."""
    if row.what.role not in MADE:
        return None  # of a backward, which the operators of the forward explain
    index, allocations, root = evidence.first(row), evidence.ran.allocation, None
    seen = {index}
    while index >= 0:
        size = allocations(index).nbytes
        read = [one for one in evidence.ran.reads(index) if one not in seen]
        new = (one for one in read if evidence.ran.caller(allocations(one)) in more)
        as_large = (one for one in new if allocations(one).nbytes >= size)
        index = next((one for one in as_large if not is_known(evidence, allocations(one))), -1)
        seen.add(index)
        root = allocations(index) if index >= 0 else root
    return root if root is not None and root.origin.line not in ("", row.what.line) else None


_OF_STEP = Role.OPTIMIZER_TEMPORARY
"""Of one parameter after the other: at another one is the peak, and no operator makes more."""


@rule("step", "the step of the optimizer makes {tensor} by {operators}{before}", last=True)
def more_in_the_step(evidence: Evidence) -> Cause | None:
    """An optimizer that was written in place makes what it computes anew."""
    rows = [*evidence.came(_OF_STEP)]
    if not rows or evidence.about(Topic.OPTIMIZERS):
        return None
    first = causes.shown_by(rows)
    same = [row for row in rows if row.what.tensor == first.what.tensor]
    operators = short_names([row.what.source for row in same])
    was = next((row.before for row in same if row.is_resized and row.before), None)
    before = f", and made {list(was.shape)}" if was is not None else ""
    return cause("step", rows, first, tensor=first.what.tensor, operators=operators, before=before)


@rule("larger", "{operator} makes {now}{of}{before}{given}", last=True)
def larger_outputs(evidence: Evidence) -> Cause | None:
    """What an operator makes has another shape, and what is computed of it follows."""
    there = {group.what[1:5] for group in evidence.alive.groups}
    resized = (row for row in evidence.came() if row.is_resized)
    rows = [
        row
        for row in resized
        if row.before
        and row.before.nbytes < row.what.nbytes
        # where it is called more often, the smaller ones may be made still
        and not (evidence.rose(row.what.source) and row.before[1:5] in there)
    ]
    if not rows:
        return _larger_before(evidence) or _larger_than_any(evidence)
    made = [row for row in rows if row.what.role in MADE]
    if not made and (found := _larger_before(evidence)):
        return found  # a backward follows its forward
    first = min(made, key=evidence.order) if made else causes.shown_by(rows)
    assert first.before is not None
    if _is_preceded(evidence, evidence.order(first)) or first.what.role == _OF_STEP:
        return None
    is_of_type = first.before.dtype == first.what.dtype
    before = str(list(first.before.shape)) if is_of_type else first.before.tensor
    given = _new_before(evidence, first)
    indices = {evidence.first(row) for row in rows}

    def may_follow(row: Row) -> bool:
        index = evidence.first(row)  # of another operator's output it is known
        is_made = index >= 0 and row.what.role in MADE
        return not is_made or not indices.isdisjoint(evidence.ran.ancestors(index))

    return cause(
        "larger",
        [row for row in evidence.came() if row in rows or may_follow(row)],
        first,
        given.origin if given is not None else None,
        operator=first.what.source,
        now=first.what.tensor,
        before=f", and made {before}",
        given=_given(evidence, given, first) if given is not None else "",
        of=_of_standing(evidence, first.what, evidence.first(first)),
    )


def _of_standing(evidence: Evidence, what: What, index: int) -> str:
    """Return in words which parameter or buffer an output has the size of, "" if none."""
    size = prod(what.shape)
    read = [one for one in evidence.ran.read(index) if one.dtype]
    standing = [one for one in read if one.kind in (Kind.PARAMETER, Kind.BUFFER)]
    as_large = [one for one in standing if prod(one.shape) == size]
    if not as_large and len(standing) < max(len(read), 1):
        return ""
    return f" of {causes.called(evidence, (as_large or standing)[0])}"


def _new_before(evidence: Evidence, row: Row) -> Allocation | None:
    """Return the first ancestor larger than its own inputs whose operator is called more often;
    else of a new operator that has a dimension which the row has anew.
    """
    anew = {*row.what.shape}.difference(row.before.shape if row.before else row.what.shape)
    indices = [*evidence.ran.ancestors(evidence.first(row))]
    made = [(index, evidence.ran.allocation(index)) for index in indices]
    made = [(index, one) for index, one in made if one.dtype and one.origin.line]
    for index, one in made:
        read = [prod(other.shape) for other in evidence.ran.read(index) if other.dtype]
        if 0 < max(read, default=0) < prod(one.shape) and evidence.rose(one.origin.operator):
            return one
    new = (one for _, one in made if one.origin.operator in evidence.new_operators)
    return next((one for one in new if anew & {*one.shape}), None)


def _given(evidence: Evidence, one: Allocation, row: Row) -> str:
    counted = evidence.counts()[one.origin.operator]
    called = f"is called {causes.times(counted.now)}, and was {causes.times(counted.before)}"
    news = called if counted.before else "is new"
    is_given = any(read is one for read in evidence.ran.read(evidence.first(row)))
    verb = "given" if is_given else "computed of"
    return f", {verb} {one.tensor} of {one.origin.operator}, which {news}"


def _is_preceded(evidence: Evidence, order: int) -> bool:
    """Tell whether much was made before by operators that are called more often."""
    more = evidence.more_called
    made = (row for row in evidence.came(*MADE) if row.what.source in more)
    earlier = (row for row in made if evidence.order(row) < order)
    return causes.total(earlier) > causes.WEIGHTY * evidence.growth


def _larger_before(evidence: Evidence) -> Cause | None:
    """Return the output of a line that became larger at another moment, such as in the forward."""
    lines = {row.what.line for row in evidence.came()} - {""}
    moved = {row.now for row in evidence.difference.moved}
    for group in sorted(evidence.alive.groups, key=lambda group: group.first):
        what = group.what
        if what.line not in lines or what.role not in MADE or not what.dtype or what in moved:
            continue
        gone = (one for one in evidence.gone(what.module, what.source) if one.dtype == what.dtype)
        like = [one for one in gone if len(one.shape) == len(what.shape)]
        equal = {one: sum(map(eq, one.shape, what.shape)) for one in like}
        was = max(like, key=lambda one: (equal[one], one.nbytes), default=None)
        if was is None or was.nbytes >= what.nbytes or _is_preceded(evidence, group.first):
            continue
        if not equal[was] and evidence.rose(what.source):
            continue  # of no size in common it is made by another call
        rows = [row for row in evidence.came() if row.what.line == what.line]
        most = "" if equal[was] else " at most"  # it may be another tensor
        before = f", and made {list(was.shape)}{most}"
        values = {"operator": what.source, "now": what.tensor, "before": before}
        of = _of_standing(evidence, what, group.first)
        made = Origin(Phase.FORWARD, what.module, what.source, what.line)
        return cause("larger", rows, None, made, of=of, given="", **values)
    return None


def _larger_than_any(evidence: Evidence) -> Cause | None:
    """Return the largest of outputs that are larger than all that their operators made before."""
    made = evidence.came(*MADE, Role.EARLIER)
    rows = [row for row in made if not row.before and evidence.made_at_most(row)]
    if not rows or evidence.difference.moment == HOST:  # of which holders tell
        return None
    first = causes.shown_by(rows)
    of = _of_standing(evidence, first.what, evidence.first(first))
    most = f" (at most {format_size(evidence.made_at_most(first))} before)"
    words = {"operator": first.what.source, "now": first.what.tensor, "before": most}
    return cause("larger", rows, first, of=of, given="", **words)


def _rows_of(evidence: Evidence, more: Mapping[str, Counted]) -> list[Row]:
    """Return the outputs of operators; where these are small, all that came of their lines."""
    rows = [row for row in evidence.came(*MADE) if row.what.source in more]
    if rows and causes.total(rows) >= causes.WEIGHTY * evidence.growth:
        return rows
    shapes = _shapes_of_known(evidence, more).values()  # as gradients of theirs have
    rows += [row for row in evidence.came(*OF_BACKWARD) if row.what.shape in shapes]
    lines = {origin.line for name in more for origin in evidence.ran.places(name)} - {""}
    return rows + [row for row in evidence.came() if row.what.line in lines and row not in rows]


def _shapes_of_known(evidence: Evidence, more: Mapping[str, Counted]) -> dict[str, tuple[int, ...]]:
    """Return the largest shape of each operator that was called before, too."""
    made = {name: evidence.ran.largest(name) for name, one in more.items() if one.before}
    return {name: one.shape for name, one in made.items() if one is not None}


def _names_of(
    evidence: Evidence, more: Mapping[str, Counted], rows: Sequence[Row], first: Row
) -> list[str]:
    """Return the operators to name: those called where the first row was made, largest first."""
    own, module = first.what.source, first.what.module
    found = [row.what.source for row in rows if row.what.source in more]
    found += [
        name
        for name in more
        for origin in evidence.ran.places(name)
        if fold(origin.module)[0] == module and (module or origin.line == first.what.line)
    ]
    if first.what.role in OF_BACKWARD:
        shapes = _shapes_of_known(evidence, more)
        found = [name for name in shapes if shapes[name] == first.what.shape] or found
    kept = {row.what.source for row in rows}  # what is alive says more than what is as large
    names = sorted(
        dict.fromkeys(found or more), key=lambda name: (name not in kept, -_made_by(evidence, name))
    )
    names = [*dict.fromkeys([own, *names])] if own in more else names
    least = causes.WEIGHTY * max(_made_by(evidence, name) for name in names)
    return [name for name in names if _made_by(evidence, name) >= least]  # and no means of a loss


def _made_by(evidence: Evidence, operator: str) -> int:
    largest = evidence.ran.largest(operator)
    return largest.nbytes if largest is not None else 0


def _makes(evidence: Evidence, names: Sequence[str], first: Row) -> str:
    """Return in words the largest tensor that operators make, the one of a row if that is as large,
    "" where that is not known.
    """
    made = [*filter(None, map(evidence.ran.largest, names))]
    largest = max(made, key=lambda one: one.nbytes, default=None)
    if largest is None or not largest.dtype:
        return ""
    most = "the largest makes " if len(names) > 1 else ""
    tensor = first.what.tensor if first.what.nbytes == largest.nbytes else largest.tensor
    tensor = tensor if len({one.dtype for one in made}) == 1 else format_size(largest.nbytes)
    given = [one for one in evidence.ran.read(evidence.ran.index(largest)) if one.dtype]
    source = max(given, key=lambda one: one.nbytes, default=largest)
    of = f", of {source.tensor}" if _MANY_TIMES * source.nbytes <= largest.nbytes else ""
    is_of_mask = any(evidence.ran.allocation(index) is largest for index in _masks(evidence))
    mask = ", for the mask of attention" if is_of_mask else ""
    return f" ({most}{tensor}{of}{mask})"


_MANY_TIMES = 4
"""What is made of so much less is a copy of a view, an index or a broadcast."""


def _masks(evidence: Evidence) -> set[int]:
    """Return the indices of masks that attention is given, and of what they are computed of."""
    masks = {*evidence.ran.given_as(_MASK, _KERNELS)}
    return {index for mask in masks for index in (mask, *evidence.ran.ancestors(mask))}


def _calls(
    evidence: Evidence, names: Sequence[str], more: Mapping[str, Counted], first: Row
) -> str:
    new = [name for name in names if not more[name].before]
    most_before = evidence.made_at_most(first)
    are = "is" if len(new) == 1 else "are"
    if new and first.what.source in names and first.what.source not in new and most_before:
        own = f"{short_names([first.what.source])} makes {first.what.tensor}"
        return f"{own}, and {short_names(new)} {are} new"
    if new:
        return f"{short_names(new)}{_makes(evidence, new, first)} {are} new"
    most = max(names, key=lambda name: more[name].now / more[name].before)
    counted = more[most]
    change = f"{causes.times(counted.now)}, and was {causes.times(counted.before)}"
    shown = short_names([most])
    if short_names(names) == shown and most_before and first.what.source == most:
        return f"{shown} makes {first.what.tensor} (at most {format_size(most_before)} before)"
    if short_names(names) == shown:
        is_one = counted.now == counted.before + 1  # of many calls the largest tells nothing
        made = _makes(evidence, names, first) if is_one else ""
        return f"{shown}{made} is called {change}"
    return f"{short_names(names)} are called more often: {shown} {change}"


def _base(name: str) -> str:
    return name.partition(".")[0]


def short_names(names: Sequence[str]) -> str:
    """Return operators in words, of many the first ones."""
    return listed([*dict.fromkeys(_base(name).removeprefix("aten::") for name in names)])
