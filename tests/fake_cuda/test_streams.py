"""Side streams: the caching allocator keeps their blocks apart, backward follows the forward."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pytest_torchmem import MemoryProfile, trace
from tests.modules import Parts
from tests.results import in_a_trace, on_fake_cuda

MIB = 1024**2
CUBLAS = 8_519_680


def cuda(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def buffers(profile: MemoryProfile) -> int:
    """Return how many of cuBLAS's buffers are alive at the end."""
    live = profile.timeline.live_at(len(profile.timeline.events))
    return sum("cuBLAS" in found.label for found in live)


@in_a_trace("cuda")
def test_a_recorded_block_waits_for_the_next_request() -> None:
    """``recordStream``, ``insert_events``, ``process_events``: the GPU is done by then."""

    def count() -> tuple[int, ...]:
        statistics = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "active_bytes.all.current")
        return tuple(statistics[name] // MIB for name in names)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        block = cuda(30 * MIB)
    block.record_stream(torch.cuda.default_stream())
    assert count() == (30, 30)
    del block
    assert count() == (0, 30)
    with torch.cuda.stream(side):
        block = cuda(30 * MIB)  # the block itself, which is free by now
    assert count() == (30, 30)
    del block  # it waits for nobody this time
    assert (count(), torch.cuda.memory_reserved()) == ((0, 0), 30 * MIB)


@in_a_trace("cuda")
def test_what_is_recorded_on_its_own_stream_does_not_wait() -> None:
    block = cuda(30 * MIB)
    block.record_stream(torch.cuda.current_stream())
    torch.empty(3).record_stream(torch.cuda.Stream())  # the host's memory is not the GPU's
    del block
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 0


@in_a_trace("cuda", gpu="a100", memory=(490 + 100) * MIB)
def test_what_one_stream_has_cached_goes_back_before_another_fails() -> None:
    cached = cuda(60 * MIB)
    del cached
    with torch.cuda.stream(torch.cuda.Stream()):
        block = cuda(60 * MIB)
    assert torch.cuda.memory_reserved() == 60 * MIB
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 1
    with pytest.raises(torch.OutOfMemoryError):
        cuda(60 * MIB)
    del block


@in_a_trace("cuda")
def test_every_way_of_choosing_a_stream() -> None:
    default = torch.cuda.default_stream()
    one, two = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    assert len({default, one, two}) == 3
    assert torch.cuda.current_stream() == default
    with torch.cuda.stream(one):
        assert torch.cuda.current_stream() == one
        with torch.cuda.StreamContext(two):
            assert torch.cuda.current_stream() == two
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == one
        with two as entered:
            assert entered is two
            assert torch.accelerator.current_stream() == two
        assert torch.cuda.current_stream() == one
    assert torch.cuda.current_stream() == default
    for choose, stream in ((torch.cuda.set_stream, two), (torch.accelerator.set_stream, default)):
        choose(stream)
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.ExternalStream(4096).cuda_stream == 4096
    assert torch.cuda.Stream(stream_id=one.stream_id) == one
    with pytest.raises(KeyError), torch.cuda.stream(one):
        raise KeyError
    assert torch.cuda.current_stream() == default


def test_streams_are_handed_out_from_a_pool() -> None:
    """c10/cuda/CUDAStream.cpp, ``getStreamFromPool``: 32 of a priority, in turn."""

    def body() -> tuple[int, bool, bool]:
        streams = [torch.cuda.Stream() for _ in range(40)]
        high = torch.cuda.Stream(priority=-1)
        return len(set(streams)), streams[0] == streams[32], high in streams

    assert on_fake_cuda(body) == on_fake_cuda(body) == (32, True, False)


class Seen(torch.autograd.Function):
    """Notes the stream that its backward runs on."""

    streams: list[int]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        Seen.streams.append(torch.cuda.current_stream().stream_id)
        return gradients[0] * 1.0


@in_a_trace("cuda")
def test_a_node_runs_on_the_stream_of_its_forward() -> None:
    Seen.streams = []
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = Seen.apply(x)
    with torch.cuda.stream(one):
        y = Seen.apply(y)
        with torch.cuda.stream(two):
            y = Seen.apply(y)
        y = Seen.apply(y)
    loss = Seen.apply(y).sum()
    with torch.cuda.stream(two):
        loss.backward()
        assert torch.cuda.current_stream() == two
    assert Seen.streams == [0, one.stream_id, two.stream_id, one.stream_id, 0]


@in_a_trace("cuda")
def test_gradients_are_added_up_on_the_stream_of_the_node_they_go_to() -> None:
    """input_buffer.cpp: the accumulation stream is the consumer's, not the producer's."""
    side, found = torch.cuda.Stream(), list[bool]()
    leaf = torch.ones(30 * MIB // 4, device="cuda", requires_grad=True)
    start = leaf * 2.0

    def look(gradient: torch.Tensor) -> None:
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and block["size"] >= 30 * MIB:
                    found.append(segment["stream"] == side.stream_id)

    start.register_hook(look)
    with torch.cuda.stream(side):
        branch = start.clone()
    (start + branch).sum().backward()
    # The leaf, ``start``, the branch and the gradients' sum: only the branch lies aside.
    assert sorted(found) == [False, False, False, True]


@in_a_trace("cuda")
def test_a_checkpoint_computes_anew_on_the_stream_of_its_node() -> None:
    side, seen = torch.cuda.Stream(), list[torch.cuda.Stream]()

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_stream())
        return x.exp().exp()

    x = torch.ones(8, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert [*seen, torch.cuda.current_stream()] == [side, side, torch.cuda.default_stream()]


@in_a_trace("cuda")
def test_a_stream_chosen_within_a_node_lasts_as_long_as_it() -> None:
    side, found = torch.cuda.Stream(), []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            kept = gradient * 2.0
            found.append(torch.cuda.current_stream())
        found.append(torch.cuda.current_stream())
        return kept

    x = torch.ones(4, device="cuda", requires_grad=True)
    y = x * 2.0
    y.register_hook(hook)
    y.exp().sum().backward()
    default = torch.cuda.default_stream()
    assert [*found, torch.cuda.current_stream()] == [side, default, default]


def test_a_buffer_for_each_thread_and_stream() -> None:
    """CublasHandlePool.cpp: ``(handle, stream)``, and the engine has a handle of its own."""

    def step(*streams: int) -> MemoryProfile:
        def body() -> None:
            sides = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
            weight = torch.ones(8, 8, device="cuda", requires_grad=True)
            total = torch.zeros((), device="cuda")
            for stream in streams:
                with torch.cuda.stream(sides[stream]):
                    out = (torch.ones(2, 8, device="cuda") @ weight).sum()
                total = total + out
            total.backward()

        return trace(body, device="cuda", gpu="a100")

    streams = ([0], [0, 0], [1], [0, 1], [0, 1, 2, 1])
    assert [buffers(step(*found)) for found in streams] == [2, 2, 2, 4, 6]
    assert step(0, 1).end == 4 * CUBLAS


@pytest.mark.parametrize(
    ("steps", "handles"), [("0b1", 3), ("01b", 2), ("1b", 1), ("011", 2), ("032b", 4)]
)
def test_a_handle_for_each_thread_at_once(steps: str, handles: int) -> None:
    """DeviceThreadHandles.h: whoever needs one takes what an ended thread gave back first."""

    def body() -> None:
        x, made = torch.ones(8, 8, device="cuda", requires_grad=True), list[torch.Tensor]()

        def product(barrier: Barrier) -> None:
            barrier.wait()
            made.append(x @ x)
            barrier.wait()

        for step in steps:  # by the program, the autograd engine, or so many threads at once
            if step == "0":
                product(Barrier(1))
            elif step == "b":
                made.pop().sum().backward()
            else:
                with ThreadPoolExecutor(int(step)) as threads:
                    list(threads.map(product, [Barrier(int(step))] * int(step)))

    assert buffers(trace(body, device="cuda", gpu="a100")) == handles


STEP = st.tuples(
    st.sampled_from(["make", "drop", "record", "product", "backward"]),
    st.integers(0, 3),
    st.integers(0, 9),
    st.sampled_from([600, 70_000, 900_000, 3 * MIB, 12 * MIB]),
)
PROGRAM = st.lists(STEP, max_size=25)


def on_default(number: int) -> torch.cuda.Stream:
    return torch.cuda.default_stream()


def run(program: list[Any], choose: Callable[[int], torch.cuda.Stream] = on_default) -> None:
    """Run a program; ``choose`` gives the stream for a number."""
    tensors: list[torch.Tensor] = []
    leaf = torch.ones(64, 64, device="cuda", requires_grad=True)
    total = leaf.sum()
    for kind, number, which, nbytes in program:
        with torch.cuda.stream(choose(number)):
            if kind == "make":
                tensors.append(cuda(nbytes))
            elif kind == "drop" and tensors:
                tensors.pop(which % len(tensors))
            elif kind == "record" and tensors:
                tensors[which % len(tensors)].record_stream(choose(which % 4))
            elif kind == "product":
                total = total + (leaf @ leaf).exp().sum() * leaf.select(0, which).sum()
            elif kind == "backward":
                total.backward()
                leaf.grad = None
                total = leaf.sum()


@settings(max_examples=40)
@given(program=PROGRAM)
def test_one_stream_is_as_good_as_another(program: list[Any]) -> None:
    """On one stream, default or not, the figures are those of a program that knows of none."""

    def aside() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(program, lambda number: stream)

    def none() -> None:
        run(program, lambda number: None)  # type: ignore[arg-type, return-value]

    profiles = [trace(body, device="cuda") for body in (partial(run, program), aside)]
    program = [step for step in program if step[0] != "record"]
    for profile in (profiles[1], trace(none, device="cuda")):
        assert profile.figures() == profiles[0].figures()
        assert profile.allocator_peaks() == profiles[0].allocator_peaks()


@settings(max_examples=40)
@given(program=PROGRAM)
def test_streams_move_blocks_and_nothing_else(program: list[Any]) -> None:
    def several() -> None:
        streams = [torch.cuda.default_stream(), *[torch.cuda.Stream() for _ in range(3)]]
        run(program, streams.__getitem__)
        reserved = Counter[int]()
        for segment in torch.cuda.memory_snapshot():
            reserved[segment["stream"]] += segment["total_size"]
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert set(reserved) <= {stream.stream_id for stream in streams}
        assert sum(reserved.values()) == torch.cuda.memory_reserved()

    alone, apart = (trace(body, device="cuda") for body in (partial(run, program), several))
    further = buffers(apart) - buffers(alone)
    assert further >= 0
    assert apart.end - alone.end == further * CUBLAS
    assert 0 <= apart.peak - alone.peak <= further * CUBLAS
    peaks = apart.allocator_peaks()["peak"]
    assert apart.peak == peaks.requested <= peaks.allocated <= peaks.reserved


def test_a_module_on_a_side_stream() -> None:
    """A trace of a module chooses no stream itself, and what its forward chooses is followed."""

    class TwoStreams(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.apart:
                return self.first(x) + self.second(x)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                second = self.second(x)
            first = self.first(x)
            torch.cuda.current_stream().wait_stream(side)
            second.record_stream(torch.cuda.current_stream())
            return first + second

    x, layers = torch.ones(32, 64), {"first": nn.Linear(64, 64), "second": nn.Linear(64, 64)}
    models = (TwoStreams(apart=apart, **layers) for apart in (False, True))
    together, apart = (trace(model, x, device="cuda") for model in models)
    assert apart.end - together.end == 2 * CUBLAS
    # A segment of 20 MiB for the large requests of a stream, and one of 2 MiB for the small ones.
    assert (together.reserved_peak, apart.reserved_peak) == (22 * MIB, 2 * 22 * MIB)
