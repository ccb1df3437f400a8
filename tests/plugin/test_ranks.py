"""Checks of the ranks of a distributed step: ``world_size=`` and ``ranks=`` in whole runs."""

import pytest

from tests.plugin.conftest import checking

HEAD = """
import os
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
"""
MESH = """
@pytest.fixture(scope="module")
def mesh(group):
    sizes = (dist.get_world_size() // 2, 2)
    return dist.init_device_mesh("cuda", sizes, mesh_dim_names=("data", "tensor"))

@pytest.fixture(scope="module")
def sharded(mesh):
    model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])
"""
STEP = f"""{HEAD}
def step(device="cpu"):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    held = torch.empty(1 << 16 if rank else 1 << 14)
    parts = [torch.empty_like(held) for _ in range(mesh["tensor"].size())]
    dist.all_gather(parts, held, group=mesh["tensor"].get_group())
"""
FIXTURE = STEP + (
    "def test_it(torchmem):\n"
    "    profiles = torchmem.check(step, device='cpu', world_size=8, ranks=(0, 7))\n"
    "    assert {name: found.rank for name, found in profiles.items()}"
    " == {'cpu rank 0': 0, 'cpu rank 7': 7}\n"
)


def test_each_rank_has_an_entry_of_its_own(project):
    project.run("--torchmem-update", test_net=FIXTURE, passed=1)
    project.run(passed=1)
    stored = project.file().read_text()
    assert stored.count('"world_size": 8') == 2
    result = project.run(test_net=FIXTURE.replace("1 << 16", "1 << 17"), failed=1)
    result.tells("E * +768.0 KiB (+100.0 %) forward peak, cpu, rank 7 of 8:")
    result.stdout.no_fnmatch_line("E *rank 0 of 8*")
    assert project.file().read_text() == stored


def test_marker_options_and_ini_say_the_world(project):
    body = STEP.replace("def step", "@pytest.mark.memory_budget({}device='cpu')\ndef test_it")
    body = body.replace('device="cpu"', "")
    project.run(test_net=body.format("'2 MiB', world_size=4, ranks=(1, 3), "), passed=1)
    project.write(test_net=body.format("'512 KiB', "))
    world = ("--torchmem-world-size=4", "--torchmem-ranks=0,3")
    result, checks = project.checks(*world, failed=1)
    result.tells("* peak exceeds the budget *, cpu, rank 3 of 4")
    assert [check["rank"] for check in checks] == [0, 3]
    project.run("-o", "torchmem_world_size=4", "-o", "torchmem_ranks=0", passed=1)


def test_what_is_no_world_is_refused(project):
    wrong = {
        "step, ranks=1": "*a rank is one of a world: give world_size= too*",
        "step, world_size=0": "*write how many processes there are*",
        "step, world_size=4, ranks=(0, 4)": "*write ranks from 0 to 3*",
        "step, world_size=4, rank=1": "*write ranks=*",
    }
    tests = (checking(call, name=str(number)) for number, call in enumerate(wrong))
    project.run(test_net="".join((STEP, *tests)), failed=4).tells(*wrong.values())
    project.run("--torchmem-ranks=x").is_refused("*torchmem_ranks: 'x': write ranks*")


SHARDED = f"""{HEAD}
from torch.testing._internal.distributed.fake_pg import FakeStore

@pytest.fixture(scope="module")
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()

@pytest.fixture(scope="module")
def model():
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))

@pytest.mark.memory_budget("1 MiB", world_size=4, ranks=(0, 3))
def test_sharded(model):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    dist.init_process_group()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)(torch.randn(8, 64, device=device)).sum().backward()

def test_checked(torchmem, model, group):
    def step(device="cpu"):
        dist.init_process_group()
        fully_shard(model)
        model(torch.randn(8, 64, device=device)).sum().backward()
    torchmem.check(step, world_size=4, ranks=(0, 3))

def test_real(model):
    model(torch.ones(1, 64)).sum().backward()
    assert type(model) is nn.Sequential and model[0].weight.grad.isfinite().all()
"""


def test_a_model_of_a_fixture_is_sharded_anew_by_each_rank_and_device(project):
    project.run("--torchmem-update", test_net=SHARDED, passed=3).tells("8 memory checks: *")
    result = project.run("--torchmem-json=r.json", passed=3)
    result.tells("2 tests without memory that NCCL takes for itself")
    assert project.read("r.json").count("NCCL") == 4


