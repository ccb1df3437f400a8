"""Updates store what cuDNN tells, and checks without cuDNN give the same figures."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pytest_torchmem import trace
from pytest_torchmem.cudnn import library as asked
from pytest_torchmem.cudnn.questions import Answer, ExecutionPlan, Question
from pytest_torchmem.measurement import device as devices
from pytest_torchmem.targets.gpus import CUDNN, Setup, WorkspaceSize
from pytest_torchmem.torch_private.names import TORCH_SERIES
from tests.measurement.stand_in import StandIn
from tests.plugin.conftest import CONVOLUTIONS, Project, Result, checking

MIB = 1024**2
FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"
TEST = checking('net(), image(), device="cuda"', head="from model import *\n")


@dataclass(eq=False)
class Told:
    """A cuDNN whose workspaces are the same for every question."""

    workspace: int = 3 * MIB
    version: tuple[int, int, int] = (9, 20, 0)
    asked: list[Question] = field(default_factory=list)

    def ask(self, capability: tuple[int, int], multiprocessors: int, question: Question) -> Answer:
        """Answer, and note the question."""
        assert (capability, multiprocessors) == ((8, 0), 108)
        self.asked.append(question)
        return Answer((ExecutionPlan(self.workspace, 22),))


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_device", lambda: StandIn(why_not="there is none"))


def there_is(monkeypatch: pytest.MonkeyPatch, found: Told | str) -> Any:
    """Let this be the cuDNN that is installed, or say why there is none."""
    monkeypatch.setattr(asked, "library", lambda: found)
    return found


def run(project: Project, *options: str, **given: int | str) -> tuple[Result, dict[str, Any]]:
    """Run the tests; return the result and the check of the JSON report."""
    result, (check,) = project.checks(*options, model=CONVOLUTIONS, **given)
    return result, check


def test_an_update_stores_answers_and_checks_without_cudnn_take_them(project, monkeypatch):
    there_is(monkeypatch, Told())
    result, with_cudnn = run(project, "--torchmem-update", test_net=TEST)
    result.tells("wrote __torchmem__/gpu-calibration.json: 2 new")
    ((setup, figures),) = project.calibration().items()
    assert setup == Setup("a100-80gb", TORCH_SERIES, "9.20.0", CUDNN)
    asked_for = {question.operator.removeprefix("cudnn::convolution_") for question in figures}
    assert asked_for == {"forward", "backward_weight"}
    assert set(figures.values()) == {WorkspaceSize(3 * MIB)}
    assert with_cudnn["library_workspaces"] == [FORWARD, BACKWARD]
    assert (with_cudnn["cudnn"], with_cudnn["warnings"]) == ("9.20.0", [])
    assert with_cudnn["workspaces"]["library"] == 3 * MIB
    there_is(monkeypatch, "cuDNN is not installed (the extra cudnn)")
    files = ("--torchmem-markdown=report.md", "--junitxml=report.xml")
    result, without = run(project, "--torchmem-strict", "-v", *files, passed=1)
    assert without["figures"] == with_cudnn["figures"]
    assert without["library_workspaces"] == with_cudnn["library_workspaces"]
    result.tells(f"workspace told by cuDNN 9.20.0: {FORWARD}: test_net.py::test_it")
    assert f"workspace that cuDNN 9.20.0 told for: `{FORWARD}`" in project.read("report.md")
    assert 'library_workspaces" value="aten::convolution' in project.read("report.xml")
    project.write(test_net=TEST.replace("image()", "image(48)"))
    result, check = run(project, failed=1)  # the image is larger
    assert check["unknown_workspaces"] == [FORWARD, BACKWARD]
    (warning,) = check["warnings"]
    assert warning.endswith("cuDNN was not asked: cuDNN is not installed (the extra cudnn)")


def test_what_is_installed_changes_nothing_before_an_update(project, monkeypatch):
    """A snapshot that passes here must pass where there is no cuDNN."""
    cudnn = there_is(monkeypatch, Told())
    _, check = run(project, test_net=TEST)
    assert not cudnn.asked
    assert check["unknown_workspaces"] == [FORWARD, BACKWARD]
    (warning,) = check["warnings"]
    assert "pytest --torchmem-update stores them" in warning


def test_another_cudnn_is_told_like_another_torch(project, monkeypatch):
    there_is(monkeypatch, Told())
    run(project, "--torchmem-update", test_net=TEST)
    there_is(monkeypatch, Told(9 * MIB, (9, 26, 0)))
    result, check = run(project, failed=1)
    assert (check["outcome"], check["cudnn"]) == ("grew", "9.26.0")
    said = " ".join(result.stdout.str().replace("\nE ", " ").split())  # lines are folded
    assert "were told by cuDNN 9.20.0, and those of this run by cuDNN 9.26.0" in said
    result, _ = run(project, "--torchmem-update")
    result.tells("wrote __torchmem__/gpu-calibration.json: 2 changed*")
    ((setup, figures),) = project.calibration().items()
    assert (setup.cudnn, set(figures.values())) == ("9.26.0", {WorkspaceSize(9 * MIB)})
    run(project, passed=1)
    # Answers that no test asks for are removed.
    run(project, "--torchmem-update", test_net=TEST.replace("net()", "net(8)"))
    ((_, others),) = project.calibration().items()
    assert len(others) == 2
    assert not others.keys() & figures.keys()


def test_the_option_of_a_trace(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch, Told())
    test = """
