"""A program is traced again as if it ran for the first time."""

import copy
import gc
import pickle
import random
import sys
from array import array
from collections import UserDict, defaultdict, deque
from collections.abc import Callable
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

import pytest_torchmem as torchmem
from pytest_torchmem.errors import UsageError
from pytest_torchmem.journal.contents import is_generator
from tests.modules import Parts


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


_SCHEDULES: list[Callable[[Any], Any]] = [
    lambda o: rates.OneCycleLR(o, 1.0, total_steps=9),
    lambda o: rates.SequentialLR(o, [rates.LinearLR(o), rates.CosineAnnealingLR(o, 4)], [2]),
    lambda o: rates.LambdaLR(o, lambda step: 1 / (1 + step)),
]


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_schedules_and_scalers_go_on_from_where_they_were(schedule: Callable[[Any], Any]) -> None:
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu", growth_interval=1)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = schedule(optimizer)

    def step(plan: Any) -> None:
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            plan.step()

    before = repr([one.state_dict() for one in (optimizer, plan, scaler)])
    torchmem.trace(step, plan)
    assert repr([one.state_dict() for one in (optimizer, plan, scaler)]) == before


def test_versions_of_what_is_averaged_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def step(model: nn.Module, averaged: nn.Module) -> None:
        for _ in range(2):
            averaged.update_parameters(model)  # type: ignore[operator]

    before = [one._version for one in (*averaged.parameters(), *averaged.buffers())]
    torchmem.trace(step, model, averaged)
    assert [one._version for one in (*averaged.parameters(), *averaged.buffers())] == before


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_of_optimizers_die_when_they_do(copied: Callable[[Any], Any]) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()

    def program() -> None:
        model = nn.Linear(64, 64)
        pair = model, torch.optim.Adam(model.parameters())
        train(*pair)
        train(*copied(pair))

    real = torchmem.measure(program)
    traced = torchmem.trace(program, host="here").figures()  # and what a pickle takes on the host
    assert traced.items() >= real.figures().items()
    assert real.end == 0


def test_a_second_pass_finds_what_the_first_one_found() -> None:
    step, optimizer, notes = training()
    calls: list[int] = []

    def body() -> None:
        step()
        calls.append(notes["calls"])
        assert torch.randn(3000, 1000).sum() < 1e9  # beyond what a first pass computes
        assert len(optimizer.state) == 2

    torchmem.trace(body)
    assert calls == [1]
    assert notes["calls"] == len(notes["losses"]) == 1
    assert torchmem.trace(body, values="real").values == "real"


class Policy:  # keeps its last distribution, as those of reinforcement learning do
    def __init__(self) -> None:
        self.distribution: torch.distributions.Normal | None = None

    def act(self) -> torch.Tensor:
        if self.distribution is None:
            self.distribution = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
        return self.distribution.sample((1_000_000,))


def test_objects_that_a_function_is_called_with_are_as_before() -> None:
    policy = Policy()

    def body(policy: Policy) -> None:
        assert policy.distribution is None and policy.act().mean().abs() < 0.1  # noqa: PT018

    torchmem.trace(body, policy)


CACHE: dict[str, torch.Tensor] = {}
KEPT: list[Any] = [None]
runs = 0
table: torch.Tensor | None = None


class Cached(Parts):  # keeps tables in every place where other programs find them as well
    calls = 0
    rows: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global table
        Cached.calls += 1
        if table is None:
            table = torch.randn(1000, 64).to(x.device)
        if Cached.rows is None:
            Cached.rows = torch.randn(1000, 64).to(x.device)
        if self.columns is None:
            self.columns = torch.randn(1000, 64).to(x.device)
        if "table" not in CACHE:
            CACHE["table"] = torch.randn(1000, 64).to(x.device)
        if KEPT[0] is None:
            KEPT[0] = (torch.randn(1000, 64).to(x.device), 1)
        tables = (table, Cached.rows, self.columns, CACHE["table"], KEPT[0][0])
        return sum((x @ one.T).sum() for one in tables) + self.linear(x).sum()  # type: ignore[return-value]


THERE = torch.ones(5)


