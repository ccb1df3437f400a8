"""Functions that a module has, and that hold the module: those of its copy hold the copy."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UsageError
from tests.step.test_cloner import PlainCloner


class Features(nn.Module):
    """Reads what its hooks write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.found: dict[str, Tensor] = {}
        for name, layer in self.layers.named_children():
            layer.register_forward_hook(self.finding(name))

    def finding(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            self.found[name] = output

        return hook

    def forward(self, x: Tensor) -> Tensor:
        self.layers(x)
        return sum(one.sum() for one in self.found.values())  # type: ignore[return-value]


def _wrapped(way: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    layer: Any = model[0]
    before = layer.forward
    if way == "closure":
        layer.forward = lambda x: before(x) * 2
    elif way == "default":
        layer.forward = lambda x, before=before: before(x) * 2
    elif way == "partial":
        layer.forward = functools.partial(lambda scale, x: before(x) * scale, 2)
    elif way == "weakly":
        myself = weakref.ref(layer)
        layer.forward = lambda x: nn.functional.linear(x, myself().weight) * 2
    else:

        @functools.wraps(before)
        def forward(*args: Any, **options: Any) -> Any:
            return before(*args, **options) * 2

        layer.forward = forward
    return model


class Twice(nn.Linear):
    """What the wrapped layers compute, as a class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class TwiceWithoutBias(nn.Linear):
    """What the one that is held weakly computes."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("way", ["closure", "default", "partial", "weakly", "wraps"])
def test_a_wrapped_forward_runs_on_the_copy(way: str, device: str) -> None:
    kind = TwiceWithoutBias if way == "weakly" else Twice
    model, plain = _wrapped(way), nn.Sequential(kind(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    assert trace(model, x, device=device).figures() == trace(plain, x, device=device).figures()
    assert measure(model, x).figures() == measure(plain, x).figures()
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hooks_write_to_the_copy_that_reads_it(device: str) -> None:
    model, x = Features(), torch.randn(2, 4)
    found = trace(model, x, device=device, host="here")
    assert found.backward_peak is not None
    assert model.found == {}  # the program's own has not run
    if device == "cpu":
        assert found.figures() == measure(model, x).figures()


def test_only_what_holds_a_part_is_made_anew() -> None:
    model: Any = nn.Linear(2, 2)
    model.log, elsewhere, count = [], [], 0

    def plain(x: Tensor) -> None:
        elsewhere.append(x)

    def counts(x: Tensor) -> tuple[Any, ...]:
        nonlocal count
        count += 1
        model.log.append(count)
        return model, elsewhere, again

    def again(times: int, held: Any = model.weight) -> Any:
        return held if times == 0 else again(times - 1)

    model.plain, model.counts, model.again = plain, counts, again
    model.weakly = weakref.ref(model)
    model.log_directly = lambda x, log=model.log: log.append(x)
    copied = PlainCloner(None).clone(model)

    assert copied.plain is plain
    assert copied.counts is not counts
    assert copied.counts.__name__ == "counts"
    held, same, function = copied.counts(torch.ones(1))
    assert held is copied
    assert same is elsewhere
    assert function is copied.again
    assert (count, model.log, copied.log) == (1, [], [1])  # one variable, two lists
    assert copied.again(3) is copied.weight
    assert copied.weakly() is copied
    copied.log_directly(2)
    assert (model.log, copied.log) == ([], [1, 2])


def test_a_function_that_is_not_complete_is_copied() -> None:
    """A variable that is assigned after the function that uses it has no value yet."""
    model: Any = nn.Linear(2, 2)

    def make() -> Callable[[], Any]:
        def use() -> Any:
            return model, later

        model.use = use
        copied = PlainCloner(None).clone(model)
        later = 1
        assert copied.use() == (copied, 1)
        return use

    assert make()()[0] is model


def test_beside_what_cannot_be_copied() -> None:
    model, x = Features(), torch.randn(2, 4)
    peak = trace(model, x).peak
    model.numbers = iter(range(2))  # type: ignore[assignment]
    model.lines = (line for line in "two")  # type: ignore[assignment]
    assert trace(model, x).peak == peak
    assert model.found == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loss_and_an_optimizer_that_hold_the_model(device: str) -> None:
    """They stand for the copy: its norm is a part of the loss, its parameters are stepped."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), torch.randn(2, 4)

    def loss(output: Tensor) -> Tensor:
        return output.sum() + model[0].weight.norm()

    def groups(_: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(one.parameters())} for one in model])

    def same_groups(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        return torch.optim.AdamW([{"params": own[:2]}, {"params": own[2:]}])

    plain = trace(model, x, device=device, loss_fn=loss, optimizer=same_groups)
    found = trace(model, x, device=device, loss_fn=loss, optimizer=groups)
    assert found.figures() == plain.figures()
    assert all(one.grad is None for one in model.parameters())
    if device == "cpu":
        here = trace(model, x, host="here", loss_fn=loss, optimizer=groups)
        assert measure(model, x, loss_fn=loss, optimizer=groups).figures() == here.figures()


class Regularized(nn.Module):
    """A loss with a parameter and a buffer of its own, and the norm of the model that it holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(4))
        self.register_buffer("target", torch.zeros(4))

    def forward(self, output: Tensor) -> Tensor:
        norms = [one.norm() for one in self.model.parameters()]
        return ((output * self.scale - self.target) ** 2).sum() + sum(norms)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loss_that_is_a_module_is_copied(device: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), torch.randn(2, 4)
    loss = Regularized(model)

    def both(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*parameters, loss.scale])

    found = trace(model, x, device=device, host="here", loss_fn=loss, optimizer=both)
    plain = trace(model, x, device=device, host="here", optimizer=torch.optim.AdamW)
    assert found.baseline == plain.baseline + loss.scale.nbytes * 2
    assert "loss_fn.scale" in {one.label for one in found.live_at_peak()}
    assert loss.scale.grad is None
    if device == "cpu":
        assert measure(model, x, loss_fn=loss, optimizer=both).figures() == found.figures()


HELD: dict[str, nn.Module] = {}


def test_an_optimizer_of_the_original_is_refused() -> None:
    """Here a global variable holds the model, which nothing is known of."""
    HELD["model"] = nn.Linear(2, 2)

    def optimizer(_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(HELD["model"].parameters())

    for run in (trace, measure):
        with pytest.raises(UsageError, match="the parameters that it is called with"):
            run(HELD["model"], torch.ones(1, 2), optimizer=optimizer)


def test_large_and_deep_things_that_a_function_holds() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    large, model = list(range(1_000_000)), nn.Linear(2, 2)

    def forward(x: Tensor) -> Tensor:
        return nn.functional.linear(x, model.weight) * len(large) * len(deep)

    model.forward = forward  # type: ignore[method-assign]
    copied: Any = PlainCloner(None).clone(model)
    cells = {
        cell.cell_contents for cell in copied.forward.__closure__ if cell.cell_contents is copied
    }
    assert cells == {copied}
    assert any(cell.cell_contents is large for cell in copied.forward.__closure__)
