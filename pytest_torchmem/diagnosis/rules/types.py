"""Causes in types, shapes and copies: wider numbers, a matrix of vectors, what is there twice."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from math import prod

from pytest_torchmem.diagnosis import causes
from pytest_torchmem.diagnosis.causes import CONVERTS, MADE, Cause, Evidence, cause, rule
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.diagnosis.provenance import DOUBLE, STANDING
from pytest_torchmem.profile.facts import AUTOCAST, Topic
from pytest_torchmem.profile.module_paths import fold, prefixes
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Role
from pytest_torchmem.snapshots.alive import What

_STANDING_ROLES = (Role.BUFFER, Role.PARAMETER, Role.INPUT)


@rule("broadcast", "broadcasting {shapes}", sure=True)
def broadcast(evidence: Evidence) -> Cause | None:
    """A pointwise operator got shapes that do not match, and made their product."""
    if any(change.before for change in evidence.about(Topic.INPUTS)):
        return None  # larger inputs make larger products
    places: dict[tuple[str, str], list[tuple[Origin, str]]] = {}
    for origin, shapes in evidence.ran.broadcasts.items():
        if origin.phase is Phase.BACKWARD:
            continue  # of what the forward has summed up
        places.setdefault((fold(origin.module)[0], origin.line), []).append((origin, shapes))
    for row in (one for one in evidence.came() if not causes.is_kept(evidence, one)):
        for what in (row.what, *_computed_of(evidence, row)):
            for origin, shapes in places.get((what.module, what.line), ()):
                made = shapes.rpartition(" made ")[2]
                # A kernel's temporary is as large as what broadcasting made.
                size = prod(_sizes(made))
                same = what.shape == _sizes(made) if what.dtype else what.nbytes >= size
                if not same or _was_broadcast(evidence, what, shapes):
                    continue
                alike = [one for one in evidence.came() if str(list(one.what.shape)) == made]
                rows = [row, *(one for one in alike if one is not row)]
                return cause("broadcast", rows, row, origin, shapes=shapes)
    return None


def _computed_of(evidence: Evidence, row: Row) -> Iterator[What]:
    """Yield what an output was computed of that has its shape, and may be freed by then."""
    index = evidence.first(row) if row.what.role in MADE else -1
    for one in map(evidence.ran.allocation, evidence.ran.ancestors(index)):
        if one.shape == row.what.shape and one.dtype:
            made, tensor = one.origin, (one.dtype, one.shape)
            place = fold(made.module)[0], made.operator
            yield What(row.what.role, *place, *tensor, made.line, one.nbytes)


def _was_broadcast(evidence: Evidence, what: What, shapes: str) -> bool:
    """Tell whether the module made such a tensor before, or operands were broadcast before, too.

    The snapshot has what they made and not their shapes. A tensor that shows it has as many
    dimensions, and no size 1 where the present one has another size; or it has fewer dimensions,
    and each size that meets a 1 now.
    """
    operands, _, made = shapes.rpartition(" made ")
    shape = _sizes(made)
    sizes = [*zip_longest(*(_sizes(one)[::-1] for one in operands.split(" with ")), fillvalue=0)]
    met = Counter(max(one) for one in sizes if 1 in one and max(one) > 1)
    spread = met + Counter(max(one) for one in sizes if 0 in one and 1 not in one)
    known = [*evidence.known()]
    if any((one.module, one.shape) == (what.module, shape) for one in known):
        return True
    given = (one for geometries in evidence.then(Topic.INPUTS).values() for one in geometries)
    if known and not any(max(shape) in one.shape for one in (*given, *known)):
        return True  # its vectors are longer than anything was, and were broadcast as well
    now = evidence.present(Topic.OPERATORS).get(what.source)
    if now and makes_the_same(evidence, what.source) and what.nbytes == now.largest:
        return True  # its operator made as much as often, which was freed
    gone = [*evidence.gone(what.module, what.source)]
    alike = (one.shape for one in gone if len(one.shape) == len(shape))
    fewer = (Counter(one.shape) for one in gone if len(one.shape) < len(shape))
    return any(
        not any(a == 1 < b for a, b in zip(one, shape, strict=True)) for one in alike
    ) or any(not met - own and not (spread - own).keys() & own.keys() for own in fewer)


def _sizes(made: str) -> tuple[int, ...]:
    return tuple(int(size) for size in made.strip("[]").split(",") if size.strip())


@rule("float64", "{dtype} comes from {source}")
def double_precision(evidence: Evidence) -> Cause | None:
    """A buffer, an input or a number of numpy's is in double precision, and all that it meets."""
    rows = [row for row in evidence.came() if row.what.dtype in DOUBLE]
    floats = (one for one in evidence.known() if "float" in one.dtype or "complex" in one.dtype)
    most = max(floats, key=lambda one: one.nbytes, default=None)
    if not rows or (most is not None and most.dtype in DOUBLE):  # which it was before
        return None
    dtype = rows[0].what.dtype
    standing = [row for row in rows if row.what.role in _STANDING_ROLES]
    first = standing[0] if standing else min(rows, key=evidence.order)
    return _from(evidence, "float64", first, rows, dtype=dtype)


