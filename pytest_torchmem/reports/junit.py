"""A check's figures as properties of the test, which JUnit files show and xdist carries along."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_torchmem.checks.findings import Outcome

if TYPE_CHECKING:
    from pytest_torchmem.reports.summary import Check

PREFIX = "torchmem."


def properties(check: Check) -> list[tuple[str, object]]:
    """Return the properties of one check: ``torchmem.<name>.<device>.<figure>``, in bytes;
    of a distributed step there is a part for the rank.
    """
    result = check.result
    key, trace = result.key, result.trace
    found: dict[str, object] = {"outcome": result.told}
    if result.outcome is Outcome.NOT_CHECKED:
        found["reason"] = check.headline
    if key.gpu:
        found["gpu"] = key.gpu
    found |= result.figures
    before = {change.figure: change.before for change in result.changes}
    found |= {f"{name}.snapshot": size for name, size in before.items() if size is not None}
    if result.measurement is not None:
        figures = result.measurement.figures
        found |= {f"{name}.measured": size for name, size in figures.items()}
    found |= {f"{name}.limit": size for name, size in result.limits.items()}
    if trace.calibrated_workspaces:
        found["calibrated_workspaces"] = ", ".join(trace.calibrated_workspaces)
    if trace.library_workspaces:
        found["library_workspaces"] = ", ".join(trace.library_workspaces)
        found["cudnn"] = trace.cudnn
    if trace.unknown_workspaces:
        found["unknown_workspaces"] = ", ".join(trace.unknown_workspaces)
    if trace.not_counted:
        found["not_counted"] = ", ".join(trace.not_counted)
    rank = f"rank {key.rank} of {key.world_size}" if key.world_size else ""
    stem = PREFIX + "".join(f"{part}." for part in (key.name, key.device, rank) if part)
    return [(f"{stem}{name}", value) for name, value in found.items()]


def without_ours(properties: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return a test's properties without those of an earlier attempt's checks."""
    return [(name, value) for name, value in properties if not name.startswith(PREFIX)]
