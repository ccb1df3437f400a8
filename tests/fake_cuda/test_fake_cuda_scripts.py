"""What scripts for GPUs call besides, and ways to name a device that are older than ``.to``."""

import builtins
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from tests.results import in_a_trace, on_fake_cuda


def test_the_default_device_is_not_for_what_a_trace_makes_itself() -> None:
    def body() -> None:
        torch.set_default_device("cuda")
        assert torch.from_numpy(numpy.ones(2)).is_cpu
        assert torch.FloatTensor(2).is_cpu
        assert torch.ones(2).is_cuda
        assert str(torch.range(0, 3).tolist()) == "[0.0, 1.0, 2.0, 3.0]"

    trace(body, device="cuda")
    with torch.device("meta"):
        trace(lambda: torch.from_numpy(numpy.ones(2)).sum())


@in_a_trace("cuda")
def test_types_that_say_where_a_tensor_is() -> None:
    x, host = torch.ones(2, device="cuda"), torch.ones(2)
    made = [
        torch.cuda.FloatTensor(3),
        torch.cuda.LongTensor([1, 2]),
        torch.cuda.HalfTensor(host),
        host.type(torch.cuda.HalfTensor),
        nn.Linear(2, 2).type(torch.cuda.DoubleTensor).weight,
    ]
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    made.append(torch.zeros(2))
    torch.set_default_tensor_type(torch.FloatTensor)
    made += [torch.zeros(2), x.type(torch.FloatTensor), torch.FloatTensor([1.0])]
    kinds = ["cuda.Float", "cuda.Long", "cuda.Half", "cuda.Half", "cuda.Double", "cuda.Half"]
    expected = [f"torch.{kind}Tensor" for kind in (*kinds, "Float", "Float", "Float")]
    assert [tensor.type() for tensor in made] == expected
    for tensor, kind, other in (
        (x, torch.cuda.FloatTensor, torch.FloatTensor),
        (host, torch.FloatTensor, torch.cuda.FloatTensor),
    ):
        assert isinstance(tensor, kind)
        assert not isinstance(tensor, other)


@in_a_trace("cuda")
def test_modules_go_where_a_tensor_is() -> None:
    x = torch.ones(2, device="cuda", dtype=torch.half)
    for layer in (nn.Linear(2, 2).to(x), nn.Linear(2, 2).to(tensor=x)):
        assert layer.weight.type() == "torch.cuda.HalfTensor"


@in_a_trace("cuda")
def test_storages_move() -> None:
    moved = []
    for tensor in (torch.ones(4), torch.ones(4, device="cuda")):
        storage = tensor.untyped_storage()
        moved += [storage.cuda(), storage.cpu(), storage.to(device="cuda"), storage.clone()]
        moved += [tensor.storage().cuda(), tensor.storage().cpu()]
    expected = ["cuda", "cpu", "cuda", "cpu", "cuda", "cpu"]
    expected += ["cuda", "cpu", "cuda", "cuda", "cuda", "cpu"]
    assert [storage.device.type for storage in moved] == expected


def test_files_are_loaded_where_the_map_says() -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.arange(3)}, file)

    def body() -> None:
        places: Any = ({"cpu": "cuda:0"}, lambda storage, where: storage.cuda(), lambda *_: None)
        for place, on in zip(places, ("cuda", "cuda", "cpu"), strict=True):
            file.seek(0)
            weight = torch.load(file, map_location=place)["weight"]
            assert (weight.device.type, weight.tolist()) == (on, [0, 1, 2])

    trace(body, device="cuda")


@in_a_trace("cuda")
def test_a_gpu_that_is_not_there() -> None:
    asked: list[Callable[[], Any]] = [
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.memory_allocated(1),
        lambda: torch.cuda.get_device_properties("cuda:1"),
        lambda: torch.cuda.synchronize(device=1),
        lambda: torch.cuda.device(1).__enter__(),
        lambda: torch.cuda.Stream(device=1),
        lambda: torch.Generator("cuda:1"),
        lambda: torch.accelerator.memory_allocated(1),
        lambda: torch.ones(2, device="cuda:1"),
        lambda: torch.ones(2).cuda(1),
    ]
    for ask in asked:
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal: cuda:1"):
            ask()
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        torch.cuda.memory_reserved("cpu")
    torch.cuda.set_device(-1)


@in_a_trace("cuda")
def test_generators_are_of_a_device() -> None:
    host, gpu = torch.Generator(), torch.Generator("cuda")
    for make in (
        lambda: torch.randn(2, generator=host, device="cuda"),
        lambda: torch.zeros(2, device="cuda").normal_(generator=host),
        lambda: torch.multinomial(torch.ones(2, device="cuda"), 1, generator=host),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
            make()
    with pytest.raises(RuntimeError, match="for generator but found 'cuda'"):
        torch.randperm(3, generator=gpu)
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(9)
    seeds = [torch.cuda.initial_seed(), torch.cuda.default_generators[0].initial_seed()]
    torch.cuda.set_rng_state(state)
    assert [seeds, torch.cuda.initial_seed(), tuple(state.shape)] == [[9, 9], 7, (16,)]


def test_profilers_see_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> float:
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]):
            torch.ones(2, device="cuda").sum()
        with torch.autograd.profiler.emit_nvtx():
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda.profiler.stop()
            torch.cuda.nvtx.range_push("name")
            torch.cuda.nvtx.range_pop()
        torch.cuda.set_sync_debug_mode("warn")
        assert torch.cuda.get_sync_debug_mode() == 1
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        return 1 / start.elapsed_time(end)

    assert on_fake_cuda(body) > 0
    assert "Failed to record CUDA event" not in capfd.readouterr().err


def test_what_is_built_for_the_gpu() -> None:
    def body() -> list[Any]:
        properties = torch.cuda.get_device_properties(0)
        return [
            torch.backends.cuda.is_built(),
            torch.version.cuda is not None,
            torch.backends.cuda.is_flash_attention_available(),
            properties.shared_memory_per_multiprocessor,
        ]

    before = torch.version.cuda
    assert on_fake_cuda(body, gpu="h100") == [True, True, True, 228 * 1024]
    assert torch.version.cuda is before


@in_a_trace("cuda")
def test_imports_by_name() -> None:
    made = builtins.__import__("torch.nn", globals={}, locals={}, fromlist=["Linear"], level=0)
    assert made is nn


@in_a_trace("cuda")
def test_bags_of_embeddings_have_sparse_gradients() -> None:
    bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=True, device="cuda")
    optimizer = torch.optim.SparseAdam(bag.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        bag(torch.tensor([[1, 2], [2, 4]], device="cuda")).sum().backward()
        optimizer.step()
    gradient = bag.weight.grad
    assert gradient.layout is torch.sparse_coo
    assert gradient._values().is_cuda
    assert gradient._values().shape == (4, 4)


@in_a_trace("cuda")
def test_new_of_a_tensor_is_that_tensor(device: str) -> None:
    x = torch.ones(2, device=device)
    made = [x.new(x), x.new(3), x.new([1, 2])]
    assert {one.device.type for one in made} == {device}
    assert made[0].data_ptr() == x.data_ptr()


@in_a_trace("cuda")
def test_a_typed_storage_is_set_without_a_warning() -> None:
    storage = torch.ones(2).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.tensor([]).set_(typed).tolist() == [1, 1]  # type: ignore[call-overload]
