"""A model that the step reaches by another way than its attributes: it is the copy all the same."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem import measure, trace

REGISTRY: dict[str, Any] = {}
CURRENT: ContextVar[Any] = ContextVar("current")
Pair = namedtuple("Pair", ["first", "second"])
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


class Slotted:
    """Holds something where no dictionary is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, x: Tensor) -> Tensor:
        return self.value(x)


class Locked:
    """Holds something beside a lock."""

    def __init__(self, value: Any) -> None:
        self.value, self.lock = value, threading.RLock()

    def __call__(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.value(x)


class Proxy:
    """Has the attributes of what it stands for."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, x: Tensor) -> Tensor:
        return self.value(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


class Once(Layers):
    """Has one object."""

    one: Any = None

    def __new__(cls) -> Once:
        if cls.one is None:
            cls.one = super().__new__(cls)
        return cls.one


class Uncopied(Layers):
    """Says that it is its own copy."""

    def __deepcopy__(self, memo: Any) -> Uncopied:
        return self


class Rebuilt(Layers):
    """Is built anew in the place of a copy."""

    def __reduce__(self) -> Any:
        return Rebuilt, ()


class Sized(Layers):
    """Is made with an argument."""

    def __new__(cls, size: int) -> Sized:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()


class WithSlots(Layers):
    """Has attributes in slots."""

    __slots__ = ("first",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "first", [self.a])

    def both(self, x: Tensor) -> Tensor:
        return self.b(self.first[0](x))


def chained(layers: Any) -> Step:
    return lambda x: functools.reduce(lambda made, layer: layer(made), layers(), x)


def layers_of(holder: Locked) -> list[nn.Module]:
    return [holder.value.a, holder.value.b]


def registered(model: Any) -> Step:
    REGISTRY["model"] = model
    return lambda x: REGISTRY["model"].both(x)


def in_context(model: Any) -> Step:
    CURRENT.set(model)
    return lambda x: CURRENT.get().both(x)


def of_thread(model: Any) -> Step:
    here = threading.local()
    here.layers = [model.a, model.b]
    return chained(lambda: here.layers)


def generated(model: Any) -> Step:
    layers = (layer for _ in range(100) for layer in (model.a, model.b))
    return chained(lambda: [next(layers), next(layers)])


def by_identity(model: Any) -> Step:
    model.names = {id(one): name for name, one in model.named_children()}
    model.known = {id(one) for one in model.children()}
    return chained(lambda: [one for one in (model.a, model.b) if id(one) in model.known])


def by_identity_alone(model: Any) -> Step:
    model.places = {id(model.a): 0, id(model.b): 1}
    return chained(lambda: sorted(model.children(), key=lambda one: model.places[id(one)]))


def weakly_by_key(model: Any) -> Step:
    model.places = weakref.WeakKeyDictionary({model.a: 0, model.b: 1})
    model.same = WeakIdKeyDictionary({model.a.weight: 0})
    return chained(lambda: sorted(model.children(), key=model.places.__getitem__))


def weakly_by_value(model: Any) -> Step:
    model.layers = weakref.WeakValueDictionary(a=model.a, b=model.b)
    model.seen = weakref.WeakSet([model.a])
    return chained(lambda: [model.layers["a"], model.layers["b"]])


def mapped(model: Any) -> Step:
    model.layers = types.MappingProxyType({"a": model.a, "b": model.b})
    return chained(model.layers.values)


def mocked(model: Any) -> Step:
    return mock.create_autospec(model.both, side_effect=model.both)  # type: ignore[no-any-return]


WAYS: list[Callable[[Any], Any]] = [
    *(registered, in_context, of_thread, generated, by_identity, by_identity_alone),
    *(weakly_by_key, weakly_by_value, mapped, mocked),
    lambda model: Slotted(lambda x: model.both(x)),
    lambda model: Locked(lambda x: model.both(x)),
    lambda model: Proxy(model.both),
    lambda model: defaultdict(list, step=[lambda x: model.both(x)])["step"][0],
    lambda model: chained(functools.partial(list, deque([model.a, model.b]))),
    lambda model: chained(functools.partial(list, Pair(model.a, model.b))),
    lambda model: types.SimpleNamespace(step=lambda x: model.both(x)).step,
    lambda model: weakref.proxy(model).both,
    lambda model: Slotted(chained(functools.partial(layers_of, Locked(model)))),
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_is_reached_by_another_way(device: str) -> None:
    expected = figures(Layers(), device, optimizer=torch.optim.AdamW)
    for way in WAYS:
        model = Layers()
        model.step = way(model)
        assert figures(model, device, optimizer=torch.optim.AdamW) == expected, way
    for kind in (Once, Uncopied, Rebuilt, WithSlots, functools.partial(Sized, 3)):
        model = kind()
        before = {**vars(model)}
        assert figures(model, device, optimizer=torch.optim.AdamW) == expected, kind
        assert vars(model) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scripted_model(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    expected = figures(model, device, optimizer=torch.optim.AdamW)
    scripted = torch.jit.trace(model, torch.ones(2, 4))
    assert figures(scripted, device, optimizer=torch.optim.AdamW) == expected


class Trainer:
    """Has a model, a loss that calls it, and an optimizer for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, output: Tensor) -> Tensor:
        return (output - self.model(output)).sum() + self.model[0].weight.norm()

    def optimizer(self, _: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(one.parameters())} for one in self.model])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
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
