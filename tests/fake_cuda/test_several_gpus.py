"""A program that sees several GPUs: each has its ledger and its allocator."""

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import device as torch_device

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.profile import MemoryProfile
from tests.modules import Parts
from tests.processes import beside
from tests.results import in_a_trace, on_fake_cuda

SECOND = torch.device("cuda", 1)
KIB = 1024


def on_two(program: Any, **options: Any) -> MemoryProfile:
    return trace(program, device="cuda", gpus=2, **options)


def test_each_gpu_has_figures_of_its_own() -> None:
    def program() -> None:
        first = torch.ones(256, device="cuda")
        second = [torch.ones(512, device="cuda:1"), first.to(1), first.cuda(SECOND)]
        assert {tensor.device for tensor in second} == {SECOND}
        assert torch.cuda.memory_allocated() == 1 * KIB
        assert torch.cuda.memory_allocated(1) == 4 * KIB
        assert torch.cuda.memory_reserved("cuda:1") == 2 * KIB * KIB
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
            first + second[1]
        with pytest.raises(RuntimeError, match="invalid device ordinal: cuda:2"):
            torch.ones(1, device=2)
        assert {found["device"] for found in torch.cuda.memory_snapshot()} == {0, 1}

    profile = on_two(program)
    assert profile.peak == 1 * KIB
    assert list(profile.devices) == ["cuda:0", "cuda:1"]
    assert profile.devices["cuda:0"] is profile
    other = profile.devices["cuda:1"]
    assert (other.device, other.peak, other.reserved_peak) == ("cuda:1", 4 * KIB, 2 * KIB * KIB)


def test_the_current_gpu_is_where_cuda_is() -> None:
    def program() -> None:
        cuda, accelerator = torch.cuda, torch.accelerator
        assert cuda.device_count() == accelerator.device_count() == 2
        with cuda.device(1):
            assert cuda.current_device() == accelerator.current_device_index() == 1
            assert torch.ones(1, device="cuda").device == torch.ones(1).cuda().device == SECOND
            with cuda.device(-1), cuda.device(None):
                assert cuda.current_device() == 1
            with accelerator.device_index(0):
                assert cuda.current_device() == 0
            assert cuda.current_stream().device == SECOND
        assert cuda.current_device() == 0
        cuda.set_device(SECOND)
        assert torch.Generator("cuda").device == SECOND
        cuda.set_device(0)
        assert cuda.can_device_access_peer(0, 1)
        assert len(cuda.get_rng_state_all()) == len(cuda.default_generators) == 2

    on_two(program)
    trace(lambda: torch.cuda.current_device(), device="cuda")


def test_streams_belong_to_a_gpu() -> None:
    def program() -> None:
        side = torch.cuda.Stream(device=1)
        with torch.cuda.stream(side):
            assert torch.cuda.current_device() == 1
            tensor = torch.ones(256, device="cuda")
            torch.ones(256, device="cuda:0")
        assert torch.cuda.current_device() == torch.cuda.current_stream(1).stream_id == 0
        tensor.record_stream(torch.cuda.current_stream(1))
        del tensor
        again = torch.ones(256, device=1)
        assert torch.cuda.memory_reserved(1) == 2 * 2 * KIB * KIB  # each stream has its blocks
        del again

    on_two(program)


class Pipeline(Parts):
    def forward(self, input: Tensor) -> Tensor:
        return self.second(self.first(input).to(1))


def test_a_pipeline_has_each_stage_on_its_gpu() -> None:
    def program() -> None:
        model = Pipeline(first=nn.Linear(256, 128).to(0), second=nn.Linear(128, 64).to("cuda:1"))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(32, 256, device=0)).sum().backward()
        optimizer.step()
        assert model.second.weight.grad.device == SECOND
        assert optimizer.state[model.second.weight]["exp_avg"].device == SECOND

    profile = on_two(program)
    second = profile.devices["cuda:1"]
    assert second.end == profile.end  # the workspaces of cuBLAS
    assert second.by_kind("backward")["parameter"] == 4 * (128 * 64 + 64)
    assert profile.by_kind("backward")["parameter"] == 4 * (256 * 128 + 128)
    assert second.optimizer_peak >= 4 * 4 * (128 * 64 + 64)


def test_data_parallel_has_a_replica_on_each() -> None:
    def program() -> None:
        model = nn.DataParallel(nn.Linear(512, 512).cuda())
        assert model.device_ids == [0, 1]
        output = model(torch.ones(64, 512))
        assert (output.shape, output.device.index) == ((64, 512), 0)
        output.sum().backward()
        assert model.module.weight.grad.device.index == 0

    profile = on_two(program)
    parameters = 4 * (512 * 512 + 512)
    assert profile.devices["cuda:1"].forward_peak >= parameters + 4 * 2 * 32 * 512
    assert profile.backward_peak > 3 * parameters  # its own gradients, the replica's, the sum


