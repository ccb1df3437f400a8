"""``--torchmem-fake-cuda``: whole suites, without a marker, as if a GPU were there."""

import sys
from pathlib import Path

import pytest
import torch

from pytest_torchmem import trace
from pytest_torchmem.torch_private.compiler import COMPILER, NotNeeded
from pytest_torchmem.torch_private.patches import replaced_all

from .conftest import Project

CONFTEST = """
import pytest, torch
HAS_CUDA = torch.cuda.is_available()

def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip)

@pytest.fixture(scope="session")
def hog():
    tensor = torch.empty(1 << 20, device="cuda")
    yield tensor
    assert tensor.is_cuda
"""
SUITE = """
import gc, pytest, torch, unittest
from torch import nn
from torch.cuda import max_memory_allocated
from pytest_torchmem import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = torch.arange(10)
ON_GPU = torch.zeros(1 << 18, device=DEVICE)

def step():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(32, 64, device=DEVICE)).sum().backward()
    optimizer.step()

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak():
    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = trace(lambda: (step(), step()), device="cuda", gpu="h100").replay()["peak"]
    assert max_memory_allocated() - before == peak.allocated > 0

def test_session_scope(hog):
    assert torch.cuda.memory_allocated() >= hog.nbytes + ON_GPU.nbytes

def test_it_stays_counted():
    assert torch.cuda.memory_allocated() >= (4 << 20) + ON_GPU.nbytes

def test_cache():
    torch.empty(1 << 26, device="cuda")
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved - (4 << 26)

def test_too_large():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 30, device="cuda")

@pytest.mark.xfail(raises=torch.OutOfMemoryError, strict=True)
def test_too_large_too():
    torch.empty(100 << 30, device="cuda")

@pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * torch.cuda.device_count())
def test_devices(device):
    assert torch.ones(2, device=device).device.type == device

def test_host():
    linear = nn.Linear(3, 3)
    rows = linear(torch.eye(3)) - linear.bias
    assert torch.allclose(rows, linear.weight.t(), atol=1e-6)
    assert TABLE.sum() == 45 and (TABLE.cuda().cpu() == TABLE).all()

class TestOfUnittest(unittest.TestCase):
    def setUp(self):
        self.tensor = torch.ones(3, device="cuda")

    def test_it(self):
        self.assertTrue(self.tensor.is_cuda)

@pytest.mark.memory_budget("1 GiB")
def test_marked(hog):
    step()

def test_checked(torchmem):
    assert set(torchmem.check(step, name="own")) == {"cuda"}
"""


def test_a_suite(project: Project) -> None:
    project.write(conftest=CONFTEST, test_net=SUITE)
    trace(torch.zeros, 1, device="cuda")  # what is registered once in a process stays
    before = dict(vars(torch.cuda)), dict(vars(torch.Tensor)), dict(vars(torch))
    result = project.run("--torchmem-fake-cuda=h100", "--torchmem-update", passed=11, xfailed=1)
    result.tells("torchmem*every test sees a fake h100")
    assert {entry["device"] for entry in project.entries().values()} == {"cuda"}
    assert (dict(vars(torch.cuda)), dict(vars(torch.Tensor)), dict(vars(torch))) == before
    assert not torch.cuda.is_available()


def test_it_is_an_option_or_stands_in_the_ini_file(project: Project) -> None:
    project.run(conftest=CONFTEST, test_net=SUITE, skipped=11)
    project.ini("torchmem_fake_cuda = t4")
    test = "import torch\ndef test_net():\n    assert torch.cuda.is_available()\n"
    project.run(test_net=test, passed=1)


def test_an_import_that_fails_shows_the_lines_of_the_program(monkeypatch):
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    instead = NotNeeded().replacements(lambda: True)
    with pytest.raises(ModuleNotFoundError) as failure, replaced_all(instead):
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401
    shown = failure.traceback.filter(failure)
    assert {Path(entry.path).name for entry in shown} == {Path(__file__).name}


def test_a_gpu_that_is_not_known(project: Project) -> None:
    result = project.run("--torchmem-fake-cuda=h1000", test_net="def test_net(): pass")
    result.is_refused("*'h1000' is not a known GPU*")
    result = project.run("--torchmem-fake-cuda=h100", "--torchmem-measure=require")
    result.is_refused("*require needs torch's own CUDA code*leave out one of them*")


