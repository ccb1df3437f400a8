"""Causes in types and shapes: wider numbers, and broadcasting that makes a matrix of vectors."""

from __future__ import annotations

from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, rule
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.profile.facts import INPUTS
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.module_paths import fold

_DOUBLE = ("float64", "complex128")
_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64")
_STANDING = (Role.BUFFER.value, Role.PARAMETER.value, Role.INPUT.value)


@rule("broadcast", "broadcasting {shapes}", sure=True)
def broadcast(evidence: Evidence) -> Cause | None:
    """A pointwise operator got shapes that do not match, and made their product."""
    if any(change.before for change in evidence.about(INPUTS)):
        return None  # larger inputs make larger products
    places: dict[tuple[str, str], list[str]] = {}
    for origin, shapes in evidence.ran.broadcasts.items():
        places.setdefault((fold(origin.module)[0], origin.line), []).append(shapes)
    for row in evidence.came():
        what = row.what
        for shapes in places.get((what.module, what.line), ()):
            made = shapes.rpartition(" made ")[2]
            if what.dtype and (str(list(what.shape)) != made or evidence.had(what)):
                continue
            alike = [one for one in evidence.came() if str(list(one.what.shape)) == made]
            rows = [row, *(one for one in alike if one is not row)]
            found = cause("broadcast", rows, shapes=shapes)
            return found and Cause(found.rule, found.values, row, found.nbytes)
    return None


@rule("float64", "{dtype} comes from {source}")
def double_precision(evidence: Evidence) -> Cause | None:
    """A buffer, an input or a number of numpy's is in double precision, and all that it meets."""
    rows = [row for row in evidence.came() if row.what.dtype in _DOUBLE]
    if not rows:
        return None
    dtype = rows[0].what.dtype
    standing = [row for row in rows if row.what.role in _STANDING]
    first = standing[0] if standing else min(rows, key=evidence.order)
    return _from(evidence, "float64", first, rows, dtype=dtype)


def _from(
    evidence: Evidence, name: str, first: Row, rows: list[Row], **values: str
) -> Cause | None:
    """Return the cause of a type: what is given in it, or who made the first tensor of it."""
    source, origin = first.what.source, None
    if first.what.role in _STANDING:
        own = f"{first.module}.{first.what.source}" if first.module else first.what.source
        source = f"the {first.what.role} {evidence.short(own)}"
    elif (index := evidence.first(first)) >= 0:
        made = evidence.ran.first_of_type(index).origin
        if made.operator:
            source, origin = made.operator, made
        else:  # it was there before the step
            source = "a tensor that the program has brought with it"
    found = cause(name, rows, source=source, **values)
    used = [row for row in rows if row.what.line]
    place = min(used or rows, key=evidence.order)
    return found and Cause(found.rule, found.values, place, found.nbytes, origin)


@rule("type", "{before} became {now} from {source} on")
def wider_type(evidence: Evidence) -> Cause | None:
    """Numbers take more bytes than they did, from one operator on."""
    rows = [row for row in evidence.came() if _is_wider(row)]
    if not rows:
        return None
    first = min(rows, key=evidence.order)
    assert first.before is not None
    types = {"before": first.before.dtype, "now": first.what.dtype}
    return _from(evidence, "type", first, rows, **types)


def _is_wider(row: Row) -> bool:
    before, now = row.before, row.now
    if before is None or now is None or not before.dtype or before.shape != now.shape:
        return False
    return before.dtype != now.dtype and before.dtype in _NARROW and now.nbytes > before.nbytes