def test_a_file_says_which_gpu(tmp_path: Path) -> None:
    def program() -> None:
        torch.save([torch.ones(2, device=1)], tmp_path / "a.pt")
        assert torch.load(tmp_path / "a.pt")[0].device == SECOND
        assert torch.load(tmp_path / "a.pt", map_location="cuda:0")[0].device.index == 0

    on_two(program)
    with pytest.raises(RuntimeError, match=r"CUDA device 1 but torch.cuda.device_count\(\) is 1"):
        trace(lambda: torch.load(tmp_path / "a.pt"), device="cuda")


def test_each_gpu_has_all_of_its_memory() -> None:
    def program() -> None:
        kept = [torch.empty(10 << 30, dtype=torch.uint8, device=index) for index in (0, 1)]
        with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has a total"):
            kept.append(torch.empty(10 << 30, dtype=torch.uint8, device=1))

    on_two(program, gpu="t4")


def test_one_gpu_is_as_it_was() -> None:
    def program() -> None:
        nn.Linear(8, 8, device="cuda")(torch.ones(4, 8, device="cuda")).sum().backward()

    profile = trace(program, device="cuda")
    assert profile.figures() == on_two(program).figures()
    assert profile.devices == {"cuda:0": profile}
    assert trace(lambda: torch.ones(1)).devices.keys() == {"cpu"}


@pytest.mark.parametrize("gpus", [0, -1, 65, "2", True, 1.5])
def test_a_number_of_gpus_that_none_is(gpus: Any) -> None:
    with pytest.raises(UsageError, match="expected how many GPUs the program sees"):
        trace(lambda: None, device="cuda", gpus=gpus)


GPU = torch.device("cuda", 0)
ENTRIES = torch.tensor([[0, 1]]), torch.ones(2)
TWICE = [ENTRIES[1]] * 2
ROW = torch.tensor([0, 2]), *(one.flatten() for one in ENTRIES)
FACTORIES: dict[str, Callable[[Any], Tensor]] = {
    "arange": lambda device: torch.arange(3, device=device),
    "asarray": lambda device: torch.asarray([1.0], device=device),
    "asarray of bytes": lambda device: torch.asarray(bytearray(8), device=device),
    "as_tensor": lambda device: torch.as_tensor([1.0], device=device),
    "empty_like": lambda device: torch.empty_like(torch.ones(2), device=device),
    "compressed": lambda device: torch.sparse_csr_tensor(*ROW, device=device).values(),
    "compressed as a whole": lambda device: torch.sparse_csr_tensor(*ROW, device=device),
    "coordinates": lambda device: torch.sparse_coo_tensor(*ENTRIES, device=device)._indices(),
    "coordinates as a whole": lambda device: torch.sparse_coo_tensor(*ENTRIES, device=device),
    "fft.fftfreq": lambda device: torch.fft.fftfreq(8, device=device),
    "full": lambda device: torch.full((2,), 1.0, device=device),
    "nested": lambda device: torch.nested.nested_tensor([[1.0], ENTRIES[1]], device=device),
    "nested of tensors": lambda device: torch.nested.as_nested_tensor(TWICE, device=device),
    "new_zeros": lambda device: torch.ones(2).new_zeros(3, device=device),
    "normal": lambda device: torch.normal(0.0, 1.0, (2,), device=device),
    "randperm": lambda device: torch.randperm(3, device=device),
    "tensor": lambda device: torch.tensor([1.0], device=device),
    "to": lambda device: torch.ones(2).to(device),
    "cuda": lambda device: torch.ones(2).cuda(device),
    "module": lambda device: nn.Linear(2, 2).to(device).weight,
    "made": lambda device: nn.Linear(2, 2, device=device).weight,
    "zeros of no memory": lambda device: torch._efficientzerotensor((3,), device=device),
}
OTHER_DEVICES = {"_assert_tensor_metadata", "_make_dep_token", "_pin_memory", "_resize_output_"}
"""Operators whose device is another's, or the host's."""


@pytest.mark.parametrize("named", [0, torch.device("cuda"), "cuda", "cuda:0"], ids=str)
@in_a_trace("cuda")
def test_every_way_of_placing_takes_every_name(named: Any) -> None:
    for name, make in FACTORIES.items():
        made = make(named)
        assert (made.device, made.is_cuda, made.is_cpu, made.get_device()) == (GPU, True, False, 0)
        if made.layout is torch.strided and not made.is_nested:
            assert made.untyped_storage().device == GPU, name


