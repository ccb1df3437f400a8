"""Random programs take in a trace what they take of the real CPU allocator, to the byte."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from benchmarks.comparison import Status, compare
from benchmarks.programs.drawing import QUIET
from benchmarks.programs.program import Program
from benchmarks.programs.strategies import programs


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(programs())
def test_random_programs(program: Program) -> None:
    torch.manual_seed(0)
    found = compare("", program)
    assert found.status in (Status.EXACT, Status.SKIPPED), (
        f"traced {found.traced}\nmeasured {found.measured}\n{found.error}"
    )
