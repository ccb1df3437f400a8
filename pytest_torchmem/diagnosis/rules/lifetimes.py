"""Causes in how long tensors live: what is still there that was not."""

from __future__ import annotations

from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, rule
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.profile.lifetimes import Role

_FORWARD = ("forward_peak", "retained")


@rule("gradients kept", "gradients of an earlier step are alive in the {phase}")
def gradients_kept(evidence: Evidence) -> Cause | None:
    """``zero_grad(set_to_none=False)``, or none at all: gradients stay between two steps."""
    moment, before = evidence.difference.moment, evidence.before.alive
    if moment not in (*_FORWARD, "backward_peak") or before is None:
        return None
    phase = "forward" if moment in _FORWARD else "backward"
    rows = [*evidence.came(Role.GRADIENT.value)]
    if phase == "backward":  # where they are made anyway: only what was there all along counts
        rows = [row for row in rows if _in_forward(evidence, row)]
    return cause("gradients kept", rows, phase=phase)


def _in_forward(evidence: Evidence, row: Row) -> bool:
    return any(
        group.what == row.now and "forward_peak" in group.counts for group in evidence.alive.groups
    )


@rule("earlier steps", "tensors of an earlier step are still alive{holder}")
def earlier_steps(evidence: Evidence) -> Cause | None:
    """The graph of a step outlives it: a loss that was added up, a hidden state not detached."""
    rows = [*evidence.came(Role.EARLIER.value)]
    return cause("earlier steps", rows, holder=_holder(evidence, rows))


@rule("held", "the program keeps what it made in the forward{holder}")
def held_by_program(evidence: Evidence) -> Cause | None:
    """A list, an attribute or a closure refers to tensors of the forward."""
    rows = [*evidence.came(Role.HELD.value)]
    return cause("held", rows, holder=_holder(evidence, rows))


def _holder(evidence: Evidence, rows: list[Row]) -> str:
    for row in rows:
        found = evidence.watched.holders.get(row.now) if row.now is not None else None
        if found:
            return f": {found}"
    return ""
