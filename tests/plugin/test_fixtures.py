"""Fixtures of memory tests on a fake GPU, and tests beside them that see the machine as it is."""

import json
from typing import Any

from .conftest import Project, Result

FIXTURES = """
import pytest, torch, unittest
from torch import nn

LOG = []

@pytest.fixture(scope="module")
def model():
    model = nn.Linear(256, 256).to("cuda")
    yield model
    LOG.append(str(model.weight.device))

@pytest.fixture(scope="session")
def device():
    LOG.append(f"device {torch.cuda.is_available()}")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

@pytest.fixture(scope="session")
def neutral():
    LOG.append("neutral")
    return object()
"""
BODY = (256 * 256 + 256) * 4
"""Bytes of the model's parameters."""


def run(project: Project, text: str, *options: str, **outcomes: int) -> Result:
    project.write(test_net=FIXTURES + text)
    return project.run("--torchmem-json=out.json", "-p", "no:randomly", *options, **outcomes)


def checks(project: Project) -> dict[tuple[str, str], dict[str, Any]]:
    report = json.loads((project.path / "out.json").read_text())
    return {(check["test"], check["device"]): check for check in report["checks"]}


def test_what_a_fixture_makes_was_there_before(project: Project) -> None:
    text = """
@pytest.fixture
def unused():
    return torch.empty(1 << 20, device="cuda")

@pytest.mark.memory_budget("1 GiB")
def test_fixture(model, device):
    model(torch.zeros(2, 256, device=device)).sum().backward()

@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_body():
    model = nn.Linear(256, 256).to("cuda")
    model(torch.zeros(2, 256, device="cuda")).sum().backward()

@pytest.mark.memory_budget("1 GiB")
def test_unused(model, unused):
    model(torch.zeros(2, 256, device="cuda")).sum().backward()

@pytest.mark.memory_budget("1 GiB")
def test_again(model):
    assert model.weight.grad is None
    model(torch.zeros(2, 256, device="cuda")).sum().backward()
"""
    run(project, text, passed=4)
    figures = {test: one["figures"] for (test, on), one in checks(project).items() if on != "cpu"}
    peaks = {test: found["peak"] for test, found in figures.items()}
    assert peaks["test_fixture"] == peaks["test_again"] == peaks["test_body"]
    assert peaks["test_unused"] == peaks["test_body"] + (4 << 20)
    assert figures["test_fixture"]["baseline"] == BODY


def test_such_a_test_is_checked_on_cuda_alone(project: Project) -> None:
    text = """
@pytest.mark.memory_budget("1 GiB")
def test_net(model):
    model(torch.zeros(2, 256, device="cuda")).sum().backward()

@pytest.mark.memory_budget("1 GiB")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parameter(device):
    nn.Linear(8, 8).to(device)(torch.ones(1, 8, device=device)).sum().backward()

@pytest.mark.memory_budget("1 GiB", device="cpu")
def test_named(model):
    model(torch.zeros(2, 256))
"""
    run(project, text, passed=3, errors=1).tells(
        "*the marker of the test names cpu alone, so its fixtures see no fake GPU*",
        "2 tests checked on cuda alone, where the fixtures are: test_net.py::test_net, "
        "test_net.py::test_parameter[[]cuda]",
    )
    found = checks(project)
    assert found["test_net", "cpu"]["outcome"] == "not checked"
    assert found["test_parameter[cpu]", "cpu"]["outcome"] == "passed"
    run(project, text, "--torchmem-devices=cpu", passed=1, skipped=2, errors=1)


def test_fixtures_of_a_test_for_the_cpu_choose_the_cpu(project: Project) -> None:
    text = """
@pytest.fixture(scope="module")
def chosen(device):
    return nn.Linear(256, 256).to(device)

@pytest.mark.memory_budget("1 GiB", device="cpu")
def test_cpu(chosen, device):
    assert chosen.weight.device.type == device.type == "cpu"
    chosen(torch.zeros(2, 256)).sum().backward()

@pytest.mark.memory_budget("1 GiB")
def test_both(chosen, device):
    assert chosen.weight.device.type == device.type == "cuda"
    chosen(torch.zeros(2, 256, device=device)).sum().backward()

@pytest.mark.memory_budget("1 GiB", device="cpu")
def test_cpu_again(chosen, device):
    assert chosen.weight.device.type == device.type == "cpu"
    chosen(torch.zeros(2, 256))
"""
    run(project, text, passed=3)