def test_a_gpu_of_the_project(project: Project) -> None:
    conftest = """
from pytest_torchmem import Gpu
import dataclasses
from pytest_torchmem.targets.gpus import find_gpu
def pytest_torchmem_register_gpus(config):
    return [dataclasses.replace(find_gpu("t4"), name="ours", product="Our GPU")]
"""
    test = """
import torch
def test_net():
    assert torch.cuda.get_device_name() == "Our GPU"
"""
    project.run("--torchmem-fake-cuda=ours", conftest=conftest, test_net=test, passed=1)


def test_failures_show_their_variables(project: Project) -> None:
    test = """
import torch
def test_net():
    large = torch.randn(1000, 1000, device="cuda")
    host = large.cpu()
    assert large.sum() is host
"""
    options = ("--torchmem-fake-cuda=h100", "-l", "--torchmem-values=none")
    result = project.run(*options, test_net=test, failed=1)
    result.tells("large *= tensor(..., device='cuda:0', size=(1000, 1000)*")


BY_VALUES = """
import pytest, torch
@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(16, 4).cuda()
def test_learns(model):
    x, y = torch.randn(8, 16, device="cuda"), torch.randint(0, 4, (8,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] < 10
    assert (model(x).argmax(1) == y).float().mean() > 0.2
    torch.testing.assert_close(model(x).cpu(), torch.nn.functional.linear(x.cpu(), *(
        one.cpu() for one in model.parameters())))
"""
MANY = """
import pytest, torch
from pytest_torchmem.tracing import layers
@pytest.mark.parametrize("number", range(30))
def test_net(number):
    for _ in range(20):
        torch.ones(8, device="cuda").sin()
    (gpu,) = layers._STANDING
    assert gpu.booked[0] >= 40 * number
    assert len(gpu._devices[0].entries) <= 50
"""
PINNED = """
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.data import DataLoader, TensorDataset

def test_pinned():
    x = torch.randn(3, 5)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and pinned.pin_memory() is pinned and not x.is_pinned()
    assert torch.equal(pinned, x) and pinned.data_ptr() != x.data_ptr()
    assert torch.equal(pinned.cuda(non_blocking=True).cpu(), x)
    makes = [torch.empty, torch.ones, torch.randn, x.new_zeros, x.new_empty]
    made = [make(3, pin_memory=True) for make in makes] + [torch.zeros_like(x, pin_memory=True)]
    assert all(one.is_pinned() for one in made)
    for device in ("cpu", "cuda"):
        a = torch.ones(5, device=device, requires_grad=True)
        with save_on_cpu(pin_memory=True):
            (a * a).sum().backward()
        assert a.grad.tolist() == [2.0] * 5
    loader = DataLoader(TensorDataset(torch.arange(4.0)), 2, pin_memory=True)
    assert all(batch.is_pinned() for batch, in loader)
"""


def test_tests_decide_by_values_pin_the_real_host_and_do_not_grow_the_ledger(project):
    project.write(test_many=MANY, test_pinned=PINNED, test_values=BY_VALUES)
    project.run("--torchmem-fake-cuda=h100", passed=32)


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_a_suite_closes_with_its_largest_tests(project: Project, options: list[str]) -> None:
    tests = """
import pytest, torch

@pytest.mark.parametrize("mib", [*range(1, 13), 20 << 10])
def test_net(mib):
    torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

def test_small():
    torch.ones(3)
"""
    result = project.run("--torchmem-fake-cuda=t4", *options, test_net=tests, passed=13, failed=1)
    result.tells("*largest tests on cuda (t4)*", " 12.00 MiB  test_net.py::test_net[[]12]")
    result.tells("out of memory: test_net.py::test_net[[]20480]")
    result.stdout.no_fnmatch_line("every test fits*")
    assert "test_net[2]" not in result.stdout.str()
    if not options:
        result = project.run("--torchmem-fake-cuda=t4", "-k", "not 20480", passed=13)
        result.tells("every test fits on * of the * GPUs of the catalogue, the *")
