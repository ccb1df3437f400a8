"""Random programs take in a trace what they take of the real CPU allocator, to the byte."""

from __future__ import annotations

import torch
from hypothesis import given, reject, settings

from benchmarks.comparison import Status, compare
from benchmarks.programs.drawing import QUIET
from benchmarks.programs.program import Program
from benchmarks.programs.strategies import programs

#: What torch says of programs that cannot run, as not every random one can.
REFUSALS = (
    "has been modified by an inplace operation",
    "of the written-to tensor refers to a single memory",
    "some elements of the input tensor and the written-to tensor refer to a single memory",
)


@settings(max_examples=40, suppress_health_check=QUIET)
@given(programs())
def test_random_programs(program: Program) -> None:
    torch.manual_seed(0)
    found = compare("", program)
    if found.status is Status.SKIPPED:
        assert any(refusal in found.error for refusal in REFUSALS), found.error
        reject()
    assert not found.error
    assert found.traced == found.measured
