"""How checks travel on the reports of tests, from the process that ran them to the controller."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pytest_torchmem.reports.summary import Check


def pack(checks: Sequence[Check], *, failed_by_check: bool) -> dict[str, Any]:
    """Return ``checks`` as builtin types: pytest-xdist sends nothing else."""
    sent = [replace(check, result=check.result.light()) for check in checks]
    return {"checks": pickle.dumps(sent), "failed_by_check": failed_by_check}


def unpack(packed: dict[str, Any]) -> tuple[list[Check], bool]:
    """Return the checks that ``pack`` was given, and whether one of them failed their test."""
    return pickle.loads(packed["checks"]), packed["failed_by_check"]
