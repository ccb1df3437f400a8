"""A trace on a GPU that is named runs out of memory where the GPU would."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.memory import OutOfMemoryError, format_size
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.targets.gpus import find_gpu, gpu_names
from tests.allocator.test_allocator import replay
from tests.results import in_a_trace

MIB, GIB = 1024**2, 1024**3


class Net(nn.Module):
    def __init__(self, width: int = 1000) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def on_meta(width: int = 1000) -> Net:
    with torch.device("meta"):
        return Net(width)


def rows(count: int) -> torch.Tensor:
    return torch.empty(count, 1000, device="meta")


def bytes_on_cuda(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")


def test_the_operator_that_fails_is_named_with_what_was_alive() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trace(on_meta(), rows(1 << 21), device="cuda", gpu="t4")
    text, gpu = str(raised.value), find_gpu("t4")
    assert text.startswith("CUDA out of memory. Tried to allocate 7.81 GiB. GPU 0 has a total ")
    assert f"total capacity of {format_size(gpu.memory)} of which 6.80 GiB is free." in text
    assert "Including non-PyTorch memory, this process has 7.94 GiB memory in use." in text
    assert "is reserved by PyTorch but unallocated. If reserved but unallocated memory" in text
    assert "fake cuda (t4)" in text
    assert "aten::addmm requested 7.81 GiB in the forward, in module Net.first" in text
    assert "test_out_of_memory.py:" in text
    assert "input 0 float32[2097152, 1000]" in text
    error = raised.value
    assert isinstance(error, OutOfMemoryError)
    assert len(error.args) == 1
    assert error.origin.phase is Phase.FORWARD
    assert error.nbytes == (1 << 21) * 4000
    assert error.live[0].label == "input 0"


def test_a_backward_and_an_optimizer_can_be_what_fails() -> None:
    needed = trace(on_meta(), rows(1 << 20), device="cuda")
    forward, backward = needed.forward_peak, needed.backward_peak
    assert forward < backward
    with pytest.raises(OutOfMemoryError) as raised:
        trace(on_meta(), rows(1 << 20), device="cuda", gpu="t4")
    assert raised.value.origin.phase is Phase.BACKWARD
    wide, x = on_meta(20_000), torch.empty(2, 20_000, device="meta")
    with pytest.raises(OutOfMemoryError) as raised:
        trace(wide, x, device="cuda", gpu="t4", optimizer=torch.optim.AdamW)
    assert raised.value.origin.phase is Phase.OPTIMIZER


def test_parameters_alone_can_be_too_much() -> None:
    with pytest.raises(OutOfMemoryError) as raised:
        trace(on_meta(50_000), torch.empty(1, 50_000), device="cuda", gpu="t4")
    assert raised.value.origin.phase is Phase.BASELINE
    assert "second.weight requested 9.31 GiB in the baseline" in str(raised.value)


def test_a_program_that_halves_its_batch_gets_through() -> None:
    tried: list[int] = []
    left: list[int] = []

    def fits(net: nn.Module, batch: int) -> bool:
        tried.append(batch)
        try:
            net(torch.randn(batch, 1000, device="cuda")).sum().backward()
        except torch.cuda.OutOfMemoryError:
            return False
        return True

    def program() -> None:
        net, batch = Net().cuda(), 1 << 22
        while not fits(net, batch):
            net.zero_grad()
            torch.cuda.empty_cache()
            left.append(torch.cuda.memory_allocated())
            batch //= 2
        assert torch.cuda.memory_stats()["num_ooms"] == len(tried) - 1

    limited = trace(program, device="cuda", gpu="t4")
    assert tried == [1 << 22, 1 << 21, 1 << 20, 1 << 19]
    # What does not fit leaves nothing behind but the program's buffer of cuBLAS, where a batch came
    # as far as its backward: the copy of the first gradient fails before the engine has one, also
    # in torch's CUDA code without a GPU (2.13.0+cu130), which counts 16,528,384 bytes.
    parameters, buffer = 2 * (4_000_256 + 4096), 8_519_680
    assert left == [parameters, parameters, parameters + buffer]
    assert limited.end == 2 * buffer
    assert limited.reserved_peak <= find_gpu("t4").memory - find_gpu("t4").context


@in_a_trace("cuda", gpu="h100")
def test_more_than_any_gpu_has() -> None:
    """Torch's test/test_cuda.py, test_out_of_memory."""
    tensor = torch.zeros(1024, device="cuda")
    message = r"Tried to allocate 800000000\.00 GiB\. GPU 0 has a total capacity"
    with pytest.raises(RuntimeError, match=message):
        bytes_on_cuda(GIB * 800_000_000)
    tensor.fill_(1)