def test_tests_without_the_marker_see_the_machine(project: Project) -> None:
    text = """
def test_real(device, neutral):
    assert device.type == "cpu" and not torch.cuda.is_available()

@pytest.mark.memory_budget("1 GiB")
def test_net(model, device, neutral):
    assert device.type == "cuda"
    model(torch.zeros(2, 256, device=device))

def test_real_again(device, neutral):
    assert device.type == "cpu" and not torch.cuda.is_available()
    assert torch.zeros(2, device=device).sum() == 0

@pytest.mark.memory_budget("1 GiB")
def test_net_again(model, device, neutral):
    assert device.type == "cuda"
    model(torch.zeros(2, 256, device=device))

def test_log(request):
    assert LOG.count("neutral") == 1
    assert LOG.count("device True") == LOG.count("device False") == 2

def test_on_no_gpu(model):
    pass
"""
    result = run(project, text)
    result.assert_outcomes(passed=5, errors=1)  # without a GPU the fixture fails as always


def test_a_fixture_is_torn_down_where_it_was_set_up(project: Project) -> None:
    text = """
@pytest.fixture(scope="module")
def outer(model):
    yield model
    LOG.append(f"outer {model.weight.device} {torch.cuda.is_available()}")

@pytest.mark.memory_budget("1 GiB")
def test_net(outer):
    outer(torch.zeros(2, 256, device="cuda"))

def test_other():
    pass
"""
    project.write(
        conftest="""
import sys
def pytest_sessionfinish():
    print("LOG", sys.modules["test_net"].LOG)
"""
    )
    assert "LOG ['outer cuda:0 True', 'cuda:0']" in run(project, text, "-s", passed=2).stdout.str()


def test_the_fixture_torchmem(project: Project) -> None:
    text = """
def test_net(torchmem, model):
    assert torch.cuda.is_available() and model.weight.is_cuda
    x = torch.zeros(2, 256, device="cuda")
    def step():
        model(x).sum().backward()
    assert set(torchmem.check(step)) == {"cuda"}
    assert torchmem.trace(step).device == "cuda"
    assert set(torchmem.check(model, x, name="module")) == {"cpu", "cuda"}
    assert model.weight.grad is None

def test_without(torchmem, neutral):
    assert not torch.cuda.is_available()
    assert set(torchmem.check(nn.Linear(2, 2), torch.zeros(1, 2))) == {"cpu", "cuda"}
"""
    run(project, text, "--torchmem-update", passed=2)


def test_unittest(project: Project) -> None:
    text = """
class TestNet(unittest.TestCase):
    def setUp(self):
        self.model = nn.Linear(256, 256).cuda()

    @pytest.mark.memory_budget("1 GiB")
    def test_net(self):
        self.model(torch.zeros(2, 256).cuda()).sum().backward()
"""
    run(project, text, passed=1)
    found = checks(project)
    assert found["TestNet::test_net", "cuda"]["figures"]["baseline"] == BODY
    assert found["TestNet::test_net", "cpu"]["outcome"] == "not checked"


def test_a_body_that_asks_for_cuda(project: Project) -> None:
    text = """
@pytest.mark.memory_budget("1 GiB", device="cpu")
def test_net():
    nn.Linear(8, 8).to("cuda")

@pytest.mark.memory_budget("1 GiB")
async def test_async():
    pass

@pytest.mark.memory_budget("1 GiB")
class TestNet:
    def test_net(self):
        nn.Linear(8, 8)(torch.ones(1, 8))
"""
    output = run(project, text, passed=1, failed=2).stdout.str()
    assert "the program asks for cuda, and the trace is on cpu: name the device" in output
    assert "test_async is asynchronous" in output
    assert "Torch not compiled" not in output


