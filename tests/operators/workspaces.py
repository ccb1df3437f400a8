"""Calls of CPU kernels, their workspaces as predicted and as the allocator counts them."""

import pytest
import torch

from benchmarks.workspace_cpu import Call, Program, Recorder
from pytest_torchmem.operators.matmul import has_onednn_products
from pytest_torchmem.targets.host import this_machine

onednn = pytest.mark.skipif(
    not all(map(this_machine().is_checked, (torch.float32, torch.bfloat16))),
    reason="oneDNN's workspaces are estimates on this CPU",
)


def skip_estimates(dtype: torch.dtype) -> None:
    """Skip a test where oneDNN takes products of a type and this CPU was not checked for it."""
    host = this_machine()
    if has_onednn_products(host, dtype) and not host.is_checked(dtype):
        pytest.skip(f"oneDNN's workspaces in {dtype} are estimates on this CPU")


def calls_of(*programs: Program) -> list[Call]:
    """Run programs, and return the calls that reached kernels."""
    recorder = Recorder()
    recorder.run(programs)
    assert not recorder.failed
    assert recorder.calls
    return recorder.calls


def assert_predicted(*programs: Program) -> list[Call]:
    """Run programs, and return their calls; fail with those whose workspace differs."""
    host, calls = this_machine(), calls_of(*programs)
    different = [
        f"{call}: {call.predicted(host)}, measured {call.measured}"
        for call in calls
        if call.predicted(host) != call.measured
    ]
    assert not different, "\n".join(different)
    return calls
