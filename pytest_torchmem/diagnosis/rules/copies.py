"""Causes in what is there twice."""

from __future__ import annotations

from math import prod

from pytest_torchmem.diagnosis.causes import (
    MADE,
    WEIGHTY,
    Cause,
    Evidence,
    called,
    cause,
    rule,
    total,
    within,
)
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.diagnosis.rules.lifetimes import is_kept
from pytest_torchmem.diagnosis.rules.types import wider_parameter
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.timeline import Allocation, Kind
from pytest_torchmem.units import format_size

_COPIES = ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::contiguous", "aten::repeat")
_STANDING = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)


@rule("copy", "{operator} {does} of {original}")
def kept_twice(evidence: Evidence) -> Cause | None:
    """A tensor is kept beside its copy: logits in float32, an activation made contiguous."""
    for row in evidence.came(*MADE):
        source, counted = row.what.source, evidence.counted(row.what.source)
        if source.partition(".")[0] not in _COPIES or row.before is not None:
            continue
        if counted is not None and counted.now <= counted.before:
            continue  # it copied before, too: the copy lives longer
        if row.what.role == Role.HELD and is_kept(evidence, row):
            continue  # who keeps it is nearer to the cause
        copied = evidence.ran.original_of(evidence.first(row), _COPIES)
        if copied is None or _is_new(evidence, copied) or _is_for_wider(evidence, row, copied):
            continue  # who makes what is copied, or what asks for the type, is nearer to the cause
        rows = [one for one in evidence.came() if _is_of_copy(one, row)]
        original, does = called(evidence, copied), _does(row, copied)
        return cause("copy", rows, row, original=original, operator=source, does=does)
    return None


def _is_new(evidence: Evidence, one: Allocation) -> bool:
    """Tell whether what made a tensor is called more often than it was."""
    called_by = evidence.ran.caller(one) or one.origin.operator
    counted = evidence.counted(called_by) if one.kind not in _STANDING else None
    return counted is not None and counted.rose


def _is_for_wider(evidence: Evidence, row: Row, copied: Allocation) -> bool:
    """Tell whether numbers are converted to the type that parameters of their module have now."""
    own, dtype = row.what.module, row.what.dtype
    if dtype == copied.dtype:
        return False
    return wider_parameter(evidence, row.what) is not None or any(
        one.before is not None
        and one.before.dtype != dtype == one.what.dtype
        and (within(own, one.what.module) or within(one.what.module, own))
        for one in evidence.came(Role.PARAMETER)
    )


def _is_of_copy(row: Row, copy: Row) -> bool:
    """Tell whether a row is the copy, or what was computed of it and was not there before."""
    same = prod(row.what.shape) == prod(copy.what.shape) and row.what.dtype == copy.what.dtype
    return row is copy or (same and row.what.module == copy.what.module)


def _does(row: Row, original: Allocation) -> str:
    tensor = row.what.tensor
    if original.dtype and original.dtype != row.what.dtype:
        return f"makes {tensor} of the {original.dtype}"
    if original.nbytes < row.what.nbytes:
        return f"writes out as {tensor} the {format_size(original.nbytes)}"
    return f"copies the {tensor}"


@rule("library buffer", "{library} keeps a buffer", last=True)
def library_buffer(evidence: Evidence) -> Cause | None:
    """A library that was not asked before takes a workspace, and keeps it."""
    rows = [*evidence.came(Role.LIBRARY)]
    more = total(row for row in evidence.came() if row not in rows)
    if not rows or more > WEIGHTY * evidence.difference.change:
        return None  # something else came, for which the library may have been asked
    return cause("library buffer", rows, library=rows[0].what.source)