def test_every_function_of_torch_that_makes_tensors_on_a_device_is_replaced() -> None:
    """In a build with CUDA the others ask the driver for the GPU."""
    schemas = [one for one in torch._C._jit_get_all_schemas() if one.name.startswith("aten::")]
    take = [one for one in schemas if any(given.name == "device" for given in one.arguments)]
    taking = {one.name.removeprefix("aten::") for one in take}
    own = {name: getattr(torch, name) for name in taking - OTHER_DEVICES if hasattr(torch, name)}
    kept = on_fake_cuda(lambda: {name for name in own if getattr(torch, name) is own[name]})
    assert kept <= {"from_file"}  # on the CPU alone


def test_a_device_is_made_of_a_number() -> None:
    def program() -> None:
        for made in (torch.device(0), torch_device(0), torch.device("cuda", 0)):
            assert made == GPU
            assert type(made) is torch_device
            assert isinstance(made, torch.device)
            assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == GPU
        assert pickle.loads(pickle.dumps(torch.device)) is torch_device
        with pytest.raises(RuntimeError, match="must not be negative"):
            torch.device(-1)
        with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
            torch.device("gpu")
        with torch.device(0):
            assert torch.ones(1).device == GPU
        torch.set_default_device(0)
        assert torch.get_default_device() == torch.ones(1).device == GPU
        assert torch.get_device_module() is torch.cuda

    trace(program, device="cuda")
    assert type(torch.device) is type


def test_other_threads_and_traces_on_the_cpu_have_the_devices_of_the_build() -> None:
    def outcome() -> str:
        try:
            return str(torch.device(0))
        except RuntimeError as error:
            return str(error)

    found: list[str] = []
    asked, answered = threading.Event(), threading.Event()

    def answer() -> None:
        asked.wait(60)
        found.append(outcome())
        answered.set()

    def program() -> None:
        asked.set()
        assert answered.wait(60)

    with beside(answer):  # from before the trace: it is no thread of the program
        trace(program, device="cuda")
    trace(lambda: found.append(outcome()))
    assert found == [outcome()] * 2


def test_a_thread_makes_devices_beside_traces() -> None:
    over, made = threading.Event(), 0
    failed: list[Exception] = []

    def make() -> None:
        nonlocal made
        while not over.is_set():
            try:
                assert torch.device("cuda", 1).index == 1
            except Exception as error:
                failed.append(error)
                return
            made += 1

    with beside(make, over.set):
        for _ in range(30):
            trace(lambda: torch.ones(1, device=0), device="cuda")
    assert made > 0
    assert not failed


def test_storages_are_made_on_the_gpu() -> None:
    def program() -> None:
        for named in (0, "cuda", GPU):
            storage = torch.UntypedStorage(1024, device=named)
            assert (storage.device, storage.nbytes()) == (GPU, 1024)
            assert torch.TypedStorage(4, dtype=torch.float32, device=named).device == GPU
        assert torch.UntypedStorage(8, device="meta").device.type == "meta"
        assert torch.UntypedStorage(8, device="cpu").device.type == "cpu"
        assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]

    assert trace(program, device="cuda").peak == 2 * 1024  # the next is made before one dies
    assert type(torch.UntypedStorage) is type


def test_safetensors_are_read_to_the_gpu(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "a.safetensors"
    safetensors.save_file({"a": torch.arange(6.0).view(2, 3)}, path)

    def program() -> None:
        for named in (0, "cuda", "cuda:0"):
            assert safetensors.load_file(path, device=named)["a"].device == GPU
            with safetensors.safe_open(path, "pt", device=named) as file:
                assert file.get_tensor("a").device == file.get_slice("a")[1:].device == GPU
        assert safetensors.load_file(path)["a"].device.type == "cpu"

    assert trace(program, device="cuda").peak == 24 + 12


def test_nccl_with_one_process(tmp_path: Path) -> None:
    def program() -> None:
        assert dist.is_nccl_available()
        assert torch.cuda.nccl.version() > (2,)
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=GPU)
        assert dist.get_backend() == "nccl"
        tensor = torch.ones(256, device=0)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        dist.all_gather_into_tensor(torch.empty_like(tensor), tensor)
        dist.new_group([0], pg_options=dist.ProcessGroupNCCL.Options())

    built, hook = dist.is_nccl_available(), hasattr(dist, "ProcessGroupNCCL")
    assert trace(program, device="cuda").peak == 2 * 1024
    assert (dist.is_nccl_available(), hasattr(dist, "ProcessGroupNCCL")) == (built, hook)
    assert not dist.is_initialized()
