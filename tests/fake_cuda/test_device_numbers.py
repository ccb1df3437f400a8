"""Devices that a program names by a number, and what C++ asks its build for otherwise."""

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

GPU = torch.device("cuda", 0)
ENTRIES = torch.tensor([[0, 1]]), torch.ones(2)
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
    "nested of tensors": lambda device: torch.nested.as_nested_tensor(
        [ENTRIES[1]] * 2, device=device
    ),
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


@pytest.mark.parametrize("named", [0, torch.device("cuda"), "cuda:0"], ids=str)
def test_every_way_of_placing_takes_every_name(named: Any) -> None:
    def program() -> None:
        found = {name: make(named).device for name, make in FACTORIES.items()}
        assert set(found.values()) == {GPU}, found

    trace(program, device="cuda")


def test_every_function_of_torch_that_makes_tensors_on_a_device_is_replaced() -> None:
    """In a build with CUDA the others ask the driver for the GPU."""
    taking = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(a.name == "device" for a in schema.arguments)
    }
    own = {name: getattr(torch, name) for name in taking - OTHER_DEVICES if hasattr(torch, name)}
    kept: list[str] = []

    def program() -> None:
        kept.extend(name for name, function in own.items() if getattr(torch, name) is function)

    trace(program, device="cuda")
    assert set(kept) <= {"from_file"}  # on the CPU alone


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

    thread = threading.Thread(target=answer)
    thread.start()  # before the trace: it is no thread of the program
    trace(program, device="cuda")
    thread.join()
    trace(lambda: found.append(outcome()))
    assert found == [outcome()] * 2


def test_a_thread_makes_devices_beside_traces() -> None:
    going, made = True, 0
    failed: list[Exception] = []

    def make() -> None:
        nonlocal made
        while going:
            try:
                assert torch.device("cuda", 1).index == 1
            except Exception as error:
                failed.append(error)
                return
            made += 1

    thread = threading.Thread(target=make)
    thread.start()
    for _ in range(30):
        trace(lambda: torch.ones(1, device=0), device="cuda")
    going = False
    thread.join()
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