from model import *

def test_it(torchmem):
    asked = torchmem.trace(net(), image(), device="cuda", cudnn="auto")
    assert asked.library_workspaces == ("aten::convolution", "aten::convolution_backward")
    assert torchmem.trace(net(), image(), device="cuda").unknown_workspaces
    with pytest.raises(ValueError, match="cudnn='live': expected one of 'auto', 'stored'"):
        torchmem.trace(net(), image(), device="cuda", cudnn="live")
"""
    project.run(model=CONVOLUTIONS, test_net=test, passed=1)


def test_stored_answers_where_cudnn_fails(project, monkeypatch):
    """Its folder is broken, or its process is ended."""
    there_is(monkeypatch, Told())
    _, before = run(project, "--torchmem-update", test_net=TEST)
    there_is(monkeypatch, Failing())
    _, check = run(project, "--torchmem-strict", passed=1)
    assert check["figures"] == before["figures"]
    answers = project.calibration()
    run(project, "--torchmem-update")
    assert project.calibration() == answers
    project.file("gpu-calibration").unlink()
    _, check = run(project, "--torchmem-update")
    (warning,) = check["warnings"]
    assert warning.endswith("; cuDNN 9.20.0: cuDNN cannot be loaded: no such file")


class Failing(Told):
    """A cuDNN that cannot be loaded."""

    def ask(self, capability: tuple[int, int], multiprocessors: int, question: Question) -> Answer:
        """Say why there is no answer."""
        return Answer(why="cuDNN cannot be loaded: no such file", is_failure=True)


def test_fused_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """ConvShared.cpp, ``cudnn_convolution_add_relu``: what is added comes into the format."""
    told = there_is(monkeypatch, Told())

    def body() -> None:
        x = torch.ones(2, 4, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        weight, z = torch.ones(8, 4, 3, 3, device="cuda"), torch.ones(2, 8, 8, 8, device="cuda")
        sizes = ([1, 1], [1, 1], [1, 1], 1)
        torch.cudnn_convolution_relu(x, weight, torch.ones(8, device="cuda"), *sizes)
        torch.cudnn_convolution_add_relu(x, weight, z, 0.5, None, *sizes)

    profile = trace(body, device="cuda", gpu="a100")
    assert not profile.unknown_workspaces
    relu, add_relu = (question.geometry for question in told.asked)
    last = "float32[2,8,8,8]@512:1:64:8"
    assert f"{last}, {last}, float32[1,8,1,1]@8:1:8:8, 0, [1,1]" in relu
    assert f"{last}, {last}, float32[1,8,1,1]@8:1:8:8, 0.5, [1,1]" in add_relu
    assert {question.operator for question in told.asked} == {"cudnn::convolution_add_relu"}
    weight, z, bias = 4 * 8 * 4 * 9, 4 * 2 * 8 * 64, 4 * 8  # two copies, and zeros for the bias
    # Of the second, at the peak.
    assert profile.by_confidence()["library"] == 3 * MIB + weight + z + bias
