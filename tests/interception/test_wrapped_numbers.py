"""A Python number that C++ wraps in a tensor lives as long as on the real device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import measure, trace
from tests.results import as_measured


def saved_by_nodes() -> None:
    x = torch.zeros(100, requires_grad=True)
    y = (x * 0.5 + 1.0) / 3
    y.sum().backward()


def in_place_and_through_a_view() -> None:
    x = torch.zeros(100, requires_grad=True)
    y = x * 2.0
    y.mul_(0.5)
    z = (y.view(10, 10) * 3).view(-1)
    del y
    z.sum().backward()


def in_place_on_a_view() -> None:
    x = torch.zeros(10, 10, requires_grad=True)
    y = x * 2.0
    y.t()[1:].mul_(0.5).div_(3)
    y.view(-1).add_(1.0)
    z = y.exp()
    z.sum().backward(retain_graph=True)
    x.grad = None
    z.sum().backward()
    x.grad = None
    del y, z
    x.exp().sum().backward()


def in_place_on_a_view_that_is_thrown_away() -> None:
    x = torch.zeros(10, 10, requires_grad=True)
    y = x * x
    y.t().mul_(0.5)
    del y
    torch.exp(x).sum().backward()
    z = (x * x).detach().t().mul_(2.0)
    (x * z).sum().backward()


def of_every_type() -> None:
    x = torch.zeros(64, dtype=torch.complex64, requires_grad=True)
    y = x * (1 + 2j) * True * 3
    y.abs().sum().backward()


def nothing_recorded() -> None:
    x = torch.zeros(100, requires_grad=True)
    with torch.no_grad():
        y = x * 0.5
        y.add_(1.0).div_(7)
    z = torch.zeros(100) * 2.0
    (x + z + y).sum().backward()


def a_graph_kept_and_walked_twice() -> None:
    x = torch.zeros(100, requires_grad=True)
    loss = ((x * 0.5) * x).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (first * 0.25).sum().backward()


def by_the_last_operator_of_a_phase() -> None:
    x = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([x], 0.1)
    (x * 0.5).backward(torch.ones(100))
    y = x * 0.5
    optimizer.step()
    y.add_(x)


def computed_again() -> None:
    x = torch.zeros(100, requires_grad=True)
    y: Tensor = checkpoint(lambda x: (x * 0.5).relu() * 2.0, x, use_reentrant=False)
    y.sum().backward()


def thrown_away() -> None:
    x = torch.zeros(100, requires_grad=True)
    for _ in range(3):
        x * 0.5
    y = x * 0.5
    del y
    (x * 3.0).sum().backward()


PROGRAMS = [saved_by_nodes, in_place_and_through_a_view, in_place_on_a_view, of_every_type]
PROGRAMS += [in_place_on_a_view_that_is_thrown_away, nothing_recorded, computed_again, thrown_away]
PROGRAMS += [a_graph_kept_and_walked_twice, by_the_last_operator_of_a_phase]


@pytest.mark.parametrize("program", PROGRAMS)
def test_wrapped_numbers(program: Callable[[], None]) -> None:
    as_measured(program)


def test_a_saved_number_is_released_with_its_node() -> None:
    """A number that is kept too long or not at all would not show in every peak."""

    def program() -> None:
        x = torch.zeros(100, requires_grad=True)
        y = x * 0.5
        del y
        kept = [x * float(number) for number in range(4)]
        sum(kept).sum().backward()  # type: ignore[union-attr]

    def sizes(profile: object) -> tuple[int, int]:
        timeline = profile.timeline  # type: ignore[attr-defined]
        made = [e for e in timeline.events if e > 0 and timeline.allocations[e - 1].nbytes == 8]
        freed = [e for e in timeline.events if e < 0 and timeline.allocations[-e - 1].nbytes == 8]
        return len(made), len(freed)

    made, freed = sizes(trace(program, host="here"))
    assert (made, freed) == sizes(measure(program))
    assert made == freed == 6  # the seed of the backward among them