def _from(
    evidence: Evidence, name: str, first: Row, rows: list[Row], **values: str
) -> Cause | None:
    """Return the cause of a type: what is given in it, or who made the first tensor of it."""
    source, origin = first.what.source, None
    if first.what.role in _STANDING_ROLES:
        own = f"{first.module}.{first.what.source}" if first.module else first.what.source
        source = f"the {first.what.role} {evidence.short(own)}"
    elif (index := evidence.first(first)) >= 0:
        at = evidence.ran.first_of_type(index)
        made = evidence.ran.allocation(at).origin
        if "dtype" in values:
            values["dtype"] = evidence.ran.allocation(at).dtype
            made = evidence.ran.first_double_on_host(evidence.ran.allocation(at)) or made
        read = (one for one in evidence.ran.read(at) if one.kind in STANDING and one.shape)
        parameter = wider_parameter(evidence, first.what)
        if parameter is None and first.what.dtype in DOUBLE:  # which few programs have on purpose
            parameter = next((one for one in read if one.dtype in DOUBLE), None)
        if parameter is not None:
            source, origin = causes.called(evidence, parameter), made if made.line else None
        elif made.operator and not (made.operator == CONVERTS and not evidence.ran.reads(at)):
            source, origin = made.operator, made
        else:  # it was there before the step
            source = "a tensor that the program has brought with it"
    used = [row for row in rows if row.what.line]
    place = min(used or rows, key=evidence.order)
    where = f", beginning with {source}"
    if first.what.role == Role.OPTIMIZER_STATE:
        where = " in the state of the optimizer"
    return cause(name, rows, place, origin, source=source, where=where, **values)


def wider_parameter(evidence: Evidence, what: What) -> Allocation | None:
    """Return a parameter of a tensor's type, where its module made only narrower ones before."""
    module, size = what.module, prod(what.shape)
    known = [one for one in evidence.known() if causes.within(module, one.module) and one.dtype]
    if any(one.dtype == what.dtype and prod(one.shape) >= size for one in known):
        return None
    modes = evidence.present(Topic.MODES)
    is_cast = any(one.name == AUTOCAST for path in prefixes(module) for one in modes.get(path, ()))
    were_narrower = any("float" in one.dtype and _width(one) < _width(what) for one in known)
    if not module or is_cast or not were_narrower:
        return None
    of_type = {one.shape for one in known if (one.role, one.dtype) == (Role.PARAMETER, what.dtype)}
    read = map(evidence.ran.allocation, evidence.ran.read_in(module))
    own = (one for one in read if one.kind is Kind.PARAMETER)
    new = (one for one in own if one.shape not in of_type)  # which had that type before
    return next((one for one in new if one.dtype == what.dtype), None)


def _width(what: What) -> float:
    """Return the bytes of a number."""
    return what.nbytes / max(prod(what.shape), 1)


@rule("autocast cache", "autocast keeps {copies} in its cache until its region ends", sure=True)
def autocast_cache(evidence: Evidence) -> Cause | None:
    """A region of autocast ends later: until then it keeps copies of parameters that it cast."""
    modes = evidence.present(Topic.MODES).values()
    if not any(one.name == AUTOCAST for own in modes for one in own):
        return None
    cast = (row for row in evidence.came(*causes.KEPT) if row.what.source == CONVERTS)
    read = ((row, evidence.ran.read(evidence.first(row))) for row in cast)
    rows = [row for row, own in read if own and own[0].kind is Kind.PARAMETER]
    first = max(rows, key=lambda row: row.change, default=None)
    if first is None:
        return None
    return cause("autocast cache", rows, copies=f"{first.what.dtype} copies of parameters")


