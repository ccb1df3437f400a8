"""How the steps of a loop are told apart that a test's body or a function runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pytest_torchmem as torchmem
from pytest_torchmem.diagnosis.diagnose import StepGrowth, step_growth


def growth_of(program: Callable[[], Any]) -> StepGrowth:
    return step_growth(torchmem.trace(program, device="cuda").timeline)


def inference(keep: list[Any] | None, calls: int = 1) -> None:
    model = nn.Linear(64, 64).cuda()
    with torch.no_grad():
        for _ in range(5):
            for _ in range(calls):
                y = model(torch.randn(1024, 64, device="cuda"))
            if keep is not None:
                keep.append(y)


def bare_parameter(keep: list[Any] | None, optimizer: bool) -> None:
    weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
    sgd = torch.optim.SGD([weight], 0.1)
    for _ in range(5):
        x = torch.randn(1024, 64, device="cuda")
        (x @ weight).sum().backward()
        if optimizer:
            sgd.step()
        if keep is not None:
            keep.append(x)


def adversarial(keep: list[Any] | None) -> None:
    """Steps of two optimizers in turn, after which different tensors are alive."""
    weights = [nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], 0.1) for weight in weights]
    for _ in range(4):
        fake = torch.randn(1024, 64, device="cuda") @ weights[0]
        (fake.detach() @ weights[1]).sum().backward()
        optimizers[1].step()
        loss = fake.sum()
        loss.backward()
        if keep is not None:
            keep.append(fake.detach())
        del fake
        optimizers[0].step()


ROW = 1024 * 64 * 4
PROGRAMS: dict[str, tuple[Callable[[Any], None], int, str]] = {
    "forwards without gradients": (inference, 5, "calls of a module"),
    "several forwards a step": (lambda keep: inference(keep, 3), 15, "calls of a module"),
    "backwards": (lambda keep: bare_parameter(keep, False), 5, "backwards"),
    "optimizer": (lambda keep: bare_parameter(keep, True), 5, "steps of an optimizer"),
    "two optimizers": (adversarial, 8, "steps of an optimizer"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_loop_keeps_is_found_and_what_it_lets_go_is_not(name: str) -> None:
    program, steps, counted = PROGRAMS[name]
    kept, freed = growth_of(lambda: program([])), growth_of(lambda: program(None))
    assert (kept.steps, kept.counted) == (freed.steps, freed.counted) == (steps, counted)
    assert kept.most == ROW
    assert freed.most == 0


def test_a_saved_profile_has_the_same_steps(tmp_path: Any) -> None:
    profile = torchmem.trace(lambda: inference([]), device="cuda")
    profile.save(tmp_path / "profile.json")
    read = torchmem.MemoryProfile.load(tmp_path / "profile.json")
    assert step_growth(read.timeline) == step_growth(profile.timeline)


def test_one_step_says_what_would_count() -> None:
    found = growth_of(lambda: torch.ones(4, device="cuda") + 1)
    assert (found.steps, found.difference) == (0, None) or found.steps == 1