def test_skipped_for_want_of_a_gpu(project: Project) -> None:
    text = """
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")

@needs_gpu
@pytest.mark.memory_budget("1 GiB")
def test_net():
    nn.Linear(8, 8).to("cuda")

@pytest.mark.skipif(not torch.cuda.is_available(), reason="without a name")
def test_check(torchmem):
    pass

@pytest.mark.skipif(True, reason="on Tuesdays")
@pytest.mark.memory_budget("1 GiB")
def test_other():
    pass

@pytest.mark.skipif("not torch.cuda.is_available()")
@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_condition():
    nn.Linear(8, 8).to("cuda")
"""
    run(project, text, passed=1, skipped=3).tells(
        "2 tests never checked, because they are skipped where there is no GPU: run pytest "
        "with --torchmem-fake-cuda=h100, or remove the skipif*: test_net.py::test_net, "
        "test_net.py::test_check"
    )
    assert checks(project)["test_net", ""]["message"] == "never checked: no device"
    project.run("--torchmem-fake-cuda=h100", passed=3, skipped=1)


def test_tensors_that_a_test_leaks(project: Project) -> None:
    text = """
KEPT = []

@pytest.fixture
def leaking():
    KEPT.append(torch.randn(1000, 1000, device="cuda"))

@pytest.mark.memory_budget("1 GiB")
def test_net(leaking):
    nn.Linear(8, 8)(torch.ones(1, 8))

def test_reads():
    assert KEPT[0].device.type == "cpu" and KEPT[0].std() > 0.5
"""
    run(project, text, passed=2)


def test_other_gpus(project: Project) -> None:
    text = """
@pytest.fixture
def name():
    return torch.cuda.get_device_name(), torch.empty(1, device="cuda")

@pytest.mark.memory_budget("1 GiB", gpu="t4")
def test_small(name):
    assert name[0] == torch.cuda.get_device_name() == "Tesla T4"

@pytest.mark.memory_budget("1 GiB")
def test_default(name):
    assert "A100" in name[0]

@pytest.fixture
def huge():
    return torch.empty(1 << 40, device="cuda")

@pytest.mark.memory_budget(gpu="t4")
def test_huge(huge):
    pass
"""
    assert "torch.OutOfMemoryError" in run(project, text, passed=2, errors=1).stdout.str()


def test_disabled(project: Project) -> None:
    text = """
@pytest.mark.memory_budget("1 GiB")
def test_net(device):
    assert device.type == "cpu"
"""
    run(project, text, "--torchmem-disable", passed=1)


def test_mocks_hold_in_checks_and_a_directory_that_is_gone_is_no_obstacle(project: Project) -> None:
    project.write(
        test_net="""
import pytest, torch
from unittest.mock import patch
from torch import nn

@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

@pytest.fixture
def net():
    return nn.Linear(8, 8).cuda()

@pytest.mark.memory_budget("1 GiB", device="cuda")
@pytest.mark.parametrize("turn", range(2))
def test_marked(net, four, turn):
    assert torch.cuda.device_count() == 4
    net(torch.ones(1, 8).cuda()).sum().backward()

@pytest.mark.memory_budget("1 GiB", device="cuda")
@patch("torch.cuda.device_count", return_value=3)
def test_decorated(counted, net):
    assert torch.cuda.device_count() == 3
    net(torch.ones(1, 8).cuda()).sum().backward()
    counted.assert_called()

@pytest.mark.parametrize("there", [False, True])
def test_checked(torchmem, four, there):
    with patch("torch.cuda.is_available", return_value=there):
        torchmem.check(nn.Linear(8, 8), torch.ones(1, 8), device="cpu")
        torchmem.check(nn.Linear(8, 8), torch.ones(1, 8), device="cuda", name="gpu")

@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_nothing_is_left(net):
    assert torch.cuda.device_count() == 1
    net(torch.ones(1, 8).cuda()).sum().backward()

def test_real():
    assert torch.cuda.device_count.__globals__["__name__"] == "torch.cuda"
    assert torch.cuda.is_available.__globals__["__name__"] == "torch.cuda"
""",
        test_other="""
import os, torch

def test_there(torchmem, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    torchmem.check(lambda: torch.ones(8, requires_grad=True).sum().backward())
    os.chdir(tmp_path)
""",
    )
    project.run("--torchmem-update", passed=8)
