"""Checks that run on a real GPU too; a stand-in with an allocator of its own is that GPU."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_torchmem.plugin import stand_in
from pytest_torchmem.targets.gpus import Gpu, find_gpu, gpu_names
from tests.measurement.stand_in import StandIn
from tests.plugin.conftest import Project, Result, checking, valid

MIB = 1024**2
MODEL = """
import os
import pytest
import torch
from torch import nn

WIDTH = 4096

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return ((x * self.weight) * 2.0).cos() * self.weight

def inputs():
    return torch.ones(64, WIDTH)
"""
ONE = checking("Net(), inputs(){}", head="from model import *\n")
BODY = """
from model import *

def device():
    return "cuda" if torch.cuda.is_available() else "cpu"

@pytest.fixture(scope="module")
def net():
    return Net()

@pytest.mark.memory_budget(tolerance="1%", device="cuda")
def test_it(net):
    x = torch.ones(64, WIDTH, device=device())
    net.to(device())(x).sum().backward()
    assert net.weight.grad is not None

@pytest.mark.memory_budget(tolerance="1%", device="cuda")
def test_the_fixture_is_as_it_was(net):
    assert net.weight.grad is None
    net.to(device())(torch.ones(64, WIDTH, device=device()))
"""
NONE = StandIn(why_not="there is no CUDA device here")


@pytest.fixture
def project(project: Project) -> Project:
    project.write(model=MODEL, test_net=ONE.format(""))
    return project


@pytest.fixture
def gpu(there_is: Any) -> StandIn:
    """A GPU like the default one of traces."""
    return there_is(StandIn())


def entries(project: Project) -> dict[str, Any]:
    data = valid(json.loads(project.file().read_text()), "snapshot")
    return {entry["device"]: entry for entry in data["entries"]}


def test_what_the_gpu_counted_is_stored_and_compared(project, gpu, there_is):
    result, checks = project.checks("--torchmem-update", passed=1)
    cpu, cuda = checks
    assert cpu["measurement"] is None
    found = cuda["measurement"]
    assert (found["gpu"], found["torch"]) == ("a100-80gb", torch.__version__.partition("+")[0])
    # A sum on cuda takes partial results besides, which the stand-in's kernel does not.
    more = found["estimate"]["forward_peak"] - found["figures"]["forward_peak"]
    assert 0 < more <= 512
    assert found["figures"]["forward_peak"] > 3 * MIB
    assert found["estimate"] == cuda["figures"]
    stored = entries(project)
    assert "measured" not in stored["cpu"]
    told = stored["cuda"]["measured"]["a100-80gb"]
    assert told["forward_peak"][0] == found["figures"]["forward_peak"]
    assert told["reserved_peak"][0] == found["figures"]["reserved_peak"]
    assert "baseline" not in told

    result, checks = project.checks(passed=1)
    assert {change["verdict"] for change in checks[1]["measurement"]["changes"]} == {"same"}
    result.tells("  a100-80gb, measured *traced +* B (+0.0 %)*measured")

    with project.unchanged():
        result, _ = project.checks("--torchmem-update")
        result.stdout.no_fnmatch_line("wrote *")
        there_is(NONE)
        _, checks = project.checks("--torchmem-update", passed=1)
        assert checks[1]["measurement"] is None

    project.write(test_net=ONE.format("[:32]"))  # it was not counted for this trace
    project.checks("--torchmem-update")
    assert "measured" not in entries(project)["cuda"]


def test_each_gpu_has_its_own_figures(project: Project, gpu: StandIn, there_is: Any) -> None:
    project.checks("--torchmem-update")
    there_is(StandIn("h100"))
    _, checks = project.checks(passed=1)
    assert checks[1]["gpu"] == "a100-80gb"
    assert checks[1]["measurement"]["gpu"] == "h100"
    assert checks[1]["measurement"]["changes"] == []
    _, checks = project.checks("--torchmem-update=new")
    assert checks[1]["outcome"] == "updated"
    assert set(entries(project)["cuda"]["measured"]) == {"a100-80gb", "h100"}


def test_a_gpu_that_the_catalogue_does_not_have(project: Project, there_is: Any) -> None:
    known = gpu_names()
    a100 = find_gpu("a100-80gb")
    own = Gpu("rtx-4070", "NVIDIA GeForce RTX 4070", (8, 9), 12 * 1024 * MIB, 46, 1536)
    there_is(StandIn(own))
    _, checks = project.checks("--torchmem-update", passed=1)
    assert checks[1]["gpu"] == a100.name
    assert checks[1]["measurement"]["gpu"] == "rtx-4070"
    assert checks[1]["measurement"]["estimate"]["peak"] > 3 * MIB
    assert gpu_names() == known


def test_a_measured_peak_that_grew_fails(project: Project, gpu: StandIn) -> None:
    project.checks("--torchmem-update")
    path = project.file()
    data = json.loads(path.read_text())
    told = data["entries"][1]["measured"]["a100-80gb"]
    told["backward_peak"] = int(told["backward_peak"][0] * 0.9)
    path.write_text(json.dumps(data))
    _, checks = project.checks(failed=1)
    assert checks[1]["outcome"] == "measured grew"
    assert checks[0]["outcome"] == "passed"
    assert "cuda (a100-80gb): measured on a100-80gb, backward peak grew by" in checks[1]["message"]
    assert "beyond its tolerance of 1%" in checks[1]["message"]

    _, checks = project.checks("--torchmem-update", "--torchmem-update-max=5%", failed=1)
    assert "more than --torchmem-update-max=5% accepts" in checks[1]["message"]
    project.checks("--torchmem-update=changed", passed=1)
    project.checks(passed=1)


class Wasteful(StandIn):
    """A GPU whose kernels take a tenth more than a trace knows of."""

    def statistics(self) -> dict[str, int]:
        found = super().statistics()
        found["requested_bytes.all.peak"] += found["requested_bytes.all.peak"] // 10
        return found


def test_an_estimate_that_is_off_fails(project: Project, there_is: Any) -> None:
    there_is(Wasteful())
    result, checks = project.checks("--torchmem-update", failed=1)
    assert not (project.path / "__torchmem__").exists()
    assert checks[1]["outcome"] == "estimate off"
    message = checks[1]["message"]
    assert "cuda (a100-80gb): trace and a100-80gb disagree: " in message
    assert "outside --torchmem-measure-tolerance=5%" in message
    assert "-9.1 %" in message
    result, _ = project.checks("--torchmem-update", "--torchmem-measure-tolerance=10%", passed=1)
    result.tells("*a100-80gb, measured*traced -*(-9.1 %)*measured")


def test_both_failures_are_told(project: Project, gpu: StandIn, there_is: Any) -> None:
    project.checks("--torchmem-update", test_net=ONE.format("[:32]"))
    there_is(Wasteful())
    _, checks = project.checks(test_net=ONE.format(""), failed=1)
    assert checks[1]["outcome"] == "grew"
    for part in ("grew by", "trace and a100-80gb disagree", "measured on a100-80gb, "):
        assert part in checks[1]["message"]


def test_a_budget_holds_for_what_the_gpu_counts(project, gpu, there_is):
    marked = ONE.format("").replace("def ", '@pytest.mark.memory_budget({}, device="cuda")\ndef ')
    _, checks = project.checks(test_net=marked.format('"1 GiB"'))
    peak = checks[0]["figures"]["peak"]
    there_is(Wasteful())
    project.write(test_net=marked.format(peak))
    _, checks = project.checks("--torchmem-measure-tolerance=20%", failed=1)
    assert checks[0]["outcome"] == "over budget"
    assert ", measured on a100-80gb, cuda (a100-80gb)" in checks[0]["message"]
    project.checks("--torchmem-measure=never", passed=1)


def test_a_whole_body_is_run_for_real_on_copies_of_its_fixtures(project, gpu):
    _, checks = project.checks("--torchmem-update", test_net=BODY, passed=2)
    assert all(check["measurement"]["figures"]["peak"] > MIB for check in checks)


@pytest.mark.parametrize("mode", ["option", "ini", "check", "marker"])
def test_never_asks_the_gpu_nothing(project: Project, gpu: StandIn, mode: str) -> None:
    text = ONE.format(', measure="never"' if mode == "check" else "")
    if mode == "marker":
        mark = '@pytest.mark.memory_budget(tolerance="1%", measure="never")\n'
        text = text.replace("def ", mark + "def ")
    if mode == "ini":
        project.ini("torchmem_measure = never")
    project.write(test_net=text)
    options = ["--torchmem-measure=never"] if mode == "option" else []
    _, checks = project.checks("--torchmem-update", *options, passed=1)
    assert gpu.calls == []
    assert checks[1]["measurement"] is None


def test_a_check_that_passes_imports_nothing_that_explains_draws_or_asks(project: Project) -> None:
    unused = ("diagnosis", "graphs", "advice", "stand_in", "profile.pictures", "profile.formats")
    project.write(
        model=MODEL,
        test_net=ONE.format("") + "    import os, sys\n"
        "    names = {one.partition('.')[2] for one in sys.modules if 'pytest_torchmem' in one}\n"
        f"    assert 'snapshots.compare' in names and names.isdisjoint({unused!r})\n"
        "    assert ('measurement.device' in names) == os.path.exists('__torchmem__')\n"
        "    assert not torch.cuda.is_initialized()\n",
    )
    project.run_apart("--torchmem-update", "--torchmem-measure=never", passed=1)
    project.run_apart(passed=1)


def test_require_fails_without_a_gpu(project: Project, there_is: Any) -> None:
    there_is(NONE)
    project.checks("--torchmem-update", passed=1)
    result, checks = project.checks("--torchmem-measure=require", failed=1)
    assert checks[-1]["outcome"] == "not checked"
    result.tells("*not measured: there is no CUDA device here, and*require*")


@pytest.mark.parametrize("bad", ["sometimes", "AUTO", ""])
def test_modes_that_do_not_exist(project: Project, bad: str) -> None:
    project.write(model=MODEL, test_net=ONE.format(f", measure={bad!r}"))
    project.run().tells(f"*check(measure=): {bad!r}: write auto, never or require*")


def test_what_is_too_large_for_the_gpu_is_skipped_with_the_reason(project, there_is):
    tiny = Gpu("tiny", "Tiny GPU", (8, 0), 4 * MIB, 10, 2048, context=MIB)
    found = there_is(StandIn(tiny))
    result, checks = project.checks("--torchmem-update", passed=1)
    reason = checks[1]["measurement"]["not_measured"]
    assert reason.startswith("does not fit on Tiny GPU (4.00 MiB): aten::mul.Tensor needs")
    assert "start_history" not in found.calls
    assert "measured" not in entries(project)["cuda"]
    result.tells(f"not measured: test_net.py::test_it: {reason}")


def test_what_others_have_is_not_there(project: Project, gpu: StandIn) -> None:
    gpu.others = find_gpu("a100-80gb").memory - 2 * MIB
    _, checks = project.checks("--torchmem-update", passed=1)
    reason = checks[1]["measurement"]["not_measured"]
    assert "2.00 MiB of 79.25 GiB are free (other processes use" in reason


def test_what_runs_out_of_memory_all_the_same(project: Project, there_is: Any) -> None:
    class Full(StandIn):
        def request(self, storage: torch.UntypedStorage) -> None:
            if storage.nbytes() >= MIB:
                raise self.out_of_memory("CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0")
            super().request(storage)

    there_is(Full())
    _, checks = project.checks("--torchmem-update", passed=1)
    assert "the step needs more memory than" in checks[1]["measurement"]["not_measured"]


def test_what_the_real_step_raises_is_the_tests_own(project: Project, there_is: Any) -> None:
    class Breaking(StandIn):
        def start_history(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    there_is(Breaking())
    result, checks = project.checks("--torchmem-update", failed=1)
    result.tells("*RuntimeError: CUDA error: device-side assert triggered")
    assert checks[-1]["message"] == "not checked: RuntimeError was raised"


def test_workers_send_what_they_measured(project: Project, gpu: StandIn, there_is: Any) -> None:
    text = ONE.format("") + checking("Net(), inputs()[:8]", name="other")
    project.checks("--torchmem-update", test_net=text, passed=2)
    path = project.file()
    serial = path.read_bytes()
    path.unlink()
    root = str(Path(__file__).parents[2])
    conftest = f"""