@rule("type", "{before} became {now}{where}")
def wider_type(evidence: Evidence) -> Cause | None:
    """Numbers take more bytes than they did, from one operator on."""
    rows = {row: was for row in evidence.came() if (was := evidence.narrower(row))}
    if not rows:
        return _of_conversion(evidence)
    wider = [*rows]
    first = min(wider, key=evidence.order)
    types = {"before": rows[first].dtype, "now": first.what.dtype}
    if types["now"] not in {what.dtype for what in evidence.known()}:  # there was none of it
        wider = [row for row in evidence.came() if row.what.dtype == types["now"]]
    own = {(row.what.module, row.what.dtype) for row in wider if row.what.role == Role.PARAMETER}
    cast = [row for row in evidence.came(*MADE) if row.what.source == CONVERTS and row not in wider]
    dtypes = {row: {one.dtype for one in evidence.ran.read(evidence.first(row))} for row in cast}
    wider += [  # what is converted for wider parameters, in their module or around them, or back
        row
        for row in cast
        if any(row.what.dtype == of and causes.within(row.what.module, path) for path, of in own)
        or (row.what.dtype == types["before"] and types["now"] in dtypes[row])
    ]
    source = first.what.source
    if rows[first].source == CONVERTS != source and "float" in rows[first].dtype:
        where = f": what {source} makes is no longer converted"
        return cause("type", wider, first, None, source=source, where=where, **types)
    if gone := _narrower_gone(evidence, first, types["before"]):
        return cause("type", wider, first, gone[1], source=source, where=gone[0], **types)
    found = _from(evidence, "type", first, wider, **types)
    if found is None or found.origin is None:
        return found
    index = evidence.ran.first_of_type(evidence.first(first))
    made, read = evidence.ran.allocation(index), evidence.ran.read(index)
    operator = made.origin.operator
    is_copy = operator.partition(".")[0] in ("aten::_to_copy", "aten::copy_")
    is_no_news = (is_copy or not read) and makes_no_more(evidence, operator)
    # What has made other numbers of this type only met those that became wider.
    is_other = is_copy and types["before"] not in {one.dtype for one in read}
    if not is_known(evidence, made) and not is_no_news and not is_other:
        return found
    known = [rows[row] for row in wider if row in rows]
    now = evidence.moved_lines()
    places = {(one.module, one.source, now.get(one.line, one.line), one.shape) for one in known}
    mixed = evidence.ran.first_of_type(evidence.first(first), as_many=True)
    place: Allocation | None = evidence.ran.allocation(mixed)  # that a known constant made wider
    if place is None or is_known(evidence, place) or not place.origin.line:
        place = evidence.ran.made(places, first.what.dtype)
    if place is None:
        return found
    source = place.origin.operator
    values = {**found.values, "source": source, "where": f", beginning with {source}"}
    return replace(found, values=values, origin=place.origin)


def _narrower_gone(evidence: Evidence, first: Row, dtype: str) -> tuple[str, Origin] | None:
    """Return that a parameter or buffer is gone that was of the narrower type where numbers first
    meet wider ones, and who computes with them now.
    """
    if (index := evidence.first(first)) < 0:
        return None
    met = evidence.ran.allocation(evidence.ran.first_of_type(index, as_many=True)).origin
    now = {one.what[:3] for one in evidence.alive.groups}
    for what in evidence.known():
        is_there = what.dtype == dtype and what.module and what.module == fold(met.module)[0]
        if is_there and what.role in _STANDING_ROLES and what[:3] not in now and met.line:
            name = evidence.short(f"{what.module}.{what.source}")
            return f": the {what.role} {name}, which was {dtype}, is gone", met
    return None


def makes_no_more(evidence: Evidence, operator: str) -> bool:
    """Tell whether what an operator makes was most likely there before: it is called as often, and
    makes as much, or conversions of it are fewer, unless it is one.
    """
    counted, converted = evidence.counted(operator), evidence.counted(CONVERTS)
    fell = operator == CONVERTS or (converted is not None and converted.fell)
    return makes_the_same(evidence, operator) or (counted is not None and not counted.rose and fell)


def makes_the_same(evidence: Evidence, operator: str) -> bool:
    """Tell whether an operator is called as often as before, and its largest result is as large."""
    sides = (of(Topic.OPERATORS).get(operator) for of in (evidence.then, evidence.present))
    then, now = ((one.called, one.largest) if one else None for one in sides)
    return then is not None and then == now


def is_known(evidence: Evidence, one: Allocation) -> bool:
    """Tell whether the snapshot has the same of the same operator."""
    same = (fold(one.origin.module)[0], one.origin.operator, one.dtype, one.shape)
    return same in evidence.known_tensors


