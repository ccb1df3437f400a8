"""What C++ reads of tensors without memory: what is known, a stated assumption, or one sentence."""

import copy
import errno
import io
import multiprocessing
import operator
import os
import queue
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError
from tests.processes import beside, run_program
from tests.results import in_a_trace, result_of, through_a_file

READS: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor": lambda t: torch.tensor([t, t]),
    "torch.tensor of lists": lambda t: torch.tensor([[t], (t,)]),
    "torch.as_tensor": lambda t: torch.as_tensor([t]),
    "torch.asarray": lambda t: torch.asarray((t,)),
    "torch.FloatTensor": lambda t: torch.FloatTensor([t.float()]),
    "torch.Tensor": lambda t: torch.Tensor([t.float()]),
    "torch.Tensor of integers": lambda t: torch.Tensor([t.long(), t.long()]),
    "torch.Tensor of positions": lambda t: torch.Tensor([t.expand(3).argmax()]),
    "torch.LongTensor of booleans": lambda t: torch.LongTensor([t > 0]),
    "complex": complex,
    "new_tensor": lambda t: t.new_tensor([t]),
    "new": lambda t: t.new([t]),
    "index": lambda t: torch.ones(5, device=t.device)[[t.long()]],
    "numpy.array": lambda t: numpy.array(t.cpu()),
    "numpy.array of a list": lambda t: numpy.array([t.cpu()]),
    "numpy.float32": lambda t: numpy.float32(t.cpu()),
    "memoryview": lambda t: bytes(memoryview(t.cpu().numpy())),
    "to_dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "_to_dlpack": lambda t: torch._C._to_dlpack(t),
    "from_dlpack": lambda t: torch.from_dlpack(t).item() + 0,
    "numpy.from_dlpack": lambda t: numpy.from_dlpack(t.cpu()),
    "an element of a storage": lambda t: t.untyped_storage()[0],
    "an element of a typed storage": lambda t: t.storage()[0],
    "bytes of a storage": lambda t: bytes(t.untyped_storage()),
    "list of a storage": lambda t: t.untyped_storage().tolist(),
    "apply_": lambda t: t.cpu().apply_(lambda number: number + 1),
    "map_": lambda t: t.cpu().map_(t.cpu(), lambda one, other: one + other),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.item() + 0,
    "float": float,
    "format": lambda t: f"{t:.2f}",
    "linspace": lambda t: torch.linspace(0, t, 3),
    "full": lambda t: torch.full((2,), t),
    "collate": lambda t: torch.utils.data.default_collate([t.item(), t.item()]),
}
"""Ways to the values of a tensor of no dimension."""

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda t: t.untyped_storage().fill_(1),
    "copy_": lambda t: t.untyped_storage().copy_(torch.ones_like(t).untyped_storage()),
    "element": lambda t: t.untyped_storage().__setitem__(0, 1),
    "byteswap": lambda t: t.untyped_storage().byteswap(t.dtype),
    "share_memory_": lambda t: t.share_memory_(),
    "is_pinned": lambda t: t.is_pinned(),
    "copy": lambda t: copy.copy(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "repr": repr,
}
"""What may be done without values."""


def unknown(device: str, kind: str) -> Tensor:
    total = torch.rand(2000, 3000, device=device).sum()
    return (total * 3).long() if kind == "integer" else total


@pytest.mark.parametrize("kind", ["floating", "integer"])
@pytest.mark.parametrize("name", READS)
def test_an_unknown_value_is_told_or_refused(device: str, kind: str, name: str) -> None:
    told: list[str] = []

    def program() -> None:
        tensor = unknown(device, kind)
        try:
            READS[name](tensor)
        except UnknownValueError as error:
            told.append(str(error))

    told += trace(program, device=device, values="none").warnings
    assert any("test_data.py:" in line and "unknown" in line for line in told), told


@pytest.mark.parametrize("name", WRITES)
def test_what_needs_no_value_runs(device: str, name: str) -> None:
    writes = WRITES[name]
    profile = trace(lambda: writes(unknown(device, "floating")), device=device, values="none")
    assert not profile.warnings


