"""Causes in what is there twice."""

from __future__ import annotations

from math import prod

from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, rule
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.snapshots.alive import What

_COPIES = ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::contiguous", "aten::lift_fresh")
_MADE = (Role.SAVED.value, Role.ACTIVATION.value, Role.HELD.value, Role.RECOMPUTED.value)


@rule("copy", "{operator} copies the {tensor} that {maker} made")
def kept_twice(evidence: Evidence) -> Cause | None:
    """A tensor is kept beside its copy: logits in float32, an activation made contiguous."""
    for row in evidence.came(*_MADE):
        if row.what.source.partition(".")[0] not in _COPIES or row.before is not None:
            continue
        original = _original(evidence, row)
        if original is None:
            continue
        place = f" in {original.module}" if original.module else ""
        rows = [one for one in evidence.came() if prod(one.what.shape) == prod(row.what.shape)]
        found = cause(
            "copy",
            rows,
            operator=row.what.source,
            tensor=original.tensor,
            maker=f"{original.source}{place}",
        )
        return found and Cause(found.rule, found.values, row, found.nbytes)
    return None


def _original(evidence: Evidence, row: Row) -> What | None:
    """Return what else is alive of as many elements, made by an operator that is no copy."""
    moment, elements = evidence.difference.moment, prod(row.what.shape)
    for group in sorted(evidence.alive.groups, key=lambda group: -group.nbytes(moment)):
        what = group.what
        made = what.role in _MADE and what.source.partition(".")[0] not in _COPIES
        if made and what != row.what and prod(what.shape) == elements and group.counts.get(moment):
            return what
    return None


@rule("library buffer", "{library} keeps a buffer")
def library_buffer(evidence: Evidence) -> Cause | None:
    """A library that was not asked before takes a workspace, and keeps it."""
    for row in evidence.came(Role.LIBRARY.value):
        return cause("library buffer", [row], library=row.what.source)
    return None
