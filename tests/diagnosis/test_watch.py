"""What a second, watched trace sees: why attention fell, and what refers to tensors."""

import importlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, tee
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, local
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import finalize, ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pytest_torchmem as torchmem
from pytest_torchmem import trace
from pytest_torchmem.diagnosis.diagnose import StepGrowth, step_growth
from pytest_torchmem.profile.timeline import Lifetimes, Role
from pytest_torchmem.tracing.changed_code import Growth, changed_code
from pytest_torchmem.tracing.code import code_of, parts_of, texts_of
from pytest_torchmem.tracing.holders import HeldNames
from pytest_torchmem.tracing.watch import watching
from tests.diagnosis.planted import BATCH, LENGTH, WIDTH, Block, Decoder, ids
from tests.modules import Parts

PLANTED = Path(__file__).with_name("planted.py")


def test_the_constraint_that_attention_does_not_keep(device: str) -> None:
    with watching(device, attention=True) as watch:
        trace(Decoder(depth=1, wrong={"strided": True}).bfloat16(), ids(), device=device)
    [(line, reason)] = watch.attention.items()
    marked = PLANTED.read_text(encoding="utf-8").splitlines()
    assert marked[int(line.rpartition(":")[2]) - 1].endswith("# here: strided_values")
    assert reason == f"value is not contiguous in its last dimension, of stride {LENGTH}"


def test_what_keeps_a_tensor(device: str) -> None:
    kept: dict[str, Tensor] = {}

    class Keeping(Parts):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.block(x)

    def program() -> None:
        model = Keeping(block=Block(kept=True)).to(device)
        model(torch.zeros(BATCH, LENGTH, WIDTH, device=device)).sum().backward()
        kept["model"] = model

    timeline = trace(program, device=device).timeline
    lifetimes = Lifetimes.of(timeline)
    held = {
        index: allocation.nbytes
        for index, allocation in enumerate(timeline.allocations)
        if lifetimes.role(index, allocation) is Role.HELD
    }
    with watching(device, held) as watch:
        trace(program, device=device)
    named = {re.split(r" \(| in the dict ", name)[0] for name in watch.holders.values()}
    assert {"Keeping.last", "the list Keeping.block.kept"} <= named


def test_functions_of_the_plugin_hold_nothing_that_a_program_knows() -> None:
    def closure_of(value: Tensor) -> Callable[[], Tensor]:
        return lambda: value

    kept = closure_of(torch.zeros(1))
    assert "the closure of " in HeldNames().of(kept())
    kept.__module__ = "pytest_torchmem.interception.placement"
    assert "the closure of " not in HeldNames().of(kept())


def test_a_module_that_a_variable_holds_is_told_by_its_path() -> None:
    average = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert HeldNames().of(average[1].weight).startswith("average.1.weight of test_a_module_that")


def test_what_a_librarys_object_holds_is_told_with_what_holds_that(tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "some_cache.py").write_text("class Layer: pass\nclass Cache: pass\n")
    monkeypatch.syspath_prepend(installed)
    library = importlib.import_module("some_cache")
    cache, layer, caches = library.Cache(), library.Layer(), []
    cache.layers, layer.keys = [layer], torch.zeros(1)
    caches.append(cache)
    tensor = layer.keys
    del cache, layer
    caches_of = HeldNames(ignore=None)
    caches_of._variables.pop(id(tensor))  # the variable of this test
    assert caches_of.of(tensor).startswith("Layer.keys in the list caches of test_what_a_librarys")


class Box:
    tensor: Tensor


@dataclass(slots=True, eq=False)
class Slotted:
    tensor: Tensor


class Moment(NamedTuple):
    hidden: Tensor


CURRENT: ContextVar[Tensor] = ContextVar("CURRENT")