Mapping: Any = type("Mapping", (dict,), {})
Items: Any = type("Items", (list,), {})
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "list": (lambda: [THERE, THERE], lambda held, new: held.append(new)),
    "numbers": (lambda: [1, 2], lambda held, new: held.append(new)),
    "set": (lambda: {THERE}, lambda held, new: held.add(new)),
    "deque": (lambda: deque([THERE]), lambda held, new: held.append(new)),
    "new key": (lambda: {"a": THERE}, lambda held, new: held.update(b=new)),
    "old key": (lambda: {"a": THERE, "b": THERE}, lambda held, new: held.update(a=new)),
    "of lists": (
        lambda: {"a": [THERE], "b": []},
        lambda held, new: (held["a"].append(new), held["b"].append(new)),
    ),
    "default": (lambda: defaultdict(list, a=[THERE]), lambda held, new: held["b"].append(new)),
    "rows": (lambda: [[THERE], [THERE]], lambda held, new: held[0].append(new)),
    "tables": (lambda: [{"a": THERE}], lambda held, new: held[0].update(b=new)),
    "tuple": (lambda: ([THERE], 3), lambda held, new: held[0].append(new)),
    "attribute": (lambda: SimpleNamespace(a=THERE), lambda held, new: setattr(held, "a", new)),
    "list in it": (lambda: SimpleNamespace(a=[THERE]), lambda held, new: held.a.append(new)),
    "UserDict": (lambda: UserDict(a=THERE), lambda held, new: held.update(b=new)),
    "own mapping": (lambda: Mapping(a=THERE), lambda held, new: held.update(b=new)),
    "own list": (lambda: Items([THERE]), lambda held, new: held.append(new)),
}


def cycle() -> list[Any]:
    held: list[Any] = [THERE]
    held.append(held)
    return held


HELD["itself"] = (cycle, lambda held, new: held.append(new))


class Holding(Parts):  # writes into a container of its class, and into one of its file
    held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.write(Holding.held, y)
        self.write(held_here, y)
        return y


held_here: Any = None


@pytest.mark.parametrize("case", HELD)
@pytest.mark.parametrize("of", ["module", "function"])
def test_what_a_container_held_before_a_trace_stays(case: str, of: str) -> None:
    """A trace takes its own tensors out of it; the object and all others in it are a program's."""
    make, write = HELD[case]
    places = Holding.held, globals()["held_here"] = make(), make()
    shown = list(map(repr, places))
    model = Holding(linear=nn.Linear(4, 5), write=write)
    try:
        torchmem.trace(model if of == "module" else lambda x: model(x), torch.zeros(2, 4))
        assert Holding.held is places[0]
        assert held_here is places[1]
        assert list(map(repr, places)) == shown
    finally:
        Holding.held = globals()["held_here"] = None


@pytest.mark.parametrize("of", ["module", "function"])
@pytest.mark.parametrize("values", ["auto", "real"])
def test_caches_that_others_use_hold_nothing_of_a_trace(of: str, values: str) -> None:
    model = Cached(columns=None, linear=nn.Linear(64, 64))

    def function(x: torch.Tensor) -> None:
        model(x.to("cuda" if torch.cuda.is_available() else "cpu")).backward()

    x = torch.randn(2, 64)
    target = model if of == "module" else function
    first = torchmem.trace(target, x, values=values)
    assert torchmem.trace(target, x, values=values).figures() == first.figures()
    if of == "module":
        on_cuda = torchmem.trace(target, x, device="cuda", values=values)
        assert on_cuda.baseline + 5 * 256_000 < on_cuda.peak
    assert (table, Cached.rows, model.columns, CACHE, KEPT) == (None, None, None, {}, [None])
    try:
        assert model(x).isfinite().all()
        for one in (table, Cached.rows, CACHE["table"], KEPT[0][0]):
            assert one.isfinite().all()
        torchmem.trace(target, x, values=values)
        assert CACHE["table"].isfinite().all()  # real ones stay
    finally:
        CACHE.clear()
        KEPT[0] = Cached.rows = globals()["table"] = None


def test_a_table_whose_tensors_have_other_memory_stays_itself() -> None:
    """A parameter that the program gave other data is the one that it was, and so is its table."""
    module = nn.Linear(4, 4)
    table, weight, before = module._parameters, module.weight, module.weight.detach().clone()

    torchmem.trace(lambda: setattr(module.weight, "data", torch.zeros(4, 4)))
    assert module._parameters is table
    assert module.weight is weight
    assert torch.equal(weight, before)


