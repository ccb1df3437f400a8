"""The threads that a traced program starts are in its trace; others of the process are not."""

import _thread
import asyncio
import math
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.phases import TraceThreads
from tests.processes import beside, in_thread, run_program
from tests.results import in_a_trace, result_of

BEFORE = ThreadPoolExecutor(1)
"""A pool whose thread was there before any trace."""
BEFORE.submit(int).result()


def in_timer(work: Callable[[], Any]) -> Any:
    found: queue.Queue[Any] = queue.Queue()
    timer = threading.Timer(0, lambda: found.put(work()))
    timer.start()
    timer.join()
    return found.get()


def in_bare_thread(work: Callable[[], Any]) -> Any:
    found: queue.Queue[Any] = queue.Queue()
    _thread.start_new_thread(lambda work: found.put(work()), (work,))
    return found.get(timeout=60)


def in_pool(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(work).result()


def in_pool_from_before(work: Callable[[], Any]) -> Any:
    return BEFORE.submit(work).result()


def in_asyncio(work: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.to_thread(work))


def in_thread_of_a_thread(work: Callable[[], Any]) -> Any:
    return in_thread(lambda: in_pool(work))


WAYS = [in_thread, in_timer, in_bare_thread, in_pool, in_pool_from_before, in_asyncio]
WAYS += [in_thread_of_a_thread]


def train(device: str) -> None:
    """Two steps with all phases."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(torch.randn(32, 64, device=device)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_training_in_a_thread_is_one_in_the_step(way: Any, device: str) -> None:
    plain = trace(lambda: train(device), device=device)
    threaded = trace(lambda: way(lambda: train(device)), device=device)
    assert threaded.figures() == plain.figures()
    lines = {entry.origin.line.rpartition(":")[0] for entry in threaded.timeline.allocations}
    assert "tests/tracing/test_threads.py" in lines


@in_a_trace()
def test_tensors_of_a_thread_are_on_the_device_that_they_say(device: str) -> None:
    x = torch.ones(1 << 40, device=device)
    found = in_pool(lambda: (x.device, (x + 1).device, x.norm().device, torch.ones(2).device))
    assert [each.type for each in found] == [device, device, device, "cpu"]
    assert in_thread(lambda: torch.cuda.is_available()) is (device == "cuda")


def test_a_backward_belongs_to_the_lines_of_the_thread_that_ran_the_forward() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return in_thread(lambda: x.exp())  # type: ignore[no-any-return]

    x = torch.ones(1000, requires_grad=True)
    profile = trace(nn.Sequential(nn.Hardtanh(), Square()), x)
    origins = [one.origin for one in profile.timeline.allocations]
    backward = [one for one in origins if one.phase.value == "backward"]
    assert [one.module for one in backward if "mul" in one.operator] == ["Sequential.1"]


def test_threads_that_wait_for_each_other(device: str) -> None:
    def program() -> None:
        there: queue.Queue[Tensor | None] = queue.Queue(1)
        back: queue.Queue[Tensor] = queue.Queue(1)

        def serve() -> None:
            while (x := there.get()) is not None:
                back.put(x @ x)

        with beside(serve, lambda: there.put(None)):
            x = torch.ones(64, 64, device=device)
            for _ in range(50):
                there.put(x * 2)
                x = back.get(timeout=60)

    figures = [trace(program, device=device).figures() for _ in range(2)]
    assert figures[0] == figures[1]


def test_many_threads_at_once(device: str) -> None:
    def program() -> None:
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(train, device) for _ in range(16)]:
                future.result()

    profile = trace(program, device=device)
    one = trace(lambda: train(device), device=device)
    left = profile.timeline.live_at(len(profile.timeline.events))
    assert {one.kind.value for one in left} <= {"workspace"}  # of the library, which stays
    assert one.peak <= profile.peak <= 8 * one.peak


def test_an_exception_in_a_thread_is_the_threads() -> None:
    def program() -> None:
        with pytest.raises(ZeroDivisionError):
            in_pool(lambda: torch.ones(3) / (1 // 0))
        with pytest.raises(RuntimeError, match="must match"):
            in_pool(lambda: torch.ones(3) + torch.ones(4))
        assert torch.ones(2).device.type == "cpu"

    assert trace(program).peak


def test_a_thread_that_outlives_its_trace_runs_for_real(device: str) -> None:
    ended, wrong = threading.Event(), []

    def work(x: Tensor, started: threading.Event) -> None:
        try:
            with torch.autocast(device):
                y = x + 1
                started.set()
                assert ended.wait(60)
                assert bool(y[:9].isnan().all())
                assert y.device.type == "cpu"
                assert torch.ones(3).sum().item() == 3
                layer = nn.TransformerEncoderLayer(8, 2, 8)
                assert bool(layer(torch.ones(1, 2, 8)).isfinite().all())
            keys = torch._C
            assert "Fake" not in str(keys._dispatch_tls_local_include_set())
            assert "Fake" not in str(keys._dispatch_tls_local_exclude_set())
        except BaseException as error:
            wrong.append(repr(error))

    threads: list[threading.Thread] = []

    def program() -> None:
        started = threading.Event()
        x = torch.rand(1 << 40, device=device)
        threads.append(threading.Thread(target=work, args=(x, started)))
        threads[0].start()
        assert started.wait(60)

    profile = trace(program, device=device, values="none")
    again = trace(lambda: torch.ones(100, device=device), device=device)
    ended.set()
    threads[0].join()
    assert wrong == []
    assert profile.peak
    assert again.peak == trace(lambda: torch.ones(100, device=device), device=device).peak


def test_a_pool_that_outlives_its_trace_serves_the_next() -> None:
    pool = ThreadPoolExecutor(1)
    peaks = []
    for _ in range(3):
        work = torch.ones(1000).sum().item
        peaks.append(trace(lambda: pool.submit(torch.ones, 1000).result() * 2).peak)
        assert pool.submit(work).result() == 1000
        assert pool.submit(lambda: torch.ones(7).sum().item()).result() == 7
    pool.shutdown()
    assert peaks == [trace(lambda: torch.ones(1000) * 2).peak] * 3


def test_an_operator_that_starts_threads() -> None:
    """Its threads run within its turn: it waits for them."""

    def doubled(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack(list(pool.map(lambda row: row * 2, x)))

    rows = torch.library.custom_op("threads_of::operator", doubled, mutates_args=())
    rows.register_fake(lambda x: torch.empty_like(x))
    library = torch.library.Library("threads_of", "FRAGMENT")
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", doubled, "CompositeExplicitAutograd")

    def program() -> None:
        assert rows(torch.ones(4, 8)).shape == (4, 8)
        assert torch.ops.threads_of.composite(torch.ones(4, 8)).shape == (4, 8)

    assert trace(program).peak
    library._destroy()


def test_threads_that_are_at_work_when_a_trace_ends(device: str) -> None:
    over, failures = threading.Event(), list[BaseException]()

    def work(x: torch.Tensor) -> None:
        try:
            while not over.is_set():
                torch.nn.functional.gelu(x) @ x
        except BaseException as error:
            failures.append(error)

    def step() -> threading.Thread:
        thread = threading.Thread(target=work, args=(torch.randn(4, 4, device=device),))
        thread.start()
        time.sleep(0.1)
        return thread

    threads: list[threading.Thread] = []
    try:
        for _ in range(3):
            trace(lambda: threads.append(step()), device=device)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


def attention() -> Tensor:
    query = torch.linspace(-1, 1, 2 * 4 * 8 * 8).view(2, 4, 8, 8).requires_grad_()
    nn.functional.scaled_dot_product_attention(query, query, query).sin().sum().backward()
    assert query.grad is not None
    return query.grad


def of_module(build: Callable[[], nn.Module]) -> Callable[[], Tensor]:
    """Return a training step whose gradients are the same whenever and wherever it runs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    lock = threading.Lock()

    def step() -> Tensor:
        with lock:
            model.zero_grad()
            model.load_state_dict(weights, strict=False)
            output = model(torch.linspace(-1, 1, 2 * 5 * 16).view(2, 5, 16))
            output = output[0] if isinstance(output, tuple) else output
            output.sin().sum().backward()
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            return torch.cat([gradient.flatten() for gradient in gradients])

    return step


def losses() -> Tensor:
    scores = torch.linspace(-1, 1, 30).view(6, 5).requires_grad_()
    labels = torch.arange(6) % 5
    loss = nn.functional.cross_entropy(scores, labels)
    lengths = torch.tensor([2])
    paths = scores.log_softmax(-1).unsqueeze(1)
    loss = loss + nn.functional.ctc_loss(paths, torch.tensor([[1, 2]]), torch.tensor([6]), lengths)
    loss.backward()
    assert scores.grad is not None
    return scores.grad


def dropout() -> Tensor:
    """The random numbers are those of the process, so only what holds for all is compared."""
    x = torch.ones(64, requires_grad=True)
    output = nn.functional.dropout(x, 0.5)
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, output)
    return (output == 0) | (output == 2)