import sys
def pytest_configure(config):
    if hasattr(config, 'workerinput'):  # the controller needs no torch
        sys.path.append({root!r})
        from pytest_torchmem.measurement import device
        from tests.measurement.stand_in import StandIn
        device.cuda_device = lambda found=StandIn(): found
"""
    project.run_apart("--torchmem-update", "-n1", conftest=conftest, passed=2)
    assert path.read_bytes() == serial
    assert serial.count(b'"measured"') == 2


SUITE = """
import os
import pytest
import torch
from torch import nn

@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_it(torchmem):
    {}
    torchmem.check(nn.Linear(8, 8), torch.ones(4, 8))

def test_other():
    pass
"""


@pytest.fixture
def without_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "stand_in_environment", lambda gpu: dict(os.environ))


def run(project: Project, line: str, *options: str, **outcomes: int) -> Result:
    project.write(test_net=SUITE.format(line))
    return project.run("--torchmem-measure=stand-in", *options, **outcomes)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_without_a_cuda_build_it_is_refused(project: Project) -> None:
    result = run(project, "pass")
    result.is_refused("ERROR: the stand-in needs a CUDA build of torch*")
    result.stdout.no_fnmatch_line("*test_net.py*")
    result = run(project, "pass", "--torchmem-fake-cuda=t4")
    result.is_refused("ERROR: torchmem: torchmem_measure: stand-in needs torch*")
    asking = SUITE.format("").replace("torch.ones(4, 8)", "torch.ones(4, 8), measure='stand-in'")
    project.run(test_net=asking).tells("*check(measure=)*write auto, never or require*")


def test_a_process_that_a_test_ends_is_followed_by_another(project, without_stand_in):
    line = "'TORCHMEM_STAND_IN_GPU' in os.environ and os.abort()"
    run(project, line, "--torchmem-json=report.json", passed=2).tells(
        "not measured: test_net.py::test_it: the process with the stand-in was ended by SIGABRT"
    )


def test_a_test_that_does_not_end_is_ended(project, without_stand_in, monkeypatch):
    monkeypatch.setattr(stand_in, "_MOST_SECONDS", 2)
    line = "'TORCHMEM_STAND_IN_GPU' in os.environ and __import__('time').sleep(1000)"
    run(project, line, passed=2).tells("not measured: *::test_it: the test takes more than 2 s*")


def test_a_process_that_cannot_begin_ends_the_run_with_its_last_line(project, without_stand_in):
    there = "import os\nif 'TORCHMEM_STAND_IN_GPU' in os.environ:\n"
    project.write(conftest=f"{there}    raise ImportError('no such library')\n")
    run(project, "pass").is_refused("ERROR: --torchmem-measure=stand-in*no such library*")
