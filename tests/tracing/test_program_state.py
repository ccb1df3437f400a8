"""A program is traced again as if it ran for the first time."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import pytest_torchmem as torchmem


def training() -> Any:
    """Return a step with an optimizer that the step did not make, and what it writes down."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    notes: dict[str, Any] = {"calls": 0, "losses": []}

    def step() -> None:
        notes["calls"] += 1
        loss = model(torch.randn(8, 64)).sum()
        loss.backward()
        optimizer.step()
        notes["losses"].append(loss.detach())

    return step, optimizer, notes


def test_an_optimizer_keeps_nothing_of_a_trace() -> None:
    step, optimizer, _ = training()
    first = torchmem.trace(step)
    assert not optimizer.state
    assert torchmem.trace(step).figures() == first.figures()
    step()
    state = {key: dict(value) for key, value in optimizer.state.items()}
    torchmem.trace(step)
    for key, value in optimizer.state.items():
        assert value["exp_avg"] is state[key]["exp_avg"]
        assert value["exp_avg"].isfinite().all()


def test_optimizers_of_the_program_die_when_they_do() -> None:
    def program() -> int:
        model = nn.Linear(64, 64, bias=False)
        torch.optim.Adagrad(model.parameters())
        model(torch.randn(8, 64)).sum().backward()
        optimizer = torch.optim.Adagrad(model.parameters())
        optimizer.step()
        del optimizer
        return len(gc.garbage)

    assert torchmem.trace(program).peak == torchmem.measure(program).peak


def test_a_second_pass_finds_what_the_first_one_found() -> None:
    step, optimizer, notes = training()
    calls: list[int] = []

    def body() -> None:
        step()
        calls.append(notes["calls"])
        large = torch.randn(3000, 1000)  # beyond what a first pass computes
        if large.sum() > 1e9:
            raise AssertionError
        assert len(optimizer.state) == 2

    torchmem.trace(body)
    assert calls == [1]
    assert notes["calls"] == len(notes["losses"]) == 1
    assert torchmem.trace(body, values="real").values == "real"


class Policy:
    """Keeps its last distribution, as those of reinforcement learning do."""

    def __init__(self) -> None:
        self.distribution: torch.distributions.Normal | None = None

    def act(self) -> torch.Tensor:
        if self.distribution is None:
            self.distribution = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
        return self.distribution.sample((1_000_000,))


def test_objects_that_a_function_is_called_with_are_as_before() -> None:
    policy = Policy()

    def body(policy: Policy) -> None:
        assert policy.distribution is None
        actions = policy.act()
        assert actions.mean().abs() < 0.1

    torchmem.trace(body, policy)
