"""The world of a trace: groups, variables, stores and meshes of one process of many."""

import importlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import multiprocessing
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import spawn

from pytest_torchmem import errors, trace
from pytest_torchmem.errors import NoCudaError, UnknownValueError, UsageError
from pytest_torchmem.targets.world import World
from tests.processes import group_of_one

WORLD: dict[str, Any] = {"world_size": 16, "rank": 13}


def start(device: str, backend: str | None, **arguments: Any) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, **arguments)
    assert (dist.get_rank(), dist.get_world_size()) == (13, 16)
    mesh = dist.init_device_mesh(device, (4, 4), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].get_local_rank() == 1
    own = torch.randn(1024, device=device)
    dist.all_reduce(own, group=mesh["tp"].get_group())
    group = dist.new_group([0, 13])
    assert dist.get_rank(group) == 1
    assert dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    dist.barrier()


BACKENDS = [("cpu", one) for one in ("gloo", "mpi", None)]
BACKENDS += [("cuda", one) for one in ("nccl", None, "cpu:gloo,cuda:nccl")]


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.filterwarnings("ignore:For MPI backend")
def test_every_backend_is_there_and_gone_afterwards(device: str, backend: str | None) -> None:
    hook, variables = sys.excepthook, dict(os.environ)
    profile = trace(start, device, backend, device=device, **WORLD)
    mesh = 64 if device == "cpu" else 0  # 16 ranks of 4 bytes, on the host
    flat = 16 * 4096 - 1 if device == "cuda" else 0  # NCCL gathers into one tensor first
    assert profile.peak == 17 * 4096 + mesh + flat + 1  # what the barrier is waited for with
    assert (profile.world_size, profile.rank) == (16, 13)
    assert "rank 13 of 16" in profile.table()
    if device == "cuda":
        assert profile.device == "cuda"
        assert set(profile.devices) == {f"cuda:{index}" for index in range(8)}
        assert profile.devices["cuda:5"] is profile
        assert not any(other.peak for other in profile.others)
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert dict(os.environ) == variables


def test_backends_are_chosen_and_checked_as_in_a_process(device: str) -> None:
    has_mpi = dist.is_mpi_available()

    def step() -> None:
        assert dist.is_mpi_available() is has_mpi
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        dist.all_reduce(torch.ones(1024, device=device))
        dist.broadcast_object_list([1, 2])

    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert trace(step, device=device, world_size=2).peak == 4096
    finally:
        dist.set_debug_level(before)


def test_stores_and_addresses_wait_for_nobody() -> None:
    def program() -> None:
        store = dist.TCPStore("localhost", 1, 16, False, timedelta(seconds=300))
        assert store.add("started", 1) == 16
        store.set("own", "x")
        assert dist.PrefixStore("a", store).add("b", 2) == 32
        assert store.num_keys() == 3
        start("cpu", "gloo", store=store, rank=13, world_size=16)
        dist.destroy_process_group()
        start("cpu", "gloo", init_method="tcp://10.1.1.20:23456")

    trace(program, **WORLD)
    with pytest.raises(UnknownValueError, match="another process writes to the store"):
        trace(lambda: dist.HashStore().get("theirs"), **WORLD)


def test_groups_that_know_their_device_are_split() -> None:
    def program() -> None:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=device)
        mesh = dist.init_device_mesh("cuda", (4, 4), mesh_dim_names=("dp", "tp"))
        assert mesh["dp"].get_local_rank() == 3
        assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [12, 13, 14, 15]
        assert dist.split_group(split_ranks=[[13, 2]]).size() == 2
        assert dist.split_group(split_ranks=[[0, 1]]) is None
        dist.all_reduce(torch.ones(2, device=device), group=mesh["dp"].get_group())
        os.environ["OF_THE_PROGRAM"] = "x"

    trace(program, device="cuda", **WORLD)
    assert "OF_THE_PROGRAM" not in os.environ


