"""Copies on which the tensors of a real step lie, and its phases, which are those of a trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pytest_torchmem as torchmem
from pytest_torchmem.measurement.measured import on_copies
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.step import Step, StepPhases

CPU = torch.device("cpu")


class Holder:
    """Something with tensors that is neither a module nor a container."""

    def __init__(self) -> None:
        self.leaf = torch.ones(3, requires_grad=True)
        self.computed = self.leaf * 2


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


def addresses(*tensors: Tensor) -> list[int]:
    return [one.untyped_storage().data_ptr() for one in tensors]


def test_tensors_are_found_in_any_object() -> None:
    holder = Holder()
    before = addresses(holder.leaf, holder.computed)
    with on_copies(CPU, print, (holder,), {}, Step()):
        assert not {*addresses(holder.leaf, holder.computed)} & {*before}
        assert torch.equal(holder.computed, torch.full((3,), 2.0))
        assert holder.computed.is_leaf
        assert holder.computed.requires_grad
        with torch.no_grad():
            holder.leaf.zero_()
    assert addresses(holder.leaf, holder.computed) == before
    holder.computed.sum().backward()
    assert torch.equal(holder.leaf.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert holder.leaf._version == 0


def test_what_shares_a_storage_shares_its_copy() -> None:
    x = torch.ones(3)
    part = x[:2]
    with on_copies(CPU, print, (x, [part]), {"again": {"x": x}}, Step()):
        assert len({*addresses(x, part)}) == 1
        x.zero_()
        assert part.sum() == 0
    assert part.sum() == 2


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:TypedStorage:UserWarning")
def test_tensors_of_other_classes() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    given = (Scaled(torch.ones(2)), quantized, torch.ones(2, dtype=torch.complex64).conj().imag)
    values = [one.detach().clone() for one in given]
    with on_copies(CPU, print, given, {}, Step()):
        assert isinstance(given[0], Scaled)
        assert given[0].requires_grad
        assert all(map(torch.equal, given, values))
        with torch.no_grad():
            given[0].zero_()
            given[2].zero_()
    assert all(map(torch.equal, given, values))


def test_lazy_modules_are_lazy_again() -> None:
    lazy = nn.LazyLinear(4)
    with on_copies(CPU, lazy, (torch.ones(2, 3),), {}, Step()) as run:
        run()
        assert type(lazy) is nn.Linear
    assert type(lazy) is nn.LazyLinear
    assert lazy(torch.ones(2, 5)).shape == (2, 4)


@pytest.mark.parametrize("refers", [torch._C._WeakTensorRef, lambda one: one])
def test_what_cpp_refers_to_weakly(refers: Callable[[Tensor], object]) -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    held, gradient, value = refers(layer.weight), layer.weight.grad, layer.weight.clone()
    with on_copies(CPU, layer, (torch.ones(1, 2),), {}, Step(optimizer=torch.optim.SGD)) as run:
        run()
        assert not torch.equal(layer.weight, value)
    assert torch.equal(layer.weight, value)
    assert layer.weight.grad is gradient
    del held


BACKWARD, BETWEEN = Phase.BACKWARD, Phase.BETWEEN
FORWARD, OPTIMIZER = Phase.FORWARD, Phase.OPTIMIZER


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
    phases.end()
    assert phases.phase is FORWARD, "there was no backward"
    phases.begin(OPTIMIZER)
    phases.begin(BACKWARD)
    assert phases.phase is BACKWARD
    phases.end()
    assert phases.phase is OPTIMIZER
    phases.module_called()  # of a closure
    assert phases.phase is FORWARD
    phases.end()
    assert phases.phase is BETWEEN
    phases.module_called()
    assert phases.phase is FORWARD, "a call ends what is between"