def _of_conversion(evidence: Evidence) -> Cause | None:
    """Return that an operator is given numbers of another type, to which they are converted now."""
    for row in evidence.came(*MADE):
        counted = evidence.counted(row.what.source)
        index = evidence.first(row)
        if row.before is not None or index < 0 or counted is None or counted.rose:
            continue
        index = evidence.ran.first_of_type(index)
        made, was = evidence.ran.allocation(index), next(iter(evidence.ran.read(index)), None)
        is_converted = made.origin.operator.partition(".")[0] == _COPIES[0]
        if was is None or not is_converted or made.shape != was.shape or made.nbytes <= was.nbytes:
            continue
        if evidence.rose(made.origin.operator):
            rows = [one for one in evidence.came() if one.place == row.place]
            source = made.origin.operator
            words = {"before": was.dtype, "now": made.dtype, "where": f", beginning with {source}"}
            return cause("type", rows, row, made.origin, source=source, **words)
    return None


_COPIES = ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::contiguous", "aten::repeat")


@rule("copy", "{operator} {does} of {original}")
def kept_twice(evidence: Evidence) -> Cause | None:
    """A tensor is kept beside its copy: logits in float32, an activation made contiguous."""
    for row in evidence.came(*MADE):
        source, counted = row.what.source, evidence.counted(row.what.source)
        if source.partition(".")[0] not in _COPIES or row.before is not None:
            continue
        gone = (one.what.source for one in evidence.difference.rows if one.now is None)
        if counted is not None and counted.now <= counted.before and source not in gone:
            continue  # it copied before, too: the copy lives longer
        of_its_kind = (one for one in evidence.difference.rows if one.what[3:5] == row.what[3:5])
        if any(one.change == -row.change for one in of_its_kind):
            continue  # it stands in the place of what is gone
        if row.what.role == Role.HELD and causes.is_kept(evidence, row):
            continue  # who keeps it is nearer to the cause
        copied = evidence.ran.original_of(evidence.first(row), _COPIES)
        if copied is None or _is_new(evidence, copied) or _is_for_wider(evidence, row, copied):
            continue  # who makes what is copied, or what asks for the type, is nearer to the cause
        size, place = prod(row.what.shape), (row.what.module, row.what.dtype)
        rows = [  # and what was computed of it and was not there before
            one
            for one in evidence.came()
            if one is row
            or (prod(one.what.shape) == size and (one.what.module, one.what.dtype) == place)
        ]
        values = {"original": causes.called(evidence, copied), "does": _does(row, copied)}
        values["operator"] = source
        return cause("copy", rows, row, **values)
    return None


def _is_new(evidence: Evidence, one: Allocation) -> bool:
    """Tell whether what made a tensor is called more often than it was, or never made as much and
    nothing there, or half of it.
    """
    made, place = one.origin, (fold(one.origin.module)[0], one.origin.operator)
    gone = [row for row in evidence.difference.rows if row.now is None]
    gone = [row for row in gone if row.place == (fold(made.module)[0], made.line)]
    if any(row.what.source != made.operator and 2 * row.what.nbytes > one.nbytes for row in gone):
        return False  # in the place of what another operator made
    called_by = evidence.ran.caller(one) or made.operator
    is_there = any((known.module, known.source) == place for known in evidence.known())
    is_more = 0 < evidence.most_of(made.operator) * (1 + is_there) < one.nbytes
    return one.kind not in STANDING and (is_more or evidence.rose(called_by))


def _is_for_wider(evidence: Evidence, row: Row, copied: Allocation) -> bool:
    """Tell whether a copy has the type that parameters around it, or other numbers, have now."""
    own, dtype = row.what.module, row.what.dtype
    if dtype == copied.dtype:
        return False
    wider = wider_type(evidence)
    if wider and wider.values["now"] == dtype and wider.values["source"] != row.what.source:
        return True
    return wider_parameter(evidence, row.what) is not None or any(
        one.before is not None
        and one.before.dtype != dtype == one.what.dtype
        and (causes.within(own, one.what.module) or causes.within(one.what.module, own))
        for one in evidence.came(Role.PARAMETER)
    )


def _does(row: Row, original: Allocation) -> str:
    tensor = row.what.tensor
    if original.dtype and original.dtype != row.what.dtype:
        return f"makes {tensor} of the {original.dtype}"
    if original.nbytes < row.what.nbytes:
        return f"writes out {tensor}"
    return f"copies the {tensor}"


@rule("library buffer", "{library} keeps a buffer", last=True)
def library_buffer(evidence: Evidence) -> Cause | None:
    """A library that was not asked before takes a workspace, and keeps it."""
    rows = [*evidence.came(Role.LIBRARY)]
    more = causes.total(row for row in evidence.came() if row not in rows)
    if not rows or more > causes.WEIGHTY * evidence.difference.change:
        return None  # something else came, for which the library may have been asked
    first = evidence.first(rows[0])
    origin = evidence.ran.allocation(first).origin if first >= 0 else None
    return cause("library buffer", rows, None, origin, library=rows[0].what.source)