def test_libraries_ask_again_which_process_they_are_in(monkeypatch: Any) -> None:
    library = ModuleType("accelerate.state")

    class State:
        _shared_state: ClassVar[dict[str, Any]] = {}

        def __init__(self) -> None:
            self.__dict__ = self._shared_state
            self.__dict__.setdefault("rank", int(os.environ["RANK"]))

    library.State = State  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate.state", library)
    found: list[int] = []

    for rank in (3, 1):
        trace(lambda: found.append(State().__dict__["rank"]), world_size=4, rank=rank)
    assert found == [3, 1]


NUMBERS: list[Any] = []


def as_started(number: int, *args: Any) -> None:
    os.environ["MASTER_PORT"] = "29501"
    dist.init_process_group("gloo", rank=number, world_size=8)
    dist.all_reduce(torch.randn(1024))
    NUMBERS.append((number, *args))
    sys.exit(0)


def test_a_function_that_a_program_starts_in_processes_runs_as_the_rank() -> None:
    def step() -> None:
        multiprocessing.spawn(as_started, args=("a",), nprocs=8)
        assert not dist.is_initialized()
        assert os.environ["MASTER_PORT"] == "29500"
        assert spawn(as_started, nprocs=8, join=False).join()
        config = LaunchConfig(1, 1, nproc_per_node=8)
        assert elastic_launch(config, dist.is_torchelastic_launched)() == {3: True}

    NUMBERS.clear()
    assert trace(step, world_size=8, rank=3).peak == 4096
    assert NUMBERS == [(3, "a"), (3,)]