def test_names_are_bound_again_for_a_second_pass() -> None:
    seen: list[tuple[int, int, int]] = []
    mine = 0

    class Counter:
        made = 0
        __slots__ = ("count",)

        def __init__(self) -> None:
            self.count = 0

    counter = Counter()

    def body() -> None:
        nonlocal mine
        global runs
        mine, runs = mine + 1, runs + 1
        counter.count, Counter.made = counter.count + 1, Counter.made + 1
        assert torch.randn(3000, 1000).sum() < 1e9
        seen.append((mine, runs, counter.count))
        assert Counter.made == 1

    torchmem.trace(body)
    assert seen == [(1, 1, 1)]


ELSEWHERE = ModuleType("elsewhere")
exec(
    """
import functools, torch
CACHE, counts = {}, [0]
def fill():
    counts[0] += 1
    CACHE.setdefault("table", torch.randn(3000, 1000))
    assert CACHE["table"].sum() < 1e9  # beyond what a first pass computes
def count():
    import elsewhere
    elsewhere.counts = [*elsewhere.counts]
    elsewhere.fill()
cached = functools.lru_cache(fill)
class Base:
    def inner(self): fill()
class Trainer(Base):
    filled = property(lambda self: self.inner())
    later = functools.cached_property(lambda self: self.inner())
    make = classmethod(lambda cls: cls().inner())
    def __call__(self): self.inner()
""",
    vars(ELSEWHERE),
)
Trainer: Any = ELSEWHERE.Trainer
WAYS: list[Callable[[], Any]] = [
    *(lambda: ELSEWHERE.fill(), lambda: ELSEWHERE.count(), lambda: ELSEWHERE.cached(), Trainer()),
    *(lambda: Trainer().inner(), lambda: Trainer().filled, lambda: Trainer().later, Trainer.make),
]


@pytest.mark.parametrize("way", WAYS)
def test_what_other_files_and_methods_name_is_as_before(way: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", ELSEWHERE)
    monkeypatch.setattr(ELSEWHERE, "counts", [0])
    torchmem.trace(way)
    assert (ELSEWHERE.counts, ELSEWHERE.CACHE) == ([1], {})


IN_C: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: torch.Generator().manual_seed(0), lambda held: torch.rand(1, generator=held).item()),
    (lambda: random.Random(0), lambda held: held.gauss()),
    (lambda: numpy.random.default_rng(0), lambda held: held.normal()),
    (lambda: numpy.random.RandomState(0), lambda held: held.normal()),
    (lambda: array("i"), lambda held: (held.append(1), len(held))),
    (lambda: bytearray(), lambda held: (held.append(1), len(held))),
    (lambda: numpy.zeros((2, 2)), lambda held: held.__iadd__(1).sum()),
    (lambda: StringIO(), lambda held: (held.write("a"), held.getvalue())),
]


@pytest.mark.parametrize(("make", "use"), IN_C)
def test_what_an_object_has_in_c_is_as_before(make: Any, use: Any) -> None:
    held, seen = make(), list[Any]()

    def body() -> None:
        seen.append(use(held))
        assert torch.randn(3000, 1000).sum() < 1e9  # beyond what a first pass computes

    torchmem.trace(body)
    assert seen == [use(make())]
    assert use(held) == use(make()) or not is_generator(held)


def test_what_a_program_lets_go_of_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.zeros(1_000_000)
    monkeypatch.setitem(CACHE, "old", torch.zeros(1_000_000))

    def body() -> None:
        nonlocal hidden
        hidden = hidden[:10].clone()
        CACHE["old"] = CACHE["old"][:10].clone()
        torch.zeros(500_000)

    assert torchmem.trace(body).peak == 4_000_000 + 4_000_000 + 40


def test_a_trace_inside_of_a_transform_of_functions_is_refused() -> None:
    model, given = nn.Linear(2, 2), torch.ones(1, 2)

    def body(x: torch.Tensor) -> torch.Tensor:
        torchmem.trace(model, given)
        return x.sum()

    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(UsageError, match=r"inside of torch\.vmap"):
            transform(body)(torch.ones(3))
    assert torchmem.trace(torch.func.grad(lambda x: (x * x).sum()), torch.ones(3)).peak > 0
