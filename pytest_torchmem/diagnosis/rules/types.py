"""Causes in types and shapes: wider numbers, and broadcasting that makes a matrix of vectors."""

from __future__ import annotations

from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, rule
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.module_paths import fold

_DOUBLE = ("float64", "complex128")
_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64")
_STANDING = (Role.BUFFER.value, Role.PARAMETER.value, Role.INPUT.value)


@rule("broadcast", "broadcasting {shapes}", sure=True)
def broadcast(evidence: Evidence) -> Cause | None:
    """A pointwise operator got shapes that do not match, and made their product."""
    places = {
        (origin.operator, fold(origin.module)[0], origin.line): shapes
        for origin, shapes in evidence.broadcasts.items()
    }
    for row in evidence.came():
        what = row.what
        shapes = places.get((what.source, what.module, what.line))
        if shapes is None:
            shapes = next((s for (_, m, n), s in places.items() if (m, n) == what[1:6:4]), None)
        made = (shapes or "").rpartition(" made ")[2]
        if shapes and (not what.dtype or str(list(what.shape)) == made):
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
    if standing:
        first = standing[0]
        source = f"the {first.what.role} {_named(first)}"
    else:
        first = min(rows, key=evidence.order)
        source = first.what.source
    found = cause("float64", rows, dtype=dtype, source=source)
    used = [row for row in rows if row.what.line]
    place = min(used or rows, key=evidence.order)
    return found and Cause(found.rule, found.values, place, found.nbytes)


def _named(row: Row) -> str:
    return f"{row.module}.{row.what.source}" if row.module else row.what.source


@rule("type", "{before} became {now} from {operator} on")
def wider_type(evidence: Evidence) -> Cause | None:
    """Numbers take more bytes than they did, from one operator on."""
    rows = [row for row in evidence.came() if _is_wider(row)]
    if not rows:
        return None
    first = min(rows, key=evidence.order)
    assert first.before is not None
    source = first.what.source
    if first.what.role in _STANDING:
        source = f"the {first.what.role} {_named(first)}"
    types = {"before": first.before.dtype, "now": first.what.dtype}
    found = cause("type", rows, **types, operator=source)
    used = [row for row in rows if row.what.line]
    place = min(used or rows, key=evidence.order)
    return found and Cause(found.rule, found.values, place, found.nbytes)


def _is_wider(row: Row) -> bool:
    before, now = row.before, row.now
    if before is None or now is None or not before.dtype or before.shape != now.shape:
        return False
    return before.dtype != now.dtype and before.dtype in _NARROW and now.nbytes > before.nbytes