def test_a_fraction_of_the_memory() -> None:
    """Torch's test/test_cuda.py, test_set_per_process_memory_fraction."""

    def program() -> None:
        with pytest.raises(TypeError, match="Invalid type"):
            torch.cuda.set_per_process_memory_fraction(1)  # type: ignore[arg-type]
        for wrong in (-0.1, 2.0):
            with pytest.raises(ValueError, match="Invalid fraction value"):
                torch.cuda.set_per_process_memory_fraction(wrong)
        tensor = torch.zeros(1024, device="cuda")
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(0.5, 0)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        fits = bytes_on_cuda(int(total * 0.499) - torch.cuda.max_memory_reserved())
        del fits
        torch.cuda.empty_cache()
        with pytest.raises(RuntimeError, match=r"allowed; Of the allocated memory"):
            bytes_on_cuda(int(total * 0.5))
        torch.cuda.set_per_process_memory_fraction(1.0)
        bytes_on_cuda(int(total * 0.5))
        tensor.fill_(1)

    # A program that limits itself is limited, whether or not the GPU is named.
    trace(program, device="cuda")
    trace(program, device="cuda", gpu="l4")


@in_a_trace("cuda", gpu="a100")
def test_settings_that_the_program_makes() -> None:
    """Torch's test/test_cuda.py, test_max_split_expandable."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(120 * MIB / total)
    kept = []
    for expandable in ("False", "True", "False"):
        options = f"expandable_segments:{expandable},max_split_size_mb:40"
        torch.cuda.memory._set_allocator_settings(options)
        kept.append(bytes_on_cuda(40 * MIB))
    with pytest.raises(torch.OutOfMemoryError):
        bytes_on_cuda(40 * MIB)
    # The cached blocks are given back, some of which are pages of an expandable segment.
    kept.clear()
    kept.append(bytes_on_cuda(120 * MIB))
    assert torch.cuda.memory_reserved() == 120 * MIB


def test_whether_a_limit_holds() -> None:
    target, inputs = on_meta(), rows(1 << 22)
    needed = trace(target, inputs, device="cuda").peak  # on the default GPU
    assert needed > 32 * GIB
    assert trace(target, inputs, device="cuda", gpu="t4", memory="unlimited").peak == needed
    assert trace(target, inputs, device="cuda", gpu="t4", memory="96 GiB").peak == needed
    for options in ({"gpu": "t4"}, {"memory": 20 * GIB}, {"gpu": "b200", "memory": "20 GiB"}):
        with pytest.raises(torch.OutOfMemoryError):
            trace(target, inputs, device="cuda", **options)
    assert trace(target, inputs, device="cpu", gpu="t4").peak > 32 * GIB
    with pytest.raises(UsageError, match=r"memory='a lot'.*or 'unlimited'"):
        trace(target, inputs, device="cuda", memory="a lot")


def reserved(program: Callable[[], Any], **options: Any) -> int:
    found = trace(program, device="cuda", **options).reserved_peak
    assert found is not None
    return found


def two_sizes() -> None:
    bytes_on_cuda(30 * MIB)
    bytes_on_cuda(50 * MIB)


def test_options_change_what_is_reserved() -> None:
    assert reserved(two_sizes) == 80 * MIB
    # A request that no cached block is large enough for takes the free end of the segment along.
    assert reserved(two_sizes, allocator="expandable_segments:True") == 60 * MIB
    with pytest.raises(UsageError, match="Unrecognized key 'expandable' in CUDA allocator config"):
        trace(two_sizes, device="cuda", allocator="expandable:True")


def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    assert reserved(two_sizes) == 80 * MIB


def test_the_profile_and_the_program_are_told_the_same() -> None:
    told: dict[str, int] = {}

    def program() -> None:
        net = Net(2000).cuda()
        for batch in (100, 3000, 700):
            net(torch.randn(batch, 2000, device="cuda")).sum().backward()
        for name in ("memory_allocated", "memory_reserved"):
            told[name] = getattr(torch.cuda, name)()
            told[f"max_{name}"] = getattr(torch.cuda, f"max_{name}")()
        stats = torch.cuda.memory_stats()
        assert stats == torch.accelerator.memory_stats()
        assert stats["allocated_bytes.all.peak"] == told["max_memory_allocated"]
        assert stats["reserved_bytes.all.current"] == told["memory_reserved"]
        segments = torch.cuda.memory_snapshot()
        assert sum(segment["total_size"] for segment in segments) == told["memory_reserved"]
        assert sum(segment["allocated_size"] for segment in segments) == told["memory_allocated"]
        for segment in segments:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        nested = torch.cuda.memory_stats_as_nested_dict()
        assert nested["segment"]["all"]["current"] == len(segments)

    for options in ({}, {"gpu": "t4"}):
        profile = trace(program, device="cuda", **options)
        peaks = profile.allocator_peaks()
        assert profile.reserved_peak == told["max_memory_reserved"] == peaks["peak"].reserved
        assert profile.allocated_peak == told["max_memory_allocated"] == peaks["peak"].allocated
        for name in ("forward_peak", "backward_peak", "peak"):
            assert peaks[name].requested == getattr(profile, name)
            assert peaks[name].requested <= peaks[name].allocated <= peaks[name].reserved


@pytest.mark.parametrize("options", ["", "expandable_segments:True", "roundup_power2_divisions:2"])
def test_a_limit_changes_nothing_where_the_program_fits(options: str) -> None:
    """The replay in pieces, and requests made before they are booked, come to the same."""
    step = partial(trace, Net(2000), torch.randn(5000, 2000), optimizer=torch.optim.AdamW)
    free = step(device="cuda", allocator=options)
    # Just enough: from some request on every one has to be looked at.
    memory = free.reserved_peak + find_gpu("a100").context
    tight = step(device="cuda", allocator=options, memory=memory)
    assert tight.figures() == free.figures()
    assert tight.allocator_peaks() == free.allocator_peaks()
    made, events = free.timeline.allocations, free.timeline.events
    requests = [event for event in events if event > 0]
    numbers = {event: number for number, event in enumerate(requests, 1)}
    sizes = [made[event - 1].nbytes if event > 0 else -numbers[-event] for event in events]
    assert replay(sizes, options).reserved == free.reserved_peak


def test_the_first_trace_is_as_those_after_it() -> None:
    """An operator's body runs once for its geometry; what it took is then told as later on."""
    net, x = Net(1237), torch.randn(3001, 1237)  # a width that no other test has
    found = [trace(net, x, device="cuda", optimizer=torch.optim.AdamW) for _ in range(2)]
    assert found[0].timeline == found[1].timeline
    assert found[0].allocator_peaks() == found[1].allocator_peaks()


def test_every_gpu_runs_out_below_its_memory() -> None:
    for name in gpu_names():
        gpu = find_gpu(name)
        room = gpu.memory - gpu.context
        trace(lambda room=room: bytes_on_cuda(room // (2 * MIB) * 2 * MIB), device="cuda", gpu=name)
        with pytest.raises(torch.OutOfMemoryError):
            trace(lambda room=room: bytes_on_cuda(room + 1), device="cuda", gpu=name)


def test_a_profile_can_be_pickled() -> None:
    profile = trace(Net(), torch.randn(4, 1000), device="cuda")
    assert {"allocated_peak", "reserved_peak"} <= profile._later.keys()  # not replayed yet
    copied = pickle.loads(pickle.dumps(profile))
    assert copied == profile
    assert copied.figures() == profile.figures()
    assert copied.reserved_peak == profile.reserved_peak is not None


def test_cpu_has_no_allocator() -> None:
    profile = trace(Net(), torch.randn(4, 1000), device="cpu")
    assert profile.reserved_peak is profile.allocated_peak is None
    assert profile.allocator_peaks() == {}