def on_other_paths() -> Tensor:
    """Operators that take another path on a GPU, which must stay its alone."""
    x = torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4).requires_grad_()
    functional = nn.functional
    weight = torch.linspace(-0.5, 0.5, 3 * 3 * 3 * 3).view(3, 3, 3, 3)
    y = functional.batch_norm(functional.conv2d(x, weight, padding=1), None, None, training=True)
    y = functional.mish(functional.silu(functional.instance_norm(y)))
    y = functional.rms_norm(y, [4]).softmax(-1, dtype=torch.float64).float()
    grid = torch.linspace(-1, 1, 2 * 4 * 4 * 2).view(2, 4, 4, 2)
    functional.grid_sample(y, grid, align_corners=False).sin().sum().backward()
    assert x.grad is not None
    return x.grad


STEPS = {
    "attention": attention,
    "other paths": on_other_paths,
    "lstm": of_module(lambda: nn.LSTM(16, 8, 2)),
    "gru cell": of_module(lambda: nn.Sequential(nn.Flatten(0, 1), nn.GRUCell(16, 8))),
    "encoder": of_module(lambda: nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0)),
    "losses": losses,
    "dropout": dropout,
}


def traced_program(number: int) -> Callable[[], None]:
    """Return a step on fake cuda: other numbers have plans that are worked out beside threads."""
    batch, length = 1 + number % 7, 1 + number % 5
    dtype = (torch.bfloat16, torch.float16)[number % 2]

    def program() -> None:
        x = torch.randn(batch, length, 16, device="cuda", requires_grad=True)
        layer = nn.TransformerEncoderLayer(16, 2, 16).cuda()
        with torch.autocast("cuda", dtype=dtype):
            output = nn.LSTM(16, 8).cuda()(layer(x))[0]
        images = nn.functional.batch_norm(x.unsqueeze(1), None, None, training=True)
        loss = nn.functional.mish(nn.functional.rms_norm(images, [16])).sum()
        labels = torch.ones(batch).long().cuda()
        (loss + nn.functional.cross_entropy(output.float()[:, 0], labels)).backward()

    return program


