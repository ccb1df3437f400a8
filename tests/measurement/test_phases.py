"""A trace and the real step agree on what a phase is."""

import pytest
import torch
from torch import nn

import pytest_torchmem as torchmem
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.step import StepPhases

BACKWARD, BETWEEN, FORWARD, OPTIMIZER = (
    Phase.BACKWARD,
    Phase.BETWEEN,
    Phase.FORWARD,
    Phase.OPTIMIZER,
)


def backward_in_a_closure() -> None:
    model = nn.Linear(50, 50)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(20, 50)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.ones(5000)
    model(torch.ones(1, 50))


def optimizer_in_a_backward() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    for parameter in model.parameters():
        optimizer = torch.optim.Adam([parameter])

        def step(_: object, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    model(torch.ones(20, 100)).sum().backward()
    torch.ones(5000)


def two_backwards_and_no_module() -> None:
    weight = torch.ones(1000, requires_grad=True)
    (weight * 2).sum().backward()
    (weight * weight).sum().backward()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            backward_in_a_closure,
            [FORWARD, OPTIMIZER, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, FORWARD],
        ),
        (optimizer_in_a_backward, [FORWARD, *[BACKWARD, OPTIMIZER] * 4, BACKWARD, BETWEEN]),
        (two_backwards_and_no_module, [FORWARD, BACKWARD, BETWEEN, BACKWARD]),
    ],
)
def test_a_trace_has_the_phases_of_the_real_step(program, expected):
    traced, measured = torchmem.trace(program), torchmem.measure(program)
    expected = [Phase.BASELINE, *expected]
    assert [phase for _, phase in traced.timeline.phases] == expected
    # The real one notices the end of the last backward.
    assert [phase for _, phase in measured.timeline.phases][: len(expected)] == expected
    assert traced.figures().keys() == measured.figures().keys()
    peaks = ("forward_peak", "backward_peak", "optimizer_peak")
    for name in set(peaks) & measured.figures().keys():
        assert abs(traced.figures()[name] - measured.figures()[name]) <= 64


def test_an_inner_phase_counts_and_the_outer_one_goes_on() -> None:
    phases = StepPhases()
    phases.begin(OPTIMIZER)
    phases.begin(BACKWARD)
    assert phases.phase is BACKWARD
    phases.end()
    assert phases.phase is OPTIMIZER
    phases.module_called()  # of a closure
    assert phases.phase is FORWARD
    phases.end()
    assert phases.phase is BETWEEN


def test_an_optimizer_without_a_backward_leaves_the_forward_as_it_was() -> None:
    phases = StepPhases()
    phases.begin(OPTIMIZER)
    phases.end()
    assert phases.phase is FORWARD


def test_a_call_of_a_module_ends_between() -> None:
    phases = StepPhases()
    phases.begin(BACKWARD)
    phases.module_called()
    phases.end()
    assert phases.phase is BETWEEN
    phases.module_called()
    assert phases.phase is FORWARD
