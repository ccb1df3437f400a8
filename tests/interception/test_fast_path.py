"""The fast path writes down what the whole way of a call does, and most calls go it."""

from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import measure, trace
from pytest_torchmem.interception.kernels import LONGER, Kernels
from tests.tracing.programs import MODELS, PROGRAMS, differences

STEPS: list[Any] = [*MODELS, *PROGRAMS]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """How many calls could be short, by whether they were."""
    counts, run = {True: 0, False: 0}, Kernels._run_plain

    def counted(self: Kernels, *call: Any) -> Any:
        result = run(self, *call)
        counts[result is not LONGER] += 1
        return result

    monkeypatch.setattr(Kernels, "_run_plain", counted)
    return counts


def written_down(*target: Any, **options: Any) -> tuple[Any, ...]:
    profile = trace(*target, **options)
    assert profile.calls is not None
    # Numbers of autograd nodes go on from trace to trace.
    calls = [(*call[:3], call.node > 0, *call[4:6], call.label) for call in profile.calls]
    return profile.timeline, profile.figures(), calls


@pytest.mark.parametrize("step", STEPS, ids=lambda step: getattr(step, "__name__", step))
def test_both_ways_write_down_the_same(device, step, monkeypatch):
    if isinstance(step, str):
        build, make_input = MODELS[step]
        target: tuple[Any, ...] = build(), make_input()
    else:
        target = (step,)
    options: dict[str, Any] = {"device": device}
    options["optimizer"] = None if callable(step) else torch.optim.AdamW
    written_down(*target, **options)  # finds the plans
    short = written_down(*target, **options)
    monkeypatch.setattr(Kernels, "_run_plain", lambda self, *call: LONGER)
    assert written_down(*target, **options) == short


def test_most_calls_of_a_decoder_are_short(taken: dict[bool, int]) -> None:
    layer, x = nn.TransformerEncoderLayer(64, 4, batch_first=True), torch.randn(2, 16, 64)
    trace(layer, x, values="none")
    taken.update({True: 0, False: 0})
    trace(layer, x, values="none")  # small as they are, it would compute the values
    assert taken[True] > 2 * taken[False]


def test_encoders_on_the_host_run_beside_a_gpu() -> None:
    def program() -> None:
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
        with torch.no_grad():
            layer(torch.randn(2, 8, 64))

    assert trace(program, device="cuda").peak == 0


def test_conjugates_and_known_values_go_the_whole_way(taken: dict[bool, int]) -> None:
    def program() -> None:
        left, right = torch.randn(8, 8, dtype=torch.complex64), torch.arange(12)
        left = left.requires_grad_()
        (left.conj() @ left).abs().sum().backward()
        if right.flip(0)[0] == 11:  # a value that a trace computes
            torch.ones(1 << 16)

    assert differences(trace(program, host="here"), measure(program)) == {}
    assert trace(program).peak >= 4 << 16
    assert taken[False] > 0