class Keeper:
    def __init__(self) -> None:
        self.queue: SimpleQueue[Tensor] = SimpleQueue()
        self.future: Future[Tensor] = Future()
        self.models: deque[nn.Module] = deque()
        self.samples: dict[Box, int] = {}
        self.memory: deque[tuple[Tensor, ...]] = deque()
        self.callbacks: list[Callable[[], object]] = []
        self.errors: list[Exception] = []

    def listen(self, tensor: Tensor) -> None:
        self.callbacks.append(lambda: tensor)

    def default(self, tensor: Tensor) -> None:
        self.callbacks.append(lambda kept=tensor: kept)

    def cache(self, _: Tensor) -> Tensor:
        self.table = lru_cache(torch.zeros)  # made here: what is made before tests is frozen
        return self.table(1)

    def average(self, _: Tensor) -> Tensor:
        self.models.append(nn.Sequential(nn.Sequential(nn.Linear(1, 1))))
        return self.models[0][0][0].weight

    def sample(self, tensor: Tensor) -> None:
        box = Box()
        box.tensor = tensor
        self.samples[box] = 1

    def split(self, tensor: Tensor) -> None:
        first, self.second = tee([tensor])
        next(first)

    def localize(self, tensor: Tensor) -> None:
        self.state = local()
        self.state.hidden = tensor

    def suspend(self, _: Tensor) -> Tensor:
        def stream() -> Iterator[Tensor]:
            hidden = torch.zeros(1)
            yield hidden

        self.streams = [stream()]
        return next(self.streams[0])

    def in_thread(self, _: Tensor) -> Tensor:
        taken: SimpleQueue[Tensor] = SimpleQueue()

        def work() -> None:
            batch = torch.zeros(1)
            taken.put(batch)
            self.queue.get()

        self.worker = Thread(target=work, daemon=True)
        self.worker.start()
        return taken.get()

    def in_slots(self, tensor: Tensor) -> None:
        self.slotted = [Slotted(tensor)]

    def in_record(self, tensor: Tensor) -> None:
        self.moments = [Moment(tensor)]

    def fail(self, tensor: Tensor) -> None:
        try:
            raise ValueError
        except ValueError as error:
            self.errors.append(error)


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda self, one: self.memory.append((one,)), "the deque Keeper.memory"),
        (lambda self, one: self.queue.put(one), "the SimpleQueue Keeper.queue"),
        (Keeper.listen, "the closure of Keeper.listen.<locals>.<lambda> in the list Keeper."),
        (Keeper.default, "the defaults of Keeper.default.<locals>.<lambda> in the list Keeper."),
        (lambda self, one: self.future.set_result(one), "Future._result in Keeper.future"),
        (Keeper.average, "Sequential.0.0.weight in the deque Keeper.models"),
        (Keeper.sample, "Box.tensor in the dict Keeper.samples"),
        (lambda self, one: self.callbacks.append(partial(print, one)), "the list Keeper.callbacks"),
        (Keeper.fail, "the traceback of ValueError in the list Keeper.errors"),
        (Keeper.split, "the tee Keeper.second"),
        (Keeper.localize, "local.hidden in Keeper.state"),
        (Keeper.suspend, "hidden of stream in the list Keeper.streams"),
        (lambda self, one: finalize(self, print, one), "the tuple finalize._Info.args"),
        (lambda _, one: CURRENT.set(one), "the variable CURRENT of a context"),
        (Keeper.in_thread, "the variable batch of work"),
        (Keeper.in_slots, "Slotted.tensor in the list Keeper.slotted"),
        (Keeper.in_record, "Moment.hidden in the list Keeper.moments"),
        (Keeper.cache, "the lru_cache of _VariableFunctionsClass.zeros"),
    ],
)
def test_what_programs_keep_tensors_in(keep: Callable[[Keeper, Tensor], Any], name: str) -> None:
    keeper, kept = Keeper(), [torch.zeros(1)]
    kept.append(keep(keeper, kept[0]))
    kept = [one for one in kept if isinstance(one, Tensor)]
    assert HeldNames(ignore=kept).of(kept[-1]).startswith(name)


CODE = """from functools import cache; import hypothesis
WIDTH = 4
@cache
def scaled(x, deep=False):
    '''Doc.'''
    return x * WIDTH
class Net:
    def forward(self, x):
        y = scaled(x)
        return y
def unused(x):
    return x
def run():
    return Net().forward(hypothesis)
"""
BODY, IS = "y = scaled(x)\n        return y", "y = scaled(x)"