@in_a_trace()
def test_a_tensor_says_whether_it_is_in_shared_memory(device: str) -> None:
    host, on_device = torch.zeros(3), torch.zeros(3, device=device)
    assert not host.is_shared()
    assert on_device.is_shared() == (device == "cuda")
    assert torch.nn.Linear(2, 2, device=device).share_memory().weight.is_shared()
    assert host.share_memory_().is_shared()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_model_that_a_program_shares_stays_where_it_is(device: str) -> None:
    model = torch.nn.Linear(2, 2)

    def program() -> None:
        assert model.share_memory().weight.is_shared()

    before = open_files()
    assert "is not seen" in trace(program, device=device).warnings[0]
    assert (open_files(), model.weight.is_shared()) == (before, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("method", ["fork", "spawn"])
@in_a_trace()
def test_what_processes_write_to_shared_memory_is_seen(method: str, dtype: torch.dtype) -> None:
    one = torch.zeros(6, dtype=dtype)[::2].share_memory_()
    for _ in range(2):
        context: Any = multiprocessing.get_context(method)
        (process := context.Process(target=operator.iadd, args=(one.mul_(3), 1))).start()
        process.join()
    assert one.tolist() == [4, 4, 4]


@in_a_trace()
def test_a_tensor_goes_through_a_queue_of_processes() -> None:
    sent = multiprocessing.get_context("fork").Queue()
    sent.put(torch.ones(3))
    assert sent.get(timeout=60).tolist() == [1, 1, 1]


def test_known_values_are_read(device: str) -> None:
    def program() -> None:
        three = torch.tensor(3, device=device)
        assert torch.tensor([three, three + 1]).tolist() == [3, 4]
        assert torch.as_tensor([[three], [three]]).tolist() == [[3], [3]]
        assert torch.tensor([three]).dtype is torch.int64
        assert torch.tensor([three.double(), 1.0]).dtype is torch.float64
        assert three.new_tensor([three]).device.type == device
        assert three.cpu().clone().apply_(lambda number: number * 2).item() == 6
        assert numpy.array([three.cpu()]).tolist() == [3]

    assert not trace(program, device=device).warnings


_FUZZ = """
import contextlib, random, sys
import torch
from tests.interception.values.test_data import READS, WRITES
from pytest_torchmem import trace

draw = random.Random(int(sys.argv[1]))
ways = [*READS.values(), *WRITES.values()]

def program(device):
    tensors = [torch.rand(draw.choice([1, 7, 1 << 40]), device=device) for _ in range(3)]
    for _ in range(60):
        tensor = draw.choice(tensors)
        small = tensor[:1].sum() if draw.random() < 0.8 else tensor[:5]
        small = small.to(draw.choice([torch.float32, torch.int64, torch.bool, torch.float16]))
        try:
            found = draw.choice(ways)(small)
        except Exception:
            continue
        if isinstance(found, torch.Tensor) and found.numel() < 100:
            tensors.append(found.float().expand(7).clone() if found.numel() == 1 else tensor)

for device in ("cpu", "cuda"):
    with contextlib.suppress(ValueError):
        trace(program, device, device=device, values=draw.choice(["none", "auto"]))
assert torch.ones(3).sum() == 3
print("done")
"""


def test_no_way_ends_the_process() -> None:
    seed = os.environ.get("TORCHMEM_SEED", str(random.randrange(1 << 30)))
    print(f"TORCHMEM_SEED={seed}")
    assert run_program(_FUZZ, seed).stdout == "done\n"


_FROM_BEFORE = """
import queue
import threading
import torch
from pytest_torchmem import trace

given, found = queue.Queue(), queue.Queue()

def serve():
    while True:
        x = given.get()
        found.put((x + 1).sum().item())

threading.Thread(target=serve, daemon=True).start()

def program():
    given.put(torch.rand(1000, 1000))
    assert found.get(timeout=60) == 1e6

print(trace(program, values="none").warnings)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such pages")
def test_a_thread_from_before_reads_zeros_and_the_profile_says_so() -> None:
    assert "it read zeros" in run_program(_FROM_BEFORE).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are Linux's")
def test_without_reserved_pages_a_trace_is_the_same() -> None:
    program = (
        "import resource, torch; from torch import nn;"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40));"
        "from pytest_torchmem import trace;"
        "from pytest_torchmem.torch_private.tensors import nowhere;"
        "print(trace(nn.Linear(4, 4), torch.ones(2, 4)).figures(), nowhere().address)"
    )
    figures = trace(torch.nn.Linear(4, 4), torch.ones(2, 4)).figures()
    assert run_program(program).stdout.strip() == f"{figures} 0"


def test_nothing_stays_resident_after_a_trace() -> None:
    from pytest_torchmem.torch_private.tensors import nowhere

    given: queue.Queue[Tensor] = queue.Queue()
    written = threading.Event()

    def serve() -> None:
        given.get(timeout=60).fill_(1)
        written.set()

    def program() -> None:
        given.put(torch.empty(1000, 1000))
        assert written.wait(60)

    with beside(serve):
        trace(program, values="none")
    assert not nowhere().touched()


def shared_with_numpy(device: str) -> list[Any]:
    array = numpy.zeros(4, dtype="float32")
    tensor = torch.from_numpy(array)
    array[1] = 5
    found: list[Any] = [tensor.sum().item()]
    tensor.mul_(2)
    found.append(float(array.sum()))
    torch.as_tensor(array).add_(1)
    torch.tensor(array).add_(1)
    tensor.copy_(tensor.to(device) * 2)
    found += [float(array.sum()), bool(numpy.shares_memory(array, tensor.numpy()))]
    memory = bytearray(8)
    of_memory = torch.frombuffer(memory, dtype=torch.uint8).fill_(3)
    memory[0] = 100
    found += [sum(memory), of_memory.sum().item()]
    other = numpy.arange(3.0)
    torch.from_dlpack(other).add_(1)
    on_device = torch.ones(3, device=device)
    torch.from_dlpack(on_device).add_(1)
    again = torch.from_dlpack(torch.utils.dlpack.to_dlpack(on_device)).add_(1)
    found.append(again.device == on_device.device)
    return [*found, float(other.sum()), on_device.sum().item()]


def test_memory_is_shared_with_numpy(device: str) -> None:
    assert result_of(lambda: shared_with_numpy(device), device=device) == shared_with_numpy("cpu")


def test_arrays_take_what_they_take() -> None:
    """Memory of numpy is not the allocator's, and that of a tensor is given back with its array."""

    def program() -> Tensor:
        inputs = torch.as_tensor(numpy.ones(100), dtype=torch.float32)
        lengths = torch.from_numpy(numpy.arange(50))
        means = [torch.ones(1000).numpy().mean() for _ in range(3)]
        kept = [torch.ones(200).numpy() for _ in range(2)]
        return torch.ones(800) * float(sum(means) + len(kept)) * (inputs.sum() + lengths.sum())

    traced = trace(program, device="cpu", host="here")
    measured = measure(program, device="cpu").figures()
    assert traced.figures() == measured | {"host_peak": 8812}


@in_a_trace()
def test_sparse_tensors_are_saved_and_copied(device: str) -> None:
    sparse = torch.eye(3, device=device).to_sparse()
    for one in (through_a_file({"sparse": sparse})["sparse"], copy.deepcopy(sparse)):
        assert one.device.type == device
        assert one.to_dense().sum().item() == 3


class _FullDisk(io.BytesIO):
    """A file that takes so many bytes, and no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "no space left")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 300, 1_200, 5_000])
@in_a_trace()
def test_a_file_that_cannot_be_written_raises_what_it_raises(room: int, device: str) -> None:
    with pytest.raises(OSError, match="no space left"):
        torch.save([torch.rand(1000, device=device), torch.ones(2)], _FullDisk(room))


REPLACED = ("item", "tolist", "numpy", "cpu", "clone", "detach", "zero_", "normal_")


def test_methods_that_a_program_replaced_are_called_as_for_real(device: str, monkeypatch) -> None:
    calls: list[str] = []

    def counting(name: str, original: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs)

    def program(device: str) -> list[Any]:
        torch.manual_seed(0)
        x, weight = torch.randn(3, 4, device=device), torch.empty(4, device=device).normal_()
        ((x * weight.requires_grad_()).sum() * (weight + weight).sum()).backward()
        found = [x.sum().item(), x[:, 0].tolist(), weight.grad.numpy(force=True).tolist()]
        return [*found, copy.deepcopy(x).zero_().sum().item(), torch.randn(2).tolist(), *calls]

    for name in REPLACED:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    traced = result_of(lambda: program(device), device=device, values="real")
    calls.clear()
    assert traced == program("cpu")