def train_beside(traces, seconds=math.inf, told=lambda taken, made, wrong: None):
    """Train in four threads while ``traces`` run, or as many as ``seconds`` allow. Return the steps
    and the traces that were made, and what went wrong: ``told`` of it after every hundred traces.
    """
    expected = {name: step() for name, step in STEPS.items()}
    over, wrong, taken, made = threading.Event(), list[str](), [0] * 4, 0

    def work(number: int) -> None:
        while not over.is_set():
            for name, step in STEPS.items():
                try:
                    found = step()
                    if not torch.equal(found, expected[name]) or found.device.type != "cpu":
                        wrong.append(f"{name}: {found}")
                except Exception as error:
                    wrong.append(f"{name}: {error!r}")
                taken[number] += 1
                over.wait(0.05)  # or the traces would come to their turn too rarely

    until = time.monotonic() + seconds
    with ExitStack() as threads:
        for number in range(4):
            threads.enter_context(beside(partial(work, number), over.set))
        while made < traces and time.monotonic() < until:
            trace(traced_program(made), device="cuda")
            made += 1
            if made % 100 == 0:
                told(sum(taken), made, wrong)
    return sum(taken), made, wrong


def test_training_beside_traces() -> None:
    taken, made, wrong = train_beside(20)
    assert taken > made == 20
    assert not wrong


def test_a_trace_is_the_same_beside_others(device: Any) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 16)
    alone = trace(layer, torch.randn(2, 5, 16), device=device).figures()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            losses()

    with beside(work, over.set):
        for _ in range(10):
            assert trace(layer, torch.randn(2, 5, 16), device=device).figures() == alone