IN_A_FIXTURE = f"""{HEAD}
@pytest.fixture(scope="module")
def group():
    return {{}}

def test_first(group, torchmem):
    torchmem.check(print, device="cpu", world_size=8)

def test_second(group, torchmem):
    torchmem.check(print, device="cpu", world_size=8)
"""


@pytest.mark.parametrize("asking", ["dist.init_process_group('gloo')", "int(os.environ['RANK'])"])
def test_a_fixture_that_asks_for_its_rank_is_told_where_to(project, asking):
    result = project.run(test_net=IN_A_FIXTURE.format(asking), errors=2)
    text = result.stdout.str()
    assert text.count("the fixture 'group' asks which process of a distributed program") >= 2
    assert text.count("test_net.py:12: ") == 2
    result.tells("*world_size=8, ranks=(0, 3)*")
    result.stdout.no_fnmatch_line("*rendezvous.py*")


IN_FIXTURES = f"""{HEAD}{MESH}
@pytest.fixture(scope="module")
def group():
    dist.init_process_group("nccl")
    yield dist.group.WORLD
    assert os.environ["RANK"] == "8"
    dist.destroy_process_group()

@pytest.fixture
def rank():
    return int(os.environ["RANK"])

@pytest.fixture(scope="session")
def size():
    return int(os.environ.get("WORLD_SIZE", 1))

@pytest.fixture
def model(group):
    return DistributedDataParallel(torch.nn.Linear(64, 64, device="cuda"))

@pytest.fixture
def left_alone(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    dist.init_process_group("gloo")

@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.memory_budget("20 MiB", device="cuda", world_size=16, ranks=8)
def test_eight(time, group, mesh, rank, size):
    assert (rank, size, dist.get_rank(), mesh["tensor"].get_local_rank()) == (8, 16, 8, 0)
    held = torch.ones(64, device="cuda")
    dist.all_reduce(held, group=group)
    dist.all_reduce(held, group=mesh["tensor"].get_group())
    dist.destroy_process_group()

@pytest.mark.memory_budget("20 MiB", device="cuda", world_size=16, ranks=8)
def test_model(model):
    model(torch.ones(2, 64, device="cuda")).sum().backward()

@pytest.mark.memory_budget("20 MiB", device="cuda", world_size=16, ranks=8)
def test_sharded(sharded):
    optimizer = torch.optim.AdamW(sharded.parameters())
    for _ in range(2):
        sharded(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()
    assert sharded[0].weight.grad.to_local().shape == (8, 64)

def test_plain(size):
    assert size == 1 and not dist.is_initialized() and "RANK" not in os.environ

@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.memory_budget("20 MiB", device="cpu", world_size=4)
def test_four(time, left_alone, size):
    assert (size, dist.get_world_size()) == (4, 4)
    torch.ones(64)

def test_options(torchmem):
    assert not dist.is_initialized() and not {{"RANK", "LOCAL_RANK"}} & set(os.environ)
"""
NOT_TOLD = f"""{HEAD}
@pytest.fixture(scope="module")
def size():
    return int(os.environ.get("WORLD_SIZE", 1))

@pytest.fixture
def setting(monkeypatch):
    monkeypatch.setenv("RANK", "0")

@pytest.fixture
def wrapped():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    dist.destroy_process_group()

def test_check(size, torchmem):
    torchmem.check(torch.ones, size, device="cpu", world_size=4)

def test_trace(size, torchmem):
    torchmem.trace(torch.ones, size, device="cpu", world_size=4)

def test_wrapped(wrapped, torchmem):
    def step():
        wrapped(torch.ones(2, 4)).sum().backward()
    torchmem.check(step, device="cpu", world_size=4)

@pytest.mark.memory_budget("1 MiB", device="cpu", world_size=4, ranks=(0, 3))
def test_setting(setting):
    torch.ones(4)

def test_plain(size):
    assert size == 1
"""


def test_a_fixture_that_is_another_process_than_the_trace_is_named(project):
    result = project.run("--torchmem-update", test_net=NOT_TOLD, failed=3, passed=2)
    text = result.stdout.str()
    for failure in ("test_check", "test_trace"):
        said = text.partition(f"_ {failure} _")[2].partition("\n__")[0]
        assert "test_net.py:12: the fixture 'size' asks which process of a distributed" in said
    result.tells("*process group from before the trace, of other processes*")