@pytest.mark.parametrize(
    ("was", "now", "found"),
    [
        ("Doc", "# comment\n    Text", []),
        ("= 4", "= 4  # comment", []),
        ("return x\n", "return 1\n", []),  # of what is not called
        ("= 4", "= 8", ["2: WIDTH = 8  # was: 4"]),
        ("=False", "=True", ["4: def scaled(x, deep=True):  # was: False"]),
        ("x *", "x +", ["6\n  - return x * WIDTH\n  + return x + WIDTH"]),
        ("scaled", "wide", []),
        ("Net", "Model", []),
        ("        y = scaled(x)\n", "", ["9\n  - y = scaled(x)"]),
        ("return y", "return y + 1", ["10: return y + 1  # came: + 1"]),
        (
            " y\n",
            " unused(1)\n",
            ["10\n  - return y\n  + return unused(1)", "11: def unused(x):  # not reached before"],
        ),
        ("@cache\n", "", ["3\n  - @cache"]),
        (
            "        y = scaled(x)\n",
            "        if x:\n            y = scaled(x)\n",
            ["9-10\n  + if x:\n        y = scaled(x)"],
        ),
        (
            "y = sc",
            "if x:\n            y = -sc",
            [f"9-10\n  - {IS}\n  + if x:\n  +     y = -scaled(x)"],
        ),
        (BODY, "return y\n        y = scaled(x)", ["9: return y  # stood after: y = scaled(x)"]),
        (" = scaled(x)", " = scaled(\n            x,\n        )", []),
    ],
)
def test_code_that_changed(tmp_path, monkeypatch, was, now, found):
    module = ModuleType("some_code")
    module.__file__ = str(tmp_path / "some_code.py")
    monkeypatch.setitem(sys.modules, "some_code", module)
    sides = []
    for text in (CODE, CODE.replace(was, now)):
        Path(module.__file__).write_text(text)
        exec(compile(text, module.__file__, "exec"), vars(module))
        sides.append(code_of([module.run]))
    before = texts_of(sides[0])
    older = changed_code({**before, "hypothesis": "6.0"}, sides[0])
    assert [str(one) for one in older] == [f"hypothesis {before['hypothesis']} (was 6.0)"]
    versions = [lambda file: [CODE.upper(), CODE], lambda file: [""]]
    told, bare = (changed_code(before, sides[1], versions=one) for one in versions)
    assert [one.partition(".py:")[2] for one in map(str, told)] == found
    assert {one for change in told for one in change.places} <= {
        one for change in bare for one in change.places
    }


FORMER = """@cache
def begin(x, width):
    for one in x:
        y = made(one, 4)
    length = len(x)
    s = scaled(x, length).to(x.dtype)
    return full((length, width), y, dtype=long)
"""
LATER = """def begin(x, width, depth=2):
    for one in x:
        count(one)
    y = made(one, 4)
    return full(
        (width, width), y, dtype=long,
    )
@cache
def log(x):
    s = scaled(x, length)
    emit(x, "stem_", flush=True)
"""
CHANGED = {
    "full": "5: return full((width, width), y, dtype=long)  # was: length",
    "cache": "1\n  - @cache  # log has it now",
    "made": "4: y = made(one, 4)",
    "x.dtype": "10: s = scaled(x, length)  # was: s = scaled(x, length).to(x.dtype), in begin",
    "flush": '11: emit(x, "stem_", flush=True)  # which is in the name stem_0 now',
}


@pytest.mark.parametrize("code", CHANGED)
def test_what_changed_is_shown_in_the_order_of_the_cause(code):
    parts = (parts_of(text).items() for text in (FORMER, LATER))
    before, now = ({f"a.py: {one}": lines for one, (_, lines) in part} for part in parts)
    growth = Growth(code=code, renamed={"stem_0": "first"} if code == "flush" else {})
    shown = changed_code(texts_of(before), now, growth, lambda file: [FORMER])
    assert "\n".join(shown[0].lines(1)) == f"a.py:{CHANGED[code]}"


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=9), st.booleans())
def test_whatever_is_edited_lines_are_quoted_that_are_there(edits, is_in_git):
    then, now = FORMER.splitlines(), FORMER.splitlines()
    for what, at, other in edits:
        own = [[], [now[at]] * 2, [now[other]], ["    " + now[at]], [now[at].strip()], ["y = x"]]
        now[at : at + 1] = own[what] or now[at : at + 1] * (len(now) < 7)
    sides = [parts_of("\n".join(lines)) for lines in (then, now)]
    before, code = ({f"a.py: {n}": own for n, (_, own) in one.items()} for one in sides)
    versions = ["\n".join(then)] if is_in_git else []
    for change in changed_code(texts_of(before), code, Growth(["a.py:4"]), lambda _: versions):
        for sign, _, text, _ in change.rows:
            at = text.partition("  # ")[0].strip()
            assert any(at in one for one in (then if sign == "-" else now)) or "of before" in at


def test_a_configuration_is_code_and_a_text_with_a_former_name_is_told(tmp_path: Path) -> None:
    def load(path: Path = tmp_path / "run.yaml") -> str:
        return path.read_text() + ".backbone.0"

    (tmp_path / "run.yaml").write_text("width: 4\ndepth: 2  # comment\n")
    before = texts_of(code_of([load]))
    (tmp_path / "run.yaml").write_text(f"width: 16\ndepth: 2\nkey: {'a1' * 16}\n")
    found = changed_code(before, code_of([load]), Growth(renamed={"encoder": "backbone"}))
    text = 'return path.read_text() + ".backbone.0"  # unchanged: nothing is called backbone now'
    rows = {row.text.strip() for one in found for row in one.rows}
    assert {"width: 16", "key: …", text} <= rows