def drawing_beside(draw: Callable[[], object], device: Any) -> list[object]:
    """Return what a thread drew while programs that seed and draw were traced."""
    drawn: list[object] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            drawn.append(draw())

    def program() -> None:
        random.seed(3)
        numpy.random.seed(3)
        torch.manual_seed(3)
        random.random(), numpy.random.rand(2), torch.rand(3, device=device).sum().item()
        nn.functional.dropout(torch.ones(8, device=device))

    with beside(work, over.set):
        for _ in range(5):
            trace(program, device=device)
    return drawn


def test_other_threads_never_draw_the_same_again(device: Any) -> None:
    of_torch = partial(torch.rand, 1, dtype=torch.float64)
    for draw in (random.random, numpy.random.random_sample, lambda: of_torch().item()):
        drawn = drawing_beside(draw, device)
        assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("values", ["none", "real"])
def test_random_numbers_of_a_trace_are_its_own_beside_other_threads(values: Any) -> None:
    def program() -> list[object]:
        torch.manual_seed(7)
        numbers = [random.random(), numpy.random.rand(), torch.initial_seed()]
        state = torch.get_rng_state()
        numbers.append(nn.functional.dropout(torch.ones(100)).sum().item())
        numbers.append(torch.empty(3, 1, 5, dtype=torch.int16).random_(77).sum().item())
        torch.set_rng_state(state)
        return numbers

    over = threading.Event()
    with beside(over.wait, over.set):
        state = torch.get_rng_state()
        assert result_of(program, values=values) == result_of(program, values=values)
        assert torch.equal(torch.get_rng_state(), state)


def test_an_interrupted_turn_keeps_no_other_thread_waiting(monkeypatch, device):
    """A signal raises between any two instructions: here after a lock was taken."""
    begin_turn = TraceThreads.begin_turn

    def interrupted(self):
        begin_turn(self)
        monkeypatch.undo()
        raise KeyboardInterrupt

    def body() -> Tensor:
        monkeypatch.setattr(TraceThreads, "begin_turn", interrupted)
        return torch.ones(3, device=device)

    with pytest.raises(KeyboardInterrupt):
        trace(body, device=device)
    peak = in_bare_thread(lambda: trace(lambda: torch.ones(3, device=device), device=device).peak)
    assert peak == 12


def test_a_module_is_not_called_while_another_thread_traces_it() -> None:
    class Waits(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert called.wait(60)
            return super().forward(x)

    inside, called = threading.Event(), threading.Event()
    model, errors, x = Waits(4, 4), [], torch.ones(2, 4)

    def call() -> None:
        inside.wait(60)
        try:
            model(x)
        except UsageError as error:
            errors.append(str(error))
        called.set()

    with beside(call):
        trace(model, x)
    assert "Waits is called while another thread traces it" in errors[0]
    assert model(x).isfinite().all()


ENDS = """
import threading, torch
from pytest_torchmem import trace

began, model, inputs = threading.Event(), torch.nn.Linear(8, 8), torch.randn(2, 8)

def work():
    while True:
        trace(model, inputs, device="cuda")
        began.set()

threading.Thread(target=work, daemon=True).start()
began.wait()
"""


def test_a_process_ends_while_a_daemon_thread_traces() -> None:
    for _ in range(2):
        run_program(ENDS)


def test_another_thread_prints_a_tensor_while_a_module_is_asked_about_itself(monkeypatch):
    asked, printed, own, found = threading.Event(), threading.Event(), torch.ones(2), list[str]()

    def other() -> None:
        asked.wait(60)
        found.append(repr(own))
        printed.set()

    def extra_repr(module: nn.Linear) -> str:
        asked.set()
        assert printed.wait(60)
        return "in_features=2"

    monkeypatch.setattr(nn.Linear, "extra_repr", extra_repr)
    with beside(other):
        assert trace(nn.Linear(2, 2), torch.ones(1, 2)).facts
    assert found == ["tensor([1., 1.])"]


_WHILE_THE_COMPILER_IS_IMPORTED = """
import importlib.util, sys
import torch
import pytest_torchmem as torchmem
half = importlib.util.module_from_spec(importlib.util.find_spec("torch._dynamo"))
half.__spec__._initializing = True
sys.modules["torch._dynamo"] = half
print(torchmem.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).peak)
"""


def test_another_thread_imports_the_compiler() -> None:
    """As the first step of an optimizer does (torch/_compile.py)."""
    assert int(run_program(_WHILE_THE_COMPILER_IS_IMPORTED).stdout) > 0
