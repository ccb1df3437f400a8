"""CUDA graphs and memory pools on fake cuda: what their captures take, and what replays compute.

The figures of the caching allocator are those that torch's own test expects of a real GPU
(test/test_cuda.py, ``test_graph_memory_stats_and_use_result_after_destroy_graph``).
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.results import in_a_trace, on_fake_cuda

MIB = 1 << 20
SMALL, LARGE = 2 * MIB, 20 * MIB
STATE = 1024 if TORCH_VERSION < (2, 14) else 0
"""Blocks for the seed and the offset of a graph that draws nothing."""
OWN = 12 * MIB
"""The segment of a request of 10 MiB and 512 bytes, rounded up to 2 MiB."""


@pytest.mark.parametrize(
    ("nbytes", "segments", "reserved", "after", "pool"),
    [
        (512, 1, SMALL, SMALL, "small_pool"),
        (MIB, 2, 2 * SMALL, SMALL, "small_pool"),
        (MIB + 512, 1, LARGE, LARGE, "large_pool"),
        (10 * MIB - 512, 2, 2 * LARGE, LARGE, "large_pool"),
        (10 * MIB + 512, 3, 3 * OWN, OWN, "large_pool"),
    ],
)
def test_statistics_are_those_of_a_gpu(nbytes, segments, reserved, after, pool):
    names = ("segment", "reserved_bytes", "active", "active_bytes")

    def statistics() -> list[int]:
        found = torch.cuda.memory_stats()
        return [found[f"{name}.{pool}.current"] for name in names]

    def body() -> None:
        torch.cuda.empty_cache()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        state = STATE if pool == "small_pool" else 0
        kept = torch.ones(1, device="cuda")  # the state lies in its segment
        with torch.cuda.stream(stream):
            a = torch.ones(nbytes // 4, device="cuda")
            before = statistics()
            graph.capture_begin()
            b = a.clone()
            for _ in range(5):
                b = b.clone() + 1
            graph.capture_end()
        for _ in range(2):
            made = [now - then for now, then in zip(statistics(), before, strict=True)]
            assert made == [segments, reserved, 1 + state // 512, nbytes + state]
            graph.replay()
            assert b.sum().item() == 6 * (nbytes // 4)
            torch.cuda.empty_cache()
        del graph
        torch.cuda.empty_cache()
        left = [now - then for now, then in zip(statistics(), before, strict=True)]
        assert left == [1, after, 1, nbytes]
        del kept
        assert b.sum().item() == 6 * (nbytes // 4)

    trace(body, device="cuda", values="real")


@in_a_trace("cuda")
def test_a_replay_takes_nothing_and_what_was_captured_stays() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(MIB, device="cuda")
    with torch.cuda.graph(graph):
        y = (x * 2) * 3
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        graph.replay()
    assert torch.cuda.max_memory_allocated() == allocated == 8 * MIB + STATE
    other = torch.ones(MIB, device="cuda")  # not in the pool, where 4 MiB are free
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= reserved
    pools = {one["segment_pool_id"] for one in torch.cuda.memory_snapshot()}
    assert pools == {(0, 0), graph.pool()}
    del y, other


@in_a_trace("cuda")
def test_a_graph_takes_along_what_cublas_keeps_for_its_stream() -> None:
    x = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x @ x
        assert torch.cuda.memory_allocated() - before > 8 * MIB
        del graph, y
        assert torch.cuda.memory_allocated() == before


def test_graphs_share_a_pool() -> None:
    """The second graph has the blocks that the first has given back."""

    def body(shared: bool) -> int:
        x = torch.ones(4 * MIB, device="cuda")
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            y = (x * 2).sum()
        with torch.cuda.graph(second, pool=first.pool() if shared else None):
            z = (x * 2).sum()
        made = torch.cuda.memory_allocated() - 2 * STATE
        assert made == x.nbytes + y.untyped_storage().nbytes() * 256
        del z
        return torch.cuda.memory_reserved()

    together, apart = (on_fake_cuda(partial(body, shared)) for shared in (True, False))
    assert apart - together == 16 * MIB + SMALL


def test_a_captured_training_step_learns_as_an_eager_one() -> None:
    def training(captured: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4))
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x = torch.randn(8, 16).cuda()
        y = torch.randn(8, 4).cuda()

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                loss = step()
        losses = []
        for _ in range(5):
            x.copy_(torch.randn(8, 16))
            if captured:
                graph.replay()
            else:
                loss = step()
            losses.append(loss.item())
        return losses

    found = on_fake_cuda(partial(training, True), values="real")
    eager = on_fake_cuda(partial(training, False), values="real")
    assert found == pytest.approx(eager, rel=1e-6)
    assert all(map(math.isfinite, found))
    assert len(set(found)) == 5


def test_graphed_callables_have_values_and_take_nothing_more() -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4)).cuda()
        x, target = torch.randn(8, 16).cuda(), torch.randint(4, (8,)).cuda()
        graphed = torch.cuda.make_graphed_callables(model, (x,))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        losses, reserved = [], []
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(graphed(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            reserved.append(torch.cuda.memory_reserved())
        assert losses[-1] < 0.5 * losses[0]
        assert all(later == earlier for earlier, later in pairwise(reserved))

    assert trace(body, device="cuda").values == "real"


def test_random_numbers_of_a_graph_have_a_state_in_ordinary_memory() -> None:
    """cuda/CUDAGeneratorImpl.cpp: at every capture, from torch 2.14 on at the first draw."""

    def body(p: float) -> None:
        x = torch.ones(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_allocated()
        with torch.cuda.graph(graph):
            y = nn.functional.dropout(x, p) if p else x * 2
        del y
        assert torch.cuda.memory_allocated() - before == (1024 if p else STATE)
        first, second = graph.replay(), graph.replay()
        assert first is second is None
        graph.reset()
        assert torch.cuda.memory_allocated() == before

    for p in (0.0, 0.5):
        on_fake_cuda(partial(body, p))


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: torch.ones(3).to("cuda") * x,
    ],
)
def test_what_cuda_does_not_permit_in_a_capture(asks: Callable[[torch.Tensor], Any]) -> None:
    def body() -> None:
        x = torch.ones(3, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            asks(x * 2)

    for values in ("auto", "real", "none"):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            on_fake_cuda(body, values=values)


@in_a_trace("cuda")
def test_a_stream_that_waits_for_a_captured_one_belongs_to_the_capture() -> None:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x = torch.ones(MIB, device="cuda")
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
    assert not torch.cuda.is_current_stream_capturing()
    assert not side.is_capturing()
    snapshot = torch.cuda.memory_snapshot()
    (stream,) = [s["stream"] for s in snapshot if s["segment_pool_id"] == graph.pool()]
    assert stream == side.cuda_stream
    graph.replay()
    assert y[0].item() == 2


@in_a_trace("cuda")
def test_a_graph_of_the_accelerator() -> None:
    x, stream = torch.zeros(10, device="cuda"), torch.Stream(device="cuda")
    graph = torch.accelerator.Graph()
    with stream, graph:
        x += 1
    assert x.sum().item() == 0
    graph.replay()
    graph.replay()
    assert x.sum().item() == 20


def test_wrong_uses_of_graphs_raise_as_on_a_gpu() -> None:
    def on_default_stream() -> None:
        torch.cuda.CUDAGraph().capture_begin()

    def not_captured() -> None:
        torch.cuda.CUDAGraph().replay()

    def captured_twice() -> None:
        graph = torch.cuda.CUDAGraph()
        for _ in range(2):
            with torch.cuda.graph(graph):
                torch.ones(2, device="cuda")

    def raw() -> None:
        torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()

    for body, error, message in (
        (on_default_stream, RuntimeError, "must be captured on a non-default stream"),
        (not_captured, RuntimeError, "without a preceding successful capture"),
        (captured_twice, RuntimeError, "already owns a captured graph"),
        (raw, UsageError, "no cudaGraph_t"),
    ):
        with pytest.raises(error, match=message):
            on_fake_cuda(body)


def test_an_error_in_a_capture_is_the_programs() -> None:
    def body() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        on_fake_cuda(body)
    assert torch.cuda.graphs.graph.default_capture_stream is None


def test_memory_pools() -> None:
    def body() -> None:
        pool = torch.cuda.MemPool()
        x = torch.ones(MIB, device="cuda")
        with torch.cuda.use_mem_pool(pool):
            assert pool.use_count() == 2
            y = torch.ones(MIB, device="cuda")
            del y
        assert pool.use_count() == 1
        (segment,) = pool.snapshot()
        assert (segment["total_size"], segment["segment_pool_id"]) == (LARGE, pool.id)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 2 * LARGE
        del pool
        assert torch.cuda.memory_reserved() == LARGE
        del x

    on_fake_cuda(body)
    with pytest.raises(UsageError, match="MemPool"):
        on_fake_cuda(lambda: torch.cuda.MemPool(use_on_oom=True))