def test_another_world_than_that_of_the_options_is_refused(project):
    head = NOT_TOLD.partition("@pytest.mark")[0]
    body = "    torchmem.check(torch.ones, size, device='cpu', world_size=8)\n"
    project.write(test_net=f"{head}\ndef test_it(size, torchmem):\n{body}")
    result = project.run("--torchmem-world-size=4", "--torchmem-update")
    result.tells("*'size' was set up as rank 0 of 4*the check is of rank 0 of 8*")


def test_fixtures_are_set_up_in_the_world_of_their_test(project):
    project.run(test_net=IN_FIXTURES, passed=8)


OF_ALL_RANKS = f"""{HEAD}{MESH}
@pytest.fixture(scope="session")
def group():
    dist.init_process_group()
    yield dist.group.WORLD
    assert dist.get_rank() == int(os.environ["RANK"])
    dist.destroy_process_group()

@pytest.fixture
def on_cpu(group):
    return fully_shard(nn.Linear(64, 64), mesh=dist.init_device_mesh("cpu", (8,)))

@pytest.fixture(scope="module")
def copied(group):
    return DistributedDataParallel(nn.Linear(64, 64).cuda())

@pytest.fixture
def wide():
    return nn.Linear(64, 64 if os.environ["RANK"] == "0" else 256)

BUDGET = pytest.mark.memory_budget("20 MiB", device="cuda", world_size=8, ranks=(0, 3))

def steps(model, device):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = model(torch.ones(2, 64, device=device)).sum()
        loss.backward()
        if loss.item() < 1e9:  # which a trace begins anew for
            optimizer.step()

@BUDGET
@pytest.mark.parametrize("time", [1, 2])
def test_sharded(sharded, mesh, time):
    rank = dist.get_rank()
    assert mesh.get_coordinate() == (rank // 2, rank % 2)
    steps(sharded, "cuda")
    assert {{one.device.index for one in sharded.parameters()}} == {{rank}}

@pytest.mark.memory_budget("20 MiB", device="cpu", world_size=8, ranks=(7, 0))
def test_on_cpu(on_cpu):
    assert on_cpu.weight.grad is None
    steps(on_cpu, "cpu")

@BUDGET
@pytest.mark.parametrize("time", [1, 2])
def test_copied(copied, time):
    copied(torch.ones(2, 64, device="cuda")).sum().backward()

@pytest.mark.memory_budget("{{limit}}", device="cpu", world_size=8, ranks=(0, 3, 7))
def test_check(wide, torchmem):
    torchmem.check(wide, torch.ones(4, 64), name="one")
    torchmem.check(lambda: wide(torch.ones(4, 64)).sum().backward(), name="two")

def test_plain():
    assert "RANK" not in os.environ and not dist.is_initialized()
"""


def test_fixtures_are_those_of_each_rank(project):
    tests = OF_ALL_RANKS.replace("{limit}", "1 MiB")
    result, checks = project.checks(test_net=tests, passed=7)
    result.tells("16 memory checks: *")
    peaks = {}
    for check in checks:
        peaks.setdefault(check["test"].partition("[")[0], set()).add(check["figures"]["peak"])
    assert [len(peaks[name]) for name in ("test_sharded", "test_on_cpu", "test_copied")] == [1] * 3


def test_ranks_that_fail_are_one_failure(project):
    project.write(test_net=OF_ALL_RANKS.replace("{limit}", "100 KiB"))
    result = project.run("-k", "test_check", failed=1)
    result.tells("E *, cpu, rank 3 of 8*, cpu, rank 7 of 8")
    result.stdout.no_fnmatch_line("E *rank 0 of 8*")


def test_a_check_finds_the_group_of_a_fixture(project):
    test = """
def test_it(group, torchmem):
    assert dist.get_world_size() == 16
    def step():
        dist.all_reduce(torch.ones(64, device="cuda"), group=group)
        assert dist.get_rank() == 8
    torchmem.check(step, device="cuda")
    assert torchmem.trace(step, device="cuda").rank == 8
"""
    fixtures = IN_FIXTURES.partition("@pytest.mark.parametrize")[0]
    options = ("--torchmem-world-size=16", "--torchmem-ranks=8", "--torchmem-update")
    project.run(*options, test_net=fixtures + test, passed=1)
    project.run(*options, "--torchmem-fake-cuda=h100", passed=1)
