"""The threads that a traced program starts are in its trace."""

import _thread
import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import trace

DEVICES = ("cpu", "cuda")
BEFORE = ThreadPoolExecutor(1)
"""A pool whose thread was there before any trace."""
BEFORE.submit(int).result()


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found.pop()


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


WAYS = [
    in_thread,
    in_timer,
    in_bare_thread,
    in_pool,
    in_pool_from_before,
    in_asyncio,
    in_thread_of_a_thread,
]


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_training_in_a_thread_is_one_in_the_step(way: Any, device: str) -> None:
    plain = trace(lambda: train(device), device=device)
    threaded = trace(lambda: way(lambda: train(device)), device=device)
    assert threaded.figures() == plain.figures()
    lines = {entry.origin.line.rpartition(":")[0] for entry in threaded.timeline.allocations}
    assert "tests/tracing/test_threads.py" in lines


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_a_thread_are_on_the_device_that_they_say(device: str) -> None:
    def program() -> None:
        x = torch.ones(1 << 40, device=device)
        found = in_pool(lambda: (x.device, (x + 1).device, x.norm().device, torch.ones(2).device))
        assert [each.type for each in found] == [device, device, device, "cpu"]
        assert in_thread(lambda: torch.cuda.is_available()) is (device == "cuda")

    trace(program, device=device)


def test_a_backward_belongs_to_the_lines_of_the_thread_that_ran_the_forward() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return in_thread(lambda: x.exp())  # type: ignore[no-any-return]

    x = torch.ones(1000, requires_grad=True)
    profile = trace(nn.Sequential(nn.Hardtanh(), Square()), x)
    gradients = [
        one.origin
        for one in profile.timeline.allocations
        if one.origin.phase.value == "backward" and one.origin.operator == "aten::mul.Tensor"
    ]
    assert [origin.module for origin in gradients] == ["Sequential.1"]


@pytest.mark.parametrize("device", DEVICES)
def test_threads_that_wait_for_each_other(device: str) -> None:
    def program() -> None:
        there: queue.Queue[Tensor | None] = queue.Queue(1)
        back: queue.Queue[Tensor] = queue.Queue(1)

        def serve() -> None:
            while (x := there.get()) is not None:
                back.put(x @ x)

        thread = threading.Thread(target=serve)
        thread.start()
        x = torch.ones(64, 64, device=device)
        for _ in range(50):
            there.put(x * 2)
            x = back.get(timeout=60)
        there.put(None)
        thread.join()

    figures = [trace(program, device=device).figures() for _ in range(2)]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
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
            for found in (
                torch._C._dispatch_tls_local_include_set(),
                torch._C._dispatch_tls_local_exclude_set(),
            ):
                assert "Fake" not in str(found)
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

    @torch.library.custom_op("threads_of::operator", mutates_args=())
    def rows(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack(list(pool.map(lambda row: row * 2, x)))

    rows.register_fake(lambda x: torch.empty_like(x))
    library = torch.library.Library("threads_of", "FRAGMENT")
    library.define("composite(Tensor x) -> Tensor")

    def composite(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack(list(pool.map(lambda row: row * 2, x)))

    library.impl("composite", composite, "CompositeExplicitAutograd")

    def program() -> None:
        assert rows(torch.ones(4, 8)).shape == (4, 8)
        assert torch.ops.threads_of.composite(torch.ones(4, 8)).shape == (4, 8)

    assert trace(program).peak
    library._destroy()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
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
