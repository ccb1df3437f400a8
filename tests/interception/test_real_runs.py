"""Kernels of a CPU on which oneDNN was not checked are run once, and take what they took then."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

from pytest_torchmem import MemoryProfile, measure, trace
from pytest_torchmem.interception.plan import remembered_plans
from pytest_torchmem.interception.values import computed
from pytest_torchmem.targets.host import Host

BFLOAT16, LAST = torch.bfloat16, {"memory_format": torch.channels_last}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this CPU be one of those that were not checked."""
    monkeypatch.setattr(Host, "is_checked", lambda host, dtype: False)
    remembered_plans.cache_clear()
    yield
    remembered_plans.cache_clear()


def step_of(layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return layer.to(dtype), torch.randn(shape, dtype=dtype, requires_grad=True)


def warns(profile: MemoryProfile) -> bool:
    return "an estimate" in "\n".join(profile.warnings)


STEPS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "one channel": lambda: step_of(nn.Conv2d(1, 8, 3, 2), 64, 1, 14, 14),
    "line": lambda: step_of(nn.Conv1d(20, 2, 1, 2), 16, 20, 9),
    "channels last": lambda: step_of(nn.Conv2d(20, 2, 5, padding=2).to(**LAST), 16, 20, 28, 28),
    "transposed": lambda: step_of(nn.ConvTranspose2d(16, 33, 2, padding=1), 2, 16, 14, 28),
    "groups": lambda: step_of(nn.Conv3d(16, 32, 2, 3, padding=1, groups=2), 1, 16, 14, 9, 14),
    "bfloat16": lambda: step_of(nn.Conv2d(8, 16, 3), 4, 8, 14, 14, dtype=BFLOAT16),
    "product": lambda: step_of(nn.Linear(65, 34), 64, 65, dtype=BFLOAT16),
    "recurrent": lambda: step_of(nn.LSTM(8, 16), 5, 3, 8),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_real_allocator_counts_the_same(name: str) -> None:
    layer, input = STEPS[name]()
    loss = (lambda out: out[0].sum()) if isinstance(layer, nn.LSTM) else None
    traced = trace(layer, input, loss_fn=loss, host="here")
    assert traced.figures() == measure(layer, input, loss_fn=loss).figures()
    assert traced.figures() == trace(layer, input, loss_fn=loss, host="here").figures()
    assert not warns(traced)


@pytest.mark.parametrize("host", ["reference", "here"])
def test_what_is_large_is_not_run(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "LARGEST", 1000)
    assert warns(trace(*STEPS["one channel"](), host=host))


def test_nothing_is_run_for_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference host's figures are its own, wherever they are asked for."""
    monkeypatch.setattr(computed, "profile", None)  # a call of it would fail
    assert warns(trace(*STEPS["one channel"]()))


def test_beside_another_profiler_it_is_an_estimate() -> None:
    with profile():
        assert warns(trace(*STEPS["one channel"](), host="here"))
    remembered_plans.cache_clear()
    assert not warns(trace(*STEPS["one channel"](), host="here"))


def test_the_program_sees_nothing_of_it() -> None:
    """Neither its random numbers and modes nor its tensors."""
    step = STEPS["one channel"]()
    before = [tensor.detach().clone() for tensor in (*step[0].parameters(), step[1])]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    seen: list[Any] = []

    def program() -> None:
        with torch.no_grad():
            step[0](step[1])
            seen.append(torch.is_grad_enabled())
        seen.append(torch.autograd._profiler_enabled())

    trace(program, host="here")
    assert seen == [False, False]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    after = (*step[0].parameters(), step[1])
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
