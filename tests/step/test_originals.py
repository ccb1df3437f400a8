"""A model that the step reaches by another way than its attributes is the same one."""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem import measure, trace

REGISTRY: dict[str, Any] = {}
Step = Callable[[Tensor], Tensor]


class Layers(nn.Module):
    """Two layers, that a function calls which it has as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.step: Any = None

    def both(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x) if self.step is None else self.step(x)


def chained(layers: Any) -> Step:
    return lambda x: functools.reduce(lambda made, layer: layer(made), layers(), x)


def registered(model: Any) -> Step:
    REGISTRY["model"] = model
    return lambda x: REGISTRY["model"].both(x)


def weakly_by_key(model: Any) -> Step:
    model.places = weakref.WeakKeyDictionary({model.a: 0, model.b: 1})
    model.same = WeakIdKeyDictionary({model.a.weight: 0})
    return chained(lambda: sorted(model.children(), key=model.places.__getitem__))


WAYS: list[Callable[[Any], Any]] = [
    *(registered, weakly_by_key),
    lambda model: chained(functools.partial(list, deque([model.a, model.b]))),
    lambda model: weakref.proxy(model).both,
    lambda model: mock.Mock(wraps=model.both),
]


def figures(model: Any, device: str, **options: Any) -> Any:
    """Return what a trace says of a model, and see to it that a measurement says the same."""
    x = torch.ones(2, 4)
    own = {name: (one, one.detach().clone()) for name, one in model.named_parameters()}
    found = trace(model, x, device=device, host="here", **options).figures()
    if device == "cpu":
        assert measure(model, x, **options).figures() == found
    for name, one in model.named_parameters():
        assert one is own[name][0]
        assert one.grad is None
        assert torch.equal(one, own[name][1])
    return found


def test_a_model_is_reached_by_another_way(device: str) -> None:
    expected = figures(Layers(), device, optimizer=torch.optim.AdamW)
    for way in WAYS:
        model = Layers()
        model.step = way(model)
        assert figures(model, device, optimizer=torch.optim.AdamW) == expected, way


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    expected = figures(model, device, optimizer=torch.optim.AdamW)
    scripted = torch.jit.trace(model, torch.ones(2, 4))
    assert figures(scripted, device, optimizer=torch.optim.AdamW) == expected


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, output: Tensor) -> Tensor:
        return (output - self.model(output)).sum() + self.model[0].weight.norm()

    def optimizer(self, _: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(one.parameters())} for one in self.model])


def test_methods_of_an_object_that_holds_the_model(device: str) -> None:
    def plain() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        loss = lambda out: (out - model(out)).sum() + model[0].weight.norm()  # noqa: E731
        optimizer = lambda _: Trainer(model).optimizer(_)  # noqa: E731
        return figures(model, device, loss_fn=loss, optimizer=optimizer)  # type: ignore[no-any-return]

    trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    options = {"loss_fn": trainer.loss, "optimizer": trainer.optimizer}
    assert figures(trainer.model, device, **options) == plain()


def test_what_a_registry_has_is_not_counted_twice() -> None:
    model, x = Layers(), torch.ones(2, 4)
    REGISTRY.update(model=model, x=x)

    def loss(output: Tensor) -> Tensor:
        return (output - REGISTRY["x"]).sum() + REGISTRY["model"].a.weight.norm()

    found = trace(model, x, host="here", loss_fn=loss)
    assert found.figures() == measure(model, x, loss_fn=loss).figures()


def test_a_child_that_has_its_parent() -> None:
    model: Any = Layers()
    model.a.parent = model
    plain = trace(Layers(), torch.ones(2, 4)).figures()
    assert trace(model, torch.ones(2, 4)).figures() == plain


class Forgetful(Layers):
    """Lets go of its first layer when that has run."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        del self.a
        return self.b(y)


def test_what_a_step_lets_go_of_is_freed() -> None:
    step: dict[str, Any] = {"device": "cpu", "backward": False}
    with torch.no_grad():
        kept = trace(Layers(), torch.ones(2, 4), **step)
        let_go = trace(Forgetful(), torch.ones(2, 4), **step)
        measured = measure(Forgetful(), torch.ones(2, 4), **step)
    assert kept.end - let_go.end == (4 * 8 + 8) * 4
    assert let_go.end == measured.end


PENALISED = nn.Linear(4, 4)


def penalty() -> Tensor:
    return sum(one.pow(2).sum() for one in PENALISED.parameters())  # type: ignore[return-value]


def penalised_loss(output: Tensor) -> Tensor:
    return output.sum() + penalty() + PENALISED.weight.norm()


def test_a_loss_names_the_model_as_a_global_variable(device: str) -> None:
    def own_penalty() -> Tensor:
        return sum(one.pow(2).sum() for one in model.parameters())  # type: ignore[return-value]

    def held(output: Tensor) -> Tensor:
        return output.sum() + own_penalty() + model.weight.norm()

    model, x, before = PENALISED, torch.ones(2, 4), PENALISED.weight.clone()
    named = trace(model, x, loss_fn=penalised_loss, device=device)
    assert named.figures() == trace(model, x, loss_fn=held, device=device).figures()
    if device == "cpu":
        assert named.figures() == measure(model, x, loss_fn=penalised_loss).figures()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert penalised_loss.__globals__["PENALISED"] is model