def test_a_file_that_rank_0_writes_is_there_for_the_others(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"

    def step() -> None:
        weights = torch.zeros(1024)
        if os.environ["RANK"] == "0":
            torch.save({"weights": weights, "epoch": 3}, path)
        del weights
        found = torch.load(path)
        assert found["epoch"] == 3
        assert found["weights"].shape == (1024,)

    assert trace(step, device="cpu", world_size=8, rank=3).peak == 4096
    assert path.exists()


def resumed(path: Path) -> int:
    """Begin anew where no checkpoint is, and go on with that of rank 0 later."""
    begin = 0
    if path.exists():
        begin = 5
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        torch.save({"epoch": 3}, path)
    dist.barrier()
    return begin + (int(torch.load(path)["epoch"]) if path.is_file() else 100)


def removed(path: Path) -> int:
    """Read two checkpoints of rank 0, each of which it removes afterwards."""
    dist.init_process_group("gloo")
    found = 0
    for epoch in (1, 2):
        each = path.with_suffix(f".{epoch}")
        if dist.get_rank() == 0:
            torch.save({"epoch": epoch}, each)
        dist.barrier()
        found += torch.load(each)["epoch"]
        dist.barrier()
        if dist.get_rank() == 0:
            each.unlink()
    return found


def awaited(path: Path) -> int:
    """Wait for a file of rank 0, and there for those of all."""
    own = path.with_suffix(f".{os.environ['RANK']}")
    own.write_text("3")
    ranks = range(int(os.environ["WORLD_SIZE"])) if own.suffix == ".0" else range(1)
    for other in ranks:
        while not path.with_suffix(f".{other}").exists():
            time.sleep(60)
    return int(path.with_suffix(".0").read_text())


def listed(path: Path) -> int:
    """Wait until a directory has the files of all processes, however it is looked at."""
    own = path.with_suffix(f".{os.environ['RANK']}")
    own.write_text("3")
    lists = (os.listdir, os.scandir, Path.iterdir)
    for look in (*lists, lambda folder: [*folder.glob("check*"), *folder.glob("n*")]):
        while len(list(look(path.parent))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(60)
    return int(own.read_text())


def accessed(path: Path) -> int:
    """Wait until rank 0's file may be read."""
    if os.environ["RANK"] == "0":
        path.write_text("3")
    while not os.access(path, os.R_OK):
        time.sleep(60)
    return int(path.read_text())


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("program", [resumed, removed, awaited, listed, accessed])
def test_files_of_others_are_there_when_they_would_be(program, rank, tmp_path):
    def step() -> None:
        torch.empty(program(tmp_path / "checkpoint.pt"), dtype=torch.float64)

    assert trace(step, device="cpu", world_size=3, rank=rank).timeline.allocations[-1].shape == (3,)


def test_others_are_seldom_traced_for_files_that_are_not_there(tmp_path, monkeypatch):
    (tmp_path / "looks_for_its_own.py").write_text(f"import os\nos.path.exists('{tmp_path}/own')\n")
    monkeypatch.syspath_prepend(tmp_path)
    runs = tmp_path / "runs"

    def step(epochs: int) -> None:
        with runs.open("a") as file:
            file.write(os.environ["RANK"])
        dist.init_process_group("gloo")
        dist.barrier()
        importlib.import_module("looks_for_its_own")
        (tmp_path / "made" / "here").mkdir(parents=True, exist_ok=True)
        for _ in range(epochs):
            assert not (tmp_path / "stop").exists()
            assert not (tmp_path / "pause").exists()
            dist.barrier()

    for epochs, expected in ((0, "1"), (1, "101"), (20, "101010101")):
        runs.write_text("")
        trace(step, epochs, device="cpu", world_size=2, rank=1)
        assert runs.read_text() == expected


def test_a_file_that_nobody_writes_ends_a_wait(tmp_path: Path) -> None:
    def step(looks: Callable[[], object]) -> None:
        while not looks():
            time.sleep(0.0001)

    with pytest.raises(UnknownValueError, match=r"waits for a file \(.*flag\) that no process"):
        trace(step, (tmp_path / "flag").exists, device="cpu", world_size=2, rank=1)
    with pytest.raises(UnknownValueError, match=r"a file in a directory \(.*\) that no process"):
        trace(step, lambda: os.listdir(tmp_path), device="cpu", world_size=2, rank=1)


def test_processes_that_no_trace_can_follow_are_told() -> None:
    with pytest.raises(UsageError, match=r"starts 2 processes .* rank 13 of 16 \(8 on its node\)"):
        trace(lambda: multiprocessing.spawn(as_started, nprocs=2), **WORLD)

    with pytest.raises(FileNotFoundError) as missing:
        trace(lambda: torch.load("checkpoint.of.rank.0"), **WORLD)
    assert "rank 0 before it, which has not written the file" in missing.value.__notes__[0]

    def step() -> None:
        process = multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        process.join()

    (warning,) = trace(step, **WORLD).warnings
    assert "starts a process" in warning
    assert "torch.multiprocessing.spawn" in warning


def test_a_world_that_the_program_contradicts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"init_process_group\(world_size=2\).*rank 13 of 16"):
        trace(lambda: dist.init_process_group("gloo", rank=13, world_size=2), **WORLD)
    for wrong in ({"rank": 1}, {"world_size": 0}, {"world_size": 2, "rank": 2}):
        with pytest.raises(UsageError, match=r"rank|how many processes"):
            trace(lambda: None, **wrong)


def test_products_that_are_joined_with_collectives_take_what_is_not_symmetric_memory() -> None:
    """The gathered input and its products; the parts of all processes, and their sum.

    torch/distributed/_symmetric_memory/__init__.py, ``_fused_all_gather_matmul_impl`` and
    ``_fused_matmul_reduce_scatter_impl``.
    """
    rows, inner, columns, size, f8 = 32, 512, 256, WORLD["world_size"], torch.float8_e4m3fn
    at = {"device": "cuda"}

    def step(scaled: bool, scatters: bool) -> None:
        dist.init_process_group("nccl")
        name = dist.distributed_c10d._get_default_group().group_name
        symmetric_memory.enable_symm_mem_for_group(name)
        assert symmetric_memory.is_symm_mem_enabled_for_group(name)
        a = torch.empty(rows, inner, dtype=f8 if scaled else torch.bfloat16, **at)
        b = torch.empty(columns, inner, dtype=a.dtype, **at).t()
        one = torch.empty((), **at)
        operators, dtype = torch.ops.symm_mem, torch.bfloat16
        if scaled and scatters:
            more = ("avg", 0, 0, name, [rows, columns])
            operators.fused_scaled_matmul_reduce_scatter(a, b, one, one, *more, out_dtype=dtype)
        elif scaled:
            more = ([one], 0, name, [None], [None], [dtype], [True])
            operators.fused_all_gather_scaled_matmul(a, [b], one, *more)
        elif scatters:
            operators.fused_matmul_reduce_scatter(a, b, "avg", 0, name)
        else:
            operators.fused_all_gather_matmul(a, [b], 0, name)

    for scaled in (False, True):
        element = 1 if scaled else 2
        held = (rows + columns) * inner * element + 4
        for scatters, taken in (
            (False, size * rows * (inner * element + columns * 2)),
            (True, (rows + rows // size) * columns * 2),
        ):
            asked = partial(step, scaled, scatters)
            found = trace(asked, device="cuda", gpu="h100", **WORLD)
            of_cublas = sum(one.nbytes for one in found.live_at_peak() if "cuBLAS" in one.label)
            assert found.peak - of_cublas == held + taken
            assert not found.unknown_workspaces
            assert "not counted: memory that NCCL takes for itself" in found.to_html()
            assert not symmetric_memory._group_name_to_store


@pytest.mark.parametrize("world", [WORLD, {}])
@pytest.mark.parametrize("ask", [symmetric_memory.empty, symmetric_memory.get_symm_mem_workspace])
def test_symmetric_memory_is_refused_with_a_way_out(ask: Any, world: dict[str, Any]) -> None:
    def step() -> None:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl", **({} if world else alone))
        if ask is symmetric_memory.empty:
            ask(4, device="cuda")
        else:
            ask(dist.distributed_c10d._get_default_group().group_name, 1024)

    before = dict(vars(symmetric_memory._SymmetricMemory))
    with pytest.raises(
        errors.UnsupportedOperatorError, match=r"symmetric memory .* ordinary tensors"
    ):
        trace(step, device="cuda", **world)
    assert dict(vars(symmetric_memory._SymmetricMemory)) == before


def test_groups_that_were_there_are_there_again() -> None:
    def goes_on() -> None:  # with the group of a fixture
        assert (dist.get_rank(), dist.get_world_size()) == (13, 16)
        dist.barrier()

    with group_of_one():
        before, group = dist.group.WORLD, dist.new_group([0])
        trace(start, "cpu", "gloo", **WORLD)
        assert dist.group.WORLD is before
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert all_gather_tensor(tensor, 0, group).tolist() == [1.0, 1.0]
        trace(goes_on, **WORLD)
        assert dist.group.WORLD is before


def test_variables_are_those_of_torchrun() -> None:
    variables = World(20, 17, 8).environment
    expected = {"RANK": "17", "WORLD_SIZE": "20", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    expected |= {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}
    assert expected.items() <= variables.items()


def test_nccl_asks_for_cuda() -> None:
    with pytest.raises(NoCudaError, match=r"test_world\.py"):
        trace(lambda: dist.init_process_group("nccl"), world_size=2)


@pytest.mark.parametrize("send", [dist.broadcast, dist.send, dist.recv])
def test_a_process_that_is_not_there_is_refused_as_by_a_backend(send: Any) -> None:
    def step() -> None:
        dist.init_process_group("gloo")
        send(torch.ones(3), 3)

    with pytest.raises(RuntimeError, match="invalid root rank"):
        trace(step, world_size=2)