def test_a_text_that_says_a_name_that_code_had_is_told() -> None:
    """Lines where the name itself is another one are no news."""
    preset, name = 'preset = {"recompute": True}', "class Layer:\n    recompute: bool = False\n"
    former = f"{preset}\n{name}    def run(self):\n        self.recompute = 1\n"
    texts = former, former.replace("compute: b", "computed: b").replace("compute =", "computed =")
    parts = (parts_of(text).items() for text in texts)
    before, now = ({f"a.py: {one}": lines for one, (_, lines) in part} for part in parts)
    found = map(str, changed_code(texts_of(before), now, Growth(["a.py:5"]), lambda file: [former]))
    assert [*found] == [f"a.py:1: {preset}  # unchanged: nothing is called recompute now"]
    before["a.py: Layer.run"], switch = now["a.py: Layer.run"], Growth(switch="Layer.recomputed")
    found = [*map(str, changed_code(texts_of(before), now, switch))]
    assert found[0] == "a.py:5: self.recomputed = 1  # unchanged"


class _Filled:
    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.total = torch.zeros(1)

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss)  # the list
        self.total, number = self.total + loss, 1  # the sum
        self.total[0] = number

    def flush(self) -> str:
        losses, self.losses = self.losses, []
        return HeldNames().of(losses[0])


def test_what_keeps_tensors_is_told_with_the_line_that_fills_it() -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    ends = ("# the list", "# the sum", "# the variable")
    at = [next(n for n, one in enumerate(lines, 1) if one.endswith(f"  {end}")) for end in ends]
    keeper, outputs = _Filled(), dict[str, Tensor]()
    keeper.add(torch.zeros(1))
    outputs["last"] = torch.zeros(2)  # the variable
    names = HeldNames()
    kept = [names.of(one) for one in (keeper.losses[0], keeper.total, outputs["last"])]
    kept, at = [*kept, keeper.flush()], [*at, at[0]]
    assert [one.rpartition("test_watch.py:")[2] for one in kept] == [f"{line})" for line in at]


def test_what_a_comprehension_has_made_so_far_is_told_with_its_function() -> None:
    made: list[ref[Tensor]] = []

    def make(names: list[str]) -> dict[str, Tensor]:
        for one in made:
            names.append(HeldNames().of(one()))
        found = torch.zeros(4)
        made.append(ref(found))
        return {"weights": found}

    def collect(names: list[str]) -> None:
        kept = [make(names) for _ in range(2)]
        names.append(str(len(kept)))

    names: list[str] = []
    collect(names)
    assert names[0].startswith("the list that collect (tests/diagnosis/test_watch.py:")
    assert names[0].endswith(") makes")


def test_a_cycle_is_told_with_the_programs_object_in_it(device: str) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.made: Tensor | None = None
            self.done = lambda made: setattr(self, "made", made)

    def program() -> None:
        trainer = Trainer()
        trainer.done(torch.zeros(64, device=device))

    with watching(device, {0: 256}) as watch:
        trace(program, device=device)
    [name] = watch.holders.values()
    assert name.partition(" in ")[2].startswith("a reference cycle of ")
    assert "Trainer" in name.partition(" in ")[2]


def growth_of(program: Callable[[], Any]) -> StepGrowth:
    return step_growth(torchmem.trace(program, device="cuda").timeline)


def inference(keep: Any, calls: int = 1, steps: int = 5) -> None:
    model = nn.Linear(64, 64).cuda()
    with torch.no_grad():
        for _ in range(steps):
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


def test_of_many_steps_the_later_half_counts() -> None:
    kept, number = deque[Tensor](), count()
    third = SimpleNamespace(append=lambda y: next(number) % 3 or kept.append(y))
    keeps = ((5, deque(maxlen=3)), (8, deque(maxlen=3)), (12, third))
    found = [growth_of(partial(inference, keep, steps=steps)).most for steps, keep in keeps]
    assert found == [ROW, 0, ROW]


def test_a_saved_profile_has_the_same_steps(tmp_path: Any) -> None:
    profile = torchmem.trace(lambda: inference([]), device="cuda")
    profile.save(path := tmp_path / "profile.json")
    assert step_growth(torchmem.MemoryProfile.load(path).timeline) == step_growth(profile.timeline)


def test_one_step_says_what_would_count() -> None:
    found = growth_of(lambda: torch.ones(4, device="cuda") + 1)
    assert (found.steps, found.difference) == (0, None) or found.steps == 1
